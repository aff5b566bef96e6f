"""Episodes of the MTP contract: played on the reference interpreter, and recorded step by step.

A record says what was sent, from whom to whom, and where every stage stands afterwards. :mod:`.golden` writes
the records to files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from attrs import define, evolve, field

from dgr.core.mtp import CONTRACT
from dgr.core.values import Expectation, Key
from dgr.testing.mtp_contract.messages import MtpWork, Rollback, Want, encode_message, message_name
from dgr.testing.mtp_contract.reference import Language
from dgr.testing.mtp_contract.rollback import RollbackShape
from dgr.testing.mtp_contract.route import ReferenceRoute
from dgr.testing.mtp_contract.shard import expectation

__all__ = ["BORDERS", "EPISODES", "ROUTE_ID", "Episode", "border_grid", "text_of"]

#: Identity of the route session in every episode.
ROUTE_ID = bytes(range(16))
_SHAPE = RollbackShape(planes=3, n_ubatch=64, n_batch=256, n_ctx=512)
#: The positions around the ends of blocks of 4 and of 128, from which the border grid starts its rounds.
BORDERS = (2, 3, 4, 5, 6, 7, 8, 9, 123, 124, 125, 126, 127, 128, 129, 130, 131, 132, 251, 252, 253, 254, 255, 256, 257)


def text_of(length: int, language: Language | None = None) -> list[int]:
    """What the toy writes by itself: a prompt of two tokens, and its own continuation."""
    route = ReferenceRoute(1, RollbackShape(0), language=language)
    session = route.open()
    route.prefill(session, [17, 33])
    route.settle()
    while len(route.sessions[session].transcript) < length:
        route.send_round(session, 0)
        route.settle()
    return route.sessions[session].transcript[:length]


def _wrong(token: int) -> int:
    """Another token than the right one."""
    return token + 1 if token < 500 else token - 1


@define
class Episode:
    """A route with one session, and the record of what was done with it."""

    name: str
    says: str
    n_stages: int = 3
    shape: RollbackShape = _SHAPE
    language: Language = field(factory=Language)
    steps: list[dict[str, Any]] = field(factory=list)
    frames: list[tuple[str, str, bytes]] = field(factory=list)
    route: ReferenceRoute = field(init=False)
    session: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.route = ReferenceRoute(self.n_stages, self.shape, language=self.language, route_id=ROUTE_ID)
        self.session = self.route.open()

    # --- what can be done ---

    def prefill(self, tokens: Sequence[int], draft: int = 3, chunk: int | None = None) -> None:
        self.route.prefill(self.session, tokens, draft=draft, chunk=chunk)
        self._settle({"act": "prefill", "tokens": list(tokens), "draft": draft, "chunk": chunk or self.shape.n_batch})

    def round(self, candidates: Sequence[int] | None = None, draft: int = 3) -> None:
        """A whole round; with ``candidates`` in place of the tail's own guesses."""
        self.route.send_round(self.session, draft, candidates)
        self._settle({"act": "round", "draft": draft})

    def begin_round(self, acts: int, candidates: Sequence[int] | None = None, draft: int = 3) -> None:
        """The first acts of a round."""
        self.route.send_round(self.session, draft, candidates)
        for _ in range(acts):
            self.route.tick()
        self._record({"act": "begin round", "draft": draft, "acts": acts})

    def roll_back(self, k: int) -> None:
        self.route.roll_back(self.session, k)
        self._settle({"act": "roll back", "k": k})

    def cancel(self) -> None:
        self.route.cancel(self.session)
        self._settle({"act": "cancel"})

    def change_route(self, n_stages: int) -> None:
        self.n_stages = n_stages
        self.route.change_route(n_stages)
        self._settle({"act": "change route", "layers": self._layers(), "epoch": self.route.epoch})

    def evict(self, stage: int) -> None:
        self.route.evict(stage, self.session)
        self._record({"act": "evict", "stage": stage})

    def inject(self, message: MtpWork | Rollback, says: str) -> None:
        """A message that no pipeline of this contract would send, to the head."""
        self.route.inject(message)
        self._settle({"act": "inject", "says": says})

    @property
    def transcript(self) -> list[int]:
        return self.route.sessions[self.session].transcript

    @property
    def committed(self) -> int:
        return self.route.sessions[self.session].committed

    @property
    def key(self) -> Key:
        return Key(ROUTE_ID, self.route.epoch, self.session)

    # --- the record ---

    def _layers(self) -> list[str]:
        return [str(shard.layers) for shard in self.route.shards]

    def _settle(self, step: dict[str, Any]) -> None:
        self.route.settle()
        self._record(step)

    def _record(self, step: dict[str, Any]) -> None:
        sent = self.route.sent
        self.frames += [(one.sender, one.receiver, encode_message(one.message)) for one in sent]
        step["sent"] = [
            {
                "from": one.sender,
                "to": one.receiver,
                "message": message_name(type(one.message)),
                "frame": encode_message(one.message).hex(),
            }
            for one in sent
        ]
        step["in_flight"] = [[str(stage), message.seq] for stage, message in self.route.on_the_way]
        client = self.route.sessions[self.session]
        step["pipeline"] = {
            "state": client.state.value,
            "committed": client.committed,
            "n_tokens": len(client.transcript),
            "last": client.transcript[-1],
        }
        step["stages"] = [
            None if view is None else msgspec.to_builtins(view) for view in self.route.views(self.session)
        ]
        self.route.sent = []
        self.steps.append(step)

    def as_json(self) -> dict[str, Any]:
        return {
            "contract": CONTRACT,
            "episode": self.name,
            "says": self.says,
            "session": self.session,
            "eos": self.language.eos,
            "steps": self.steps,
        }


