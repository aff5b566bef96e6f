"""The entry exam for multi-token prediction: what must pass before the contract may be called executable.

Each check is a public report of speculation gone wrong, turned round: state that a rollback spoiled, tokens that differ
with speculation, beginnings of text and other special tokens in long answers, a session that spoils its neighbour,
acceptance that depends on the cut. They drive an :class:`MtpExecutor` and know nothing of what is behind it. The reference
interpreter passes all of them; everything else refuses with :class:`~dgr.errors.MtpNotExecutable`, and so the exam is
closed to it until there is a new version of the contract.

    for name, check in CHECKS.items():
        check(executor)     # raises ExamFailed, with what was found
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from dgr.core.mtp import CONTRACT
from dgr.engine.llama import LlamaEngine
from dgr.errors import InputError
from dgr.testing.mtp_contract.messages import Reason, Want
from dgr.testing.mtp_contract.reference import Language
from dgr.testing.mtp_contract.rollback import RollbackShape
from dgr.testing.mtp_contract.route import ReferenceRoute, Round
from dgr.testing.mtp_contract.shard import ReferenceShard

__all__ = [
    "CHECKS",
    "ExamFailed",
    "LlamaExecutor",
    "MtpExecutor",
    "MtpRoute",
    "ReferenceExecutor",
    "RollbackRefused",
]


class ExamFailed(AssertionError):
    """A check of the entry exam found what must not be."""


class RollbackRefused(InputError):
    """A stage refused to roll back; nothing was changed."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(f"a stage refused to roll back: {reason.name}")
        self.reason = reason


class MtpRoute(Protocol):
    """Sessions on a route that speculates. Every call returns when nothing of the session is in flight any more."""

    def open(self) -> int: ...

    def prefill(self, session: int, tokens: Sequence[int], *, draft: int = 0, answer: bool = True) -> None:
        """Commit ``tokens`` behind the transcript; with ``answer``, draw the next one and draft behind it."""
        ...

    def round(self, session: int, draft: int) -> Round:
        """Verify the guesses at hand, roll back what was wrong, draft anew. Re-prefills a session that was lost."""
        ...

    def roll_back(self, session: int, k: int) -> None:
        """Take back ``k`` tokens on every stage, or raise :class:`RollbackRefused`. They stay in the transcript."""
        ...

    def interrupt(self, session: int, draft: int, after: int, how: str) -> bool:
        """A round struck after ``after`` of its acts by ``cancel`` or by a new ``epoch``; False: it was over before."""
        ...

    def change_route(self, n_stages: int) -> None: ...

    def evict(self, stage: int, session: int) -> None: ...

    def transcript(self, session: int) -> Sequence[int]:
        """Every token that is certain."""
        ...

    def positions(self, session: int) -> Sequence[int]:
        """Tokens committed, by stage."""
        ...

    def live(self, session: int) -> Sequence[bytes]:
        """Digests of all state that what comes next is computed from: one a stage, and one of the MTP block."""
        ...


class MtpExecutor(Protocol):
    """Something that executes MTP, or says that it does not."""

    name: str
    #: Token ids that no answer may contain.
    special: frozenset[int]

    def open_route(self, n_stages: int, shape: RollbackShape) -> MtpRoute: ...


# --- executors -------------------------------------------------------------------------------------------------------


class _ReferenceMtpRoute:
    def __init__(self, route: ReferenceRoute) -> None:
        self._route = route

    def open(self) -> int:
        return self._route.open()

    def prefill(self, session: int, tokens: Sequence[int], *, draft: int = 0, answer: bool = True) -> None:
        self._route.prefill(session, tokens, draft=draft, want=Want.TOKEN if answer else Want.NOTHING)
        self._route.settle()

    def round(self, session: int, draft: int) -> Round:
        self._route.send_round(session, draft)
        self._route.settle()
        return self._route.sessions[session].rounds[-1]

    def roll_back(self, session: int, k: int) -> None:
        before = len(self._route.sessions[session].refusals)
        self._route.roll_back(session, k)
        self._route.settle()
        for refusal in self._route.sessions[session].refusals[before:]:
            raise RollbackRefused(refusal.reason)

    def interrupt(self, session: int, draft: int, after: int, how: str) -> bool:
        self._route.send_round(session, draft)
        for _ in range(after):
            self._route.tick()
        strikes = self._route.acts_left > 0
        if how == "cancel":
            self._route.cancel(session)
        else:
            self._route.change_route(len(self._route.shards))
        self._route.settle()
        return strikes

    def change_route(self, n_stages: int) -> None:
        self._route.change_route(n_stages)

    def evict(self, stage: int, session: int) -> None:
        self._route.evict(stage, session)

    def transcript(self, session: int) -> Sequence[int]:
        return self._route.sessions[session].transcript

    def positions(self, session: int) -> Sequence[int]:
        return self._route.positions(session)

    def live(self, session: int) -> Sequence[bytes]:
        return self._route.live(session)


