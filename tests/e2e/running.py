"""A pipeline over probed stages, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

from dgr.client.pipeline import Pipeline
from dgr.client.session import ClientSession
from dgr.cluster.local import LocalCluster, ShardPolicy
from dgr.core.values import ContextParams
from dgr.engine.base import ShardEngine
from dgr.testing.engines.mutants import Mutant
from dgr.testing.state_inspector import InspectedEngine

#: What runs in place of a stage's engine, given that engine.
Mutate = Callable[[InspectedEngine], ShardEngine | Mutant]


@frozen
class Running:
    """A pipeline, and what stands behind it."""

    pipeline: Pipeline
    cluster: LocalCluster
    #: The stages' engines, head first, without their mutations.
    engines: Sequence[InspectedEngine]

    def slot_of(self, session: ClientSession, stage: int = 0) -> int:
        """The slot a session holds on a stage."""
        shard = self.cluster.shards[f"stage-{stage}"]
        (slot,) = [
            lease.slot
            for lease in shard.ledger.leases
            if self._key(lease.owner) == self.pipeline._client.key(session.id)
        ]
        return slot

    @staticmethod
    def _key(owner: Any) -> Any:
        return owner[0]  # (key, sequence number of the Open)

    def images(self, session: ClientSession) -> list[dict[Any, bytes]]:
        """Every byte of state that a session has, per stage."""
        return [engine.image(self.slot_of(session, stage)) for stage, engine in enumerate(self.engines)]

    def assert_slots_empty(self) -> None:
        """What no session holds is zero, on every stage."""
        for stage, engine in enumerate(self.engines):
            held = {lease.slot for lease in self.cluster.shards[f"stage-{stage}"].ledger.leases}
            for slot in set(range(engine.describe().context.n_seq_max)) - held:
                image = engine.image(slot)
                assert set(engine.raw_positions(slot)) == {-1}
                assert not any(any(image[key]) for key in engine.owned()), f"slot {slot} of stage {stage} is not empty"


class Open(Protocol):
    """``async with open_stages(model, split, context) as running``."""

    def __call__(
        self,
        path: Path,
        split: str,
        context: ContextParams,
        *,
        mutate: Mapping[int, Mutate] | None = None,
        policy: ShardPolicy | None = None,
        **options: Any,
    ) -> AbstractAsyncContextManager[Running]: ...