# --- the episodes ----------------------------------------------------------------------------------------------------


def _candidates(text: Sequence[int], committed: int, right: int, n: int) -> list[int]:
    """``n`` candidates behind the token at ``committed``, of which the first ``right`` are."""
    found = list(text[committed + 1 : committed + 1 + right])
    return (found + [_wrong(text[committed + 1 + right])] * (n - right))[:n]


def _started(name: str, says: str, position: int, **options: Any) -> tuple[Episode, list[int]]:
    """An episode whose session stands at ``position``, with the next token drawn, and the text it writes."""
    episode = Episode(name, says, **options)
    text = text_of(position + 40, episode.language)
    episode.steps.append({"act": "open", "shape": _shape(episode.shape), "layers": episode._layers(), "epoch": 1})
    episode.prefill(text[:position])
    return episode, text


def _shape(shape: RollbackShape) -> dict[str, int]:
    return {name: getattr(shape, name) for name in ("planes", "n_ubatch", "n_batch", "n_seq_max", "n_ctx")}


def accept_all() -> Episode:
    episode, text = _started("accept-all", "Every candidate is right: nothing is rolled back.", 6)
    episode.round(_candidates(text, episode.committed, 3, 3))
    episode.round(_candidates(text, episode.committed, 3, 3))
    return episode


def reject_all() -> Episode:
    episode, text = _started("reject-all", "No candidate is right: all are rolled back, on every stage.", 126)
    episode.round(_candidates(text, episode.committed, 0, 3))
    episode.round(_candidates(text, episode.committed, 0, 3))
    return episode


def own_guesses() -> Episode:
    episode, _ = _started("own-guesses", "Six rounds with the guesses of the tail's own MTP block.", 12)
    for _ in range(6):
        episode.round()
    return episode


def work_behind_rollback() -> Episode:
    says = "The next round follows a rollback at once, before it is answered: both flow along the chain in order."
    episode, text = _started("work-behind-rollback", says, 126)
    episode.route.send_round(episode.session, 3, _candidates(text, episode.committed, 1, 3))
    while not any(isinstance(one.message, Rollback) for one in episode.route.sent):
        episode.route.tick()
    episode._record({"act": "begin round", "draft": 3})
    episode.round(_candidates(text, episode.committed, 2, 3))
    return episode