class ReferenceExecutor:
    """The contract interpreted. ``shard``: another class of stage, with a defect to be found."""

    name = "reference"

    def __init__(
        self, shard: type[ReferenceShard] = ReferenceShard, route: type[ReferenceRoute] = ReferenceRoute
    ) -> None:
        self._shard, self._route = shard, route
        self.special = Language().special

    def open_route(self, n_stages: int, shape: RollbackShape) -> MtpRoute:
        return _ReferenceMtpRoute(self._route(n_stages, shape, shard=self._shard))


class LlamaExecutor:
    """The llama engine: refuses, as long as the contract is reserved."""

    name = "llama"
    special: frozenset[int] = frozenset()

    def __init__(self, model: Path) -> None:
        self._model = model

    def open_route(self, n_stages: int, shape: RollbackShape) -> NoReturn:
        asked: Any = {"mtp": CONTRACT}
        LlamaEngine(self._model, **asked).stop()
        raise ExamFailed(f"the llama engine took {n_stages} stages with {shape} and did not refuse {CONTRACT}")


# --- what the checks share -------------------------------------------------------------------------------------------

_PROMPT = (17, 33, 5, 91, 260, 404, 77, 19, 23, 8, 150)
#: Positions at whose next tokens blocks of 4 and of 128 end, or just do not.
_BORDERS = (12, 13, 15, 16, 24, 127, 128, 129, 131, 132, 140, 255, 256, 258, 261, 272)


def _expect(found: object, wanted: object, what: str) -> None:
    if found != wanted:
        raise ExamFailed(f"{what}: found {found!r}, expected {wanted!r}")


def _answer(route: MtpRoute, draft: int, length: int, prompt: Sequence[int] = _PROMPT) -> list[int]:
    """A transcript of that length, in a new session."""
    session = route.open()
    route.prefill(session, prompt, draft=draft)
    while len(route.transcript(session)) < length:
        route.round(session, draft)
    return list(route.transcript(session)[:length])


def _tokens(length: int) -> list[int]:
    return [3 + (at * at + 7 * at) % 500 for at in range(length)]


def _states(executor: MtpExecutor, n_stages: int, shape: RollbackShape, length: int) -> list[tuple[bytes, ...]]:
    """The state after each number of tokens of :func:`_tokens`, when nothing is ever rolled back."""
    route = executor.open_route(n_stages, shape)
    session = route.open()
    states: list[tuple[bytes, ...]] = [()]
    for token in _tokens(length):
        route.prefill(session, [token], answer=False)
        states.append(tuple(route.live(session)))
    return states


def _as_if_new(executor: MtpExecutor, route: MtpRoute, session: int, n_stages: int, shape: RollbackShape) -> None:
    """Every stage stands at the same position, with exactly the state that a fresh prefill leaves."""
    positions = set(route.positions(session))
    if len(positions) != 1:
        raise ExamFailed(f"the stages stand at {sorted(positions)}")
    committed = positions.pop()
    other = executor.open_route(n_stages, shape)
    fresh = other.open()
    other.prefill(fresh, route.transcript(session)[:committed], answer=False)
    _expect(tuple(route.live(session)), tuple(other.live(fresh)), f"state after {committed} tokens")


def _refused(route: MtpRoute, session: int, k: int) -> Reason | None:
    """Why a rollback is refused, after making sure that nothing was changed; None: it was done."""
    before = (tuple(route.positions(session)), tuple(route.live(session)))
    try:
        route.roll_back(session, k)
    except RollbackRefused as refused:
        after = (tuple(route.positions(session)), tuple(route.live(session)))
        _expect(after, before, f"state after a refused rollback of {k}")
        return refused.reason
    return None


# --- the checks ------------------------------------------------------------------------------------------------------


