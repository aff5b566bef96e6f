"""The MTP contract (``docs/mtp-contract.md``) as values and as an executable model, for whoever is going to implement it.

Values: :mod:`.ownership` (tensors, duties, state, bytes), :mod:`.messages` (what crosses a seam), :mod:`.states` (transition
tables), :mod:`.rollback` (when a rollback is exact). Interpreted position by position: :mod:`.reference` (a session's layers
and MTP block), :mod:`.shard` (a stage), :mod:`.route` (a route and its pipeline). Proofs: :mod:`.episodes`, :mod:`.golden`
(the fixtures of ``tests/mtp/golden``), :mod:`.gate` (the entry exam).
"""