def rollback_refused() -> Episode:
    says = "Rollbacks that are not exact, or not the session's own, are refused by the head; nothing changes anywhere."
    episode, text = _started("rollback-refused", says, 30, shape=evolve(_SHAPE, planes=8))
    episode.round(_candidates(text, episode.committed, 2, 2))
    for k in (4, 9, 33):
        episode.roll_back(k)
    at, tokens = episode.committed, episode.transcript
    other = [*tokens[: at - 1], _wrong(tokens[at - 1])]
    episode.inject(
        Rollback(episode.key, 90, expectation(tokens, at - 1), expectation(tokens, at - 2)), "from elsewhere"
    )
    episode.inject(Rollback(episode.key, 91, expectation(other, at), expectation(tokens, at - 1)), "of other tokens")
    episode.inject(
        Rollback(episode.key, 92, expectation(tokens, at), Expectation(at - 2, bytes(16))), "to other tokens"
    )
    episode.inject(Rollback(episode.key, 93, expectation(tokens, at), expectation(tokens, at)), "of nothing")
    return episode


def work_refused() -> Episode:
    says = "Work that cannot be is refused before anything runs."
    episode, text = _started("work-refused", says, 30, shape=evolve(_SHAPE, n_ctx=64))
    at, key = episode.committed, episode.key
    expect = expectation(episode.transcript, at)

    def work(seq: int, tokens: Sequence[int], candidates: int = 0, **changes: Any) -> MtpWork:
        made = MtpWork(key, seq, expect, tuple(tokens), Want.TOKEN, candidates, 0, None, 0)
        return msgspec.structs.replace(made, **changes)

    stale = Key(ROUTE_ID, key.epoch - 1, key.session)
    episode.inject(work(90, text[at : at + 1], key=stale), "of an epoch that is over")
    episode.inject(work(91, text[at : at + 1], key=Key(ROUTE_ID, key.epoch, 77)), "of a session that is not there")
    episode.inject(work(92, text[at : at + 1], expect=expectation(text, at + 1)), "from elsewhere")
    episode.inject(work(93, text[at : at + 1], expect=Expectation(at, bytes(16))), "behind other tokens")
    episode.inject(work(94, text[at : at + 5], 4), "with more candidates than planes")
    episode.inject(work(95, text[at : at + 2], 2), "of nothing but candidates")
    episode.inject(work(96, text[: 64 - at + 1]), "beyond the context")
    return episode


def two_rollbacks() -> Episode:
    says = (
        "Two rollbacks without a decode between them do not add up; after single tokens one is exact, and two are not."
    )
    episode, text = _started("two-rollbacks", says, 125)
    episode.round(_candidates(text, episode.committed, 3, 3))
    episode.roll_back(2)
    episode.roll_back(1)
    episode.prefill([], draft=0, chunk=1)
    episode.roll_back(2)
    episode.roll_back(1)
    return episode


def one_slot_prompt() -> Episode:
    says = (
        "With one slot, a prompt of n_ubatch + 1 tokens leaves one token in the last ubatch: two cannot be rolled back."
    )
    episode, _ = _started("one-slot-prompt", says, 65)
    episode.roll_back(2)
    episode.roll_back(1)
    return episode


def several_slots_prompt() -> Episode:
    says = (
        "With several slots the last 1 + R tokens stay in one ubatch, whatever was merged: R tokens can be rolled back."
    )
    episode, _ = _started("several-slots-prompt", says, 65, shape=evolve(_SHAPE, n_seq_max=2))
    episode.roll_back(3)
    return episode


def epoch_in_a_draft() -> Episode:
    says = "A new epoch while the tail drafts: everything goes, MTP's own cache too; the text is prefilled anew and goes on."
    episode, text = _started("epoch-in-a-draft", says, 126)
    episode.begin_round(5, _candidates(text, episode.committed, 1, 3))
    episode.change_route(2)
    episode.round()
    episode.round()
    return episode