def speculation_changes_no_token(executor: MtpExecutor) -> None:
    """The same text with and without guesses, however long they are."""
    plain = _answer(executor.open_route(2, RollbackShape(0)), 0, 280)
    for planes, draft in ((1, 1), (3, 2), (8, 8)):
        _expect(_answer(executor.open_route(2, RollbackShape(planes)), draft, 280), plain, f"text with {draft} guesses")


def acceptance_is_the_same_split_or_whole(executor: MtpExecutor) -> None:
    """Every round has the same candidates and accepts the same number of them, on one stage or on several."""
    found = []
    for n_stages in (1, 2, 4):
        route = executor.open_route(n_stages, RollbackShape(4))
        session = route.open()
        route.prefill(session, _PROMPT, draft=4)
        found.append([(one.candidates, one.accepted) for one in (route.round(session, 4) for _ in range(60))])
    for rounds in found[1:]:
        _expect(rounds, found[0], "acceptance")
    if not any(accepted for _, accepted in found[0]):
        raise ExamFailed("no guess was ever right: what drafts does not see what the trunk sees")


def rollback_grid(executor: MtpExecutor) -> None:
    """Every rollback within min(R, n_last) restores the very state before; every other one is refused."""
    states = _states(executor, 2, RollbackShape(8), max(_BORDERS))
    tokens = _tokens(max(_BORDERS))
    for planes in (1, 4, 8):
        for n_last, k in itertools.product(sorted({1, 2, planes + 1}), range(1, planes + 1)):
            route = executor.open_route(2, RollbackShape(planes))
            session = route.open()
            for position in _BORDERS:
                done = len(route.transcript(session))
                if done > position - n_last:
                    continue  # the step before went too far
                route.prefill(session, tokens[done : position - n_last], answer=False)
                route.prefill(session, tokens[position - n_last : position], answer=False)
                _expect(tuple(route.live(session)), states[position], f"state after {position} tokens")
                reason = _refused(route, session, k)
                _expect(reason, None if k <= n_last else Reason.BUDGET, f"R {planes}, n_last {n_last}, rollback of {k}")
                kept = position if reason else position - k
                _expect(tuple(route.live(session)), states[kept], f"state after a rollback from {position} to {kept}")


def two_rollbacks_do_not_add_up(executor: MtpExecutor) -> None:
    """The second one is refused until something was decoded."""
    shape = RollbackShape(8)
    route = executor.open_route(2, shape)
    session = route.open()
    route.prefill(session, _tokens(130)[:122], answer=False)
    route.prefill(session, _tokens(130)[122:], answer=False)
    _expect(_refused(route, session, 2), None, "the first rollback")
    _expect(_refused(route, session, 1), Reason.PENDING, "the second rollback")
    _as_if_new(executor, route, session, 2, shape)
    route.prefill(session, [], answer=False)
    _expect(_refused(route, session, 2), None, "a rollback after two tokens")
    _as_if_new(executor, route, session, 2, shape)


def a_prompt_that_leaves_one_token(executor: MtpExecutor) -> None:
    """With one slot a prompt of n_ubatch + 1 tokens leaves one in the last ubatch; with several the tail is kept."""
    for n_seq_max, reason in ((1, Reason.BUDGET), (2, None)):
        shape = RollbackShape(4, n_ubatch=64, n_seq_max=n_seq_max)
        route = executor.open_route(2, shape)
        session = route.open()
        route.prefill(session, _tokens(65), answer=False)
        _expect(_refused(route, session, 2), reason, f"a rollback of 2 with {n_seq_max} slots")
        _as_if_new(executor, route, session, 2, shape)


def nothing_to_go_back_to(executor: MtpExecutor) -> None:
    """No rollback reaches the beginning, or crosses a new epoch: there is nothing behind it."""
    shape = RollbackShape(4)
    route = executor.open_route(2, shape)
    session = route.open()
    route.prefill(session, _tokens(3), answer=False)
    _expect(_refused(route, session, 3), Reason.RANGE, "a rollback to the beginning")
    route.change_route(3)
    route.prefill(session, [], answer=False)
    _as_if_new(executor, route, session, 3, shape)
    _expect(_refused(route, session, 2), None, "a rollback after a re-prefill")
    _as_if_new(executor, route, session, 3, shape)


def sessions_do_not_meet(executor: MtpExecutor) -> None:
    """Rounds of two sessions in turn, with rollbacks in both, and each returns what it returns alone."""
    shape, prompts = RollbackShape(4, n_seq_max=2), (_PROMPT, tuple(reversed(_PROMPT)))
    alone = [_answer(executor.open_route(2, shape), 3, 150, prompt) for prompt in prompts]
    route = executor.open_route(2, shape)
    sessions = [route.open() for _ in prompts]
    for session, prompt in zip(sessions, prompts, strict=True):
        route.prefill(session, prompt, draft=3)
    while min(len(route.transcript(session)) for session in sessions) < 150:
        for session in sessions:
            route.round(session, 3)
    for session, text in zip(sessions, alone, strict=True):
        _expect(list(route.transcript(session)[:150]), text, f"text of session {session}")


def long_answers_leak_nothing(executor: MtpExecutor) -> None:
    """A long answer has no beginning of text, no other special token, and does not go round in a circle."""
    text = _answer(executor.open_route(2, RollbackShape(4)), 4, 900)
    leaked = executor.special.intersection(text)
    if leaked:
        raise ExamFailed(f"special tokens {sorted(leaked)} first at {min(text.index(token) for token in leaked)}")
    for period in range(1, 65):
        if text[-period:] * 3 == text[-3 * period :]:
            raise ExamFailed(f"the text goes round with a period of {period} tokens")


def speculation_leaves_no_trace(executor: MtpExecutor) -> None:
    """After any number of rounds, state is what a fresh prefill of the same tokens leaves, the MTP block's included."""
    shape = RollbackShape(5)
    route = executor.open_route(3, shape)
    session = route.open()
    route.prefill(session, _tokens(118), draft=5)
    for _ in range(25):
        route.round(session, 5)
        _as_if_new(executor, route, session, 3, shape)


def _struck(executor: MtpExecutor, how: str) -> None:
    shape = RollbackShape(3)
    plain = _answer(executor.open_route(3, RollbackShape(0)), 0, 100, _tokens(60))
    for after in range(40):
        route = executor.open_route(3, shape)
        session = route.open()
        route.prefill(session, _tokens(60), draft=3)
        struck = route.interrupt(session, 3, after, how)
        if how == "cancel":
            _as_if_new(executor, route, session, 3, shape)
        while len(route.transcript(session)) < 100:
            route.round(session, 3)
        _expect(list(route.transcript(session)[:100]), plain, f"text after {how} at act {after}")
        if not struck:
            return
    raise ExamFailed(f"a round of 3 guesses over 3 stages took more than {after} acts")


def a_cancel_keeps_the_session(executor: MtpExecutor) -> None:
    """Struck by a cancel between any two acts, a session stands at one position on all stages, and goes on as it would."""
    _struck(executor, "cancel")


def an_epoch_drops_everything(executor: MtpExecutor) -> None:
    """Struck by a new epoch between any two acts, a session is prefilled anew and goes on as it would."""
    _struck(executor, "epoch")


def an_eviction_is_made_good(executor: MtpExecutor) -> None:
    """Whichever stage evicts it, a session is prefilled anew and goes on as it would."""
    plain = _answer(executor.open_route(3, RollbackShape(0)), 0, 60)
    for stage in range(3):
        route = executor.open_route(3, RollbackShape(3))
        session = route.open()
        route.prefill(session, _PROMPT, draft=3)
        for _ in range(5):
            route.round(session, 3)
        route.evict(stage, session)
        while len(route.transcript(session)) < 60:
            route.round(session, 3)
        _expect(list(route.transcript(session)[:60]), plain, f"text after an eviction on stage {stage}")


def _named(checks: Iterable[Callable[[MtpExecutor], None]]) -> Mapping[str, Callable[[MtpExecutor], None]]:
    return {check.__name__: check for check in checks}


#: The exam, by name.
CHECKS = _named(
    (
        speculation_changes_no_token,
        acceptance_is_the_same_split_or_whole,
        rollback_grid,
        two_rollbacks_do_not_add_up,
        a_prompt_that_leaves_one_token,
        nothing_to_go_back_to,
        sessions_do_not_meet,
        long_answers_leak_nothing,
        speculation_leaves_no_trace,
        a_cancel_keeps_the_session,
        an_epoch_drops_everything,
        an_eviction_is_made_good,
    )
)