def epoch_in_a_verification() -> Episode:
    says = "A new epoch of the same stages while work is between two of them: the work arrives, and is stale."
    episode, text = _started("epoch-in-a-verification", says, 9)
    episode.begin_round(1, _candidates(text, episode.committed, 1, 3))
    episode.change_route(3)
    episode.round()
    return episode


def cancel_in_a_draft() -> Episode:
    says = (
        "A cancel while the tail drafts: the round drains, its candidates are rolled back, right or wrong; it goes on."
    )
    episode, text = _started("cancel-in-a-draft", says, 126)
    episode.begin_round(5, _candidates(text, episode.committed, 2, 3))
    episode.cancel()
    episode.round()
    return episode


def cancel_before_the_head() -> Episode:
    says = "A cancel before the head has started the work: it is dropped there, and nothing has changed."
    episode, text = _started("cancel-before-the-head", says, 9)
    episode.begin_round(0, _candidates(text, episode.committed, 2, 3))
    episode.cancel()
    episode.round()
    return episode


def cancel_in_a_prefill() -> Episode:
    says = "A cancel of a prefill in chunks: those that the head has started drain, the others are dropped."
    episode, text = _started("cancel-in-a-prefill", says, 4)
    episode.route.prefill(episode.session, text[5:30], draft=3, chunk=8)
    episode.route.tick()
    episode._record({"act": "begin prefill", "tokens": text[5:30], "draft": 3, "chunk": 8, "acts": 1})
    episode.cancel()
    episode.prefill([])
    return episode


def eviction() -> Episode:
    says = "A middle stage evicts the idle session: its next message is refused there, the session is lost everywhere."
    episode, text = _started("eviction", says, 20)
    episode.round(_candidates(text, episode.committed, 1, 3))
    episode.evict(1)
    episode.round(_candidates(text, episode.committed, 1, 3))
    episode.round()
    return episode


def end_of_text() -> Episode:
    says = "The second of three candidates is the end of the text, and right: nothing behind it is accepted."
    text = text_of(40)
    episode, _ = _started("end-of-text", says, 9, language=evolve(Language(), eos=text[11]))
    episode.round(text[10:13])
    return episode


#: Every episode, by name.
EPISODES: Mapping[str, Callable[[], Episode]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        accept_all,
        reject_all,
        own_guesses,
        work_behind_rollback,
        rollback_refused,
        work_refused,
        two_rollbacks,
        one_slot_prompt,
        several_slots_prompt,
        epoch_in_a_draft,
        epoch_in_a_verification,
        cancel_in_a_draft,
        cancel_before_the_head,
        cancel_in_a_prefill,
        eviction,
        end_of_text,
    )
}


#: Starts of one walk of the border grid are at least this far apart, so that no round reaches the next start.
_APART = 6


def border_grid() -> list[dict[str, Any]]:
    """Rounds of k candidates, m of them right, from every position in :data:`BORDERS`: where a whole stage stands then."""
    text = text_of(BORDERS[-1] + 12)
    rows = []
    for k in range(1, 5):
        for m in range(k + 1):
            found = [row for first in range(_APART) for row in _walk(text, BORDERS[first::_APART], k, m)]
            rows += sorted(found, key=lambda row: int(row["from"]))
    return rows


def _walk(text: Sequence[int], starts: Sequence[int], k: int, m: int) -> Iterator[dict[str, Any]]:
    """One session from start to start."""
    route = ReferenceRoute(1, RollbackShape(4, n_ubatch=64, n_batch=512), route_id=ROUTE_ID)
    session = route.open()
    client = route.sessions[session]
    for position in starts:
        route.prefill(session, text[len(client.transcript) : position])
        route.settle()
        route.send_round(session, 0, _candidates(text, position, m, k))
        route.settle()
        yield {"from": position, "k": k, "m": m, "stage": msgspec.to_builtins(route.views(session)[0])}
