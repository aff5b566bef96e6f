"""The entry exam: the reference interpreter passes, the llama engine refuses, and a defect of each kind is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dgr.core.mtp import CONTRACT
from dgr.core.state_machine import InvalidTransition
from dgr.errors import InputError, MtpNotExecutable
from dgr.selftest.fixture import write_fixture
from dgr.testing.mtp_contract.gate import CHECKS, ExamFailed, LlamaExecutor, ReferenceExecutor
from dgr.testing.mtp_contract.messages import MtpWork, Proposal, Reason, Rollback, RolledBack
from dgr.testing.mtp_contract.reference import ReferenceDrafter, ReferenceLayer
from dgr.testing.mtp_contract.rollback import CompressorRing, RollbackLedger
from dgr.testing.mtp_contract.route import MtpClientState, ReferenceRoute
from dgr.testing.mtp_contract.shard import Answer, ReferenceShard, Taken
from dgr.testing.mtp_contract.states import TrunkState

pytestmark = pytest.mark.mtp_gate


@pytest.fixture(scope="session")
def with_block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has an MTP block: what would be asked to run it."""
    path = tmp_path_factory.mktemp("mtp") / "model.gguf"
    write_fixture(path, preset="min", layers=4, mtp=True)
    return path


@pytest.mark.parametrize("name", CHECKS)
def test_the_reference_passes(name: str) -> None:
    CHECKS[name](ReferenceExecutor())


@pytest.mark.parametrize("name", CHECKS)
def test_the_llama_engine_refuses(name: str, with_block: Path) -> None:
    with pytest.raises(MtpNotExecutable, match=CONTRACT):
        CHECKS[name](LlamaExecutor(with_block))


# --- defects ---------------------------------------------------------------------------------------------------------


def shard_with(
    *,
    ledger: type[RollbackLedger] | None = None,
    ring: type[CompressorRing] | None = None,
    layer: type[ReferenceLayer] | None = None,
    drafter: type[ReferenceDrafter] | None = None,
) -> type[ReferenceShard]:
    """A stage some part of which is another class."""

    class Mutant(ReferenceShard):
        def open(self, session: int) -> None:
            super().open(session)
            held = self.held[session]
            trunk, planes = held.trunk, self.shape.planes
            if ledger is not None:
                trunk.ledger = ledger(self.shape)
            if layer is not None:
                trunk.layers = [layer(one.index, one.compressor) for one in trunk.layers]
            for one in trunk.layers:
                if ring is not None:
                    one.compressor = ring(one.compressor.ratio, one.compressor.overlap, planes)
            if drafter is not None and held.drafter is not None:
                held.drafter = drafter(self.language, planes)

    return Mutant


class OneTooFar(RollbackLedger):
    """Takes a rollback of one token more than the last ubatch has."""

    @property
    def budget(self) -> int:
        return min(self.shape.planes, self.n_last + 1) if self.state is TrunkState.SETTLED else 0


class UpstreamsRule(RollbackLedger):
    """Takes any rollback up to R, as ``seq_rm`` does."""

    @property
    def budget(self) -> int:
        return self.shape.planes if self.state is TrunkState.SETTLED else 0


class OneTooShort(RollbackLedger):
    @property
    def budget(self) -> int:
        return max(0, min(self.shape.planes, self.n_last) - 1) if self.state is TrunkState.SETTLED else 0


class AddsUp(RollbackLedger):
    """Takes a second rollback before a decode, as if planes could be added."""

    def refusal(self, k: int) -> Reason | None:
        return None if 1 <= k < self.position and k + self.pending <= self.shape.planes else Reason.RANGE

    def roll_back(self, k: int) -> None:
        self.position, self.pending, self.state = self.position - k, self.pending + k, TrunkState.PENDING


class WrongPlane(CompressorRing):
    @staticmethod
    def snapshot_prefix(n_tokens: int, d: int) -> int:
        return max(0, n_tokens - d + 1)


class PlaneIgnored(CompressorRing):
    def run(self, first: int, values: Sequence[bytes], _pending: int) -> None:
        super().run(first, values, 0)


class PlaneAlwaysTaken(CompressorRing):
    """Goes back by a plane when nothing is pending."""

    def run(self, first: int, values: Sequence[bytes], pending: int) -> None:
        super().run(first, values, pending or min(1, self.n_planes))


class ShortWindow(ReferenceLayer):
    """Forgets the key at the edge of the window."""

    def run(self, first: int, rows: Sequence[bytes], pending: int) -> list[bytes]:
        self.raw.pop(first - 127, None)
        return super().run(first, rows, pending)


class StaleWindow(ReferenceLayer):
    """Keeps raw keys of rejected candidates, and prefers them."""

    def truncate(self, position: int) -> None:
        pass

    def run(self, first: int, rows: Sequence[bytes], pending: int) -> list[bytes]:
        stale = {at: value for at, value in self.raw.items() if at >= first}
        out = super().run(first, rows, pending)
        self.raw.update(stale)
        return out


class GuessesStay(ReferenceDrafter):
    """The tail's own cache keeps what was only guessed."""

    def truncate(self, position: int) -> None:
        guesses = dict(self.own)
        super().truncate(position)
        self.own = guesses

    def catch_up(self, first: int, tokens: Sequence[int], rows: Sequence[bytes]) -> None:
        guesses = dict(self.own)
        super().catch_up(first, tokens, rows)
        self.own.update(guesses)


class RowOfTheLast(ReferenceDrafter):
    """Goes on from the row of the last candidate, right or wrong."""

    def truncate(self, position: int) -> None:
        rows = dict(self.rows)
        super().truncate(position)
        self.rows = rows

    def _row_before(self, at: int) -> bytes:
        return self.rows[max(self.rows)] if at == self.position and self.rows else super()._row_before(at)


class SkipsARollback(ReferenceShard):
    """The second stage hands a rollback on and stays where it is."""

    def _roll_back(self, held: Any, message: Rollback) -> Taken:
        if self.index != 1:
            return super()._roll_back(held, message)
        return ([RolledBack(message.key, message.seq, message.to.position)], None) if self.is_tail else ([], [])


class TakesOldEpochs(ReferenceShard):
    """Looks at the session before the epoch."""

    def _refusal(self, message: MtpWork | Rollback) -> Reason | None:
        if message.key.epoch != self.epoch and message.key.session not in self.held:
            self.open(message.key.session)
        reason = super()._refusal(message)
        return None if reason is Reason.STALE_EPOCH else reason


class AcceptsOneMore(ReferenceShard):
    """Takes the first wrong candidate for right."""

    def _verify(self, drafter: ReferenceDrafter, work: MtpWork, rows: Sequence[bytes]) -> Proposal:
        found = super()._verify(drafter, work, rows)
        if found.accepted == work.candidates:
            return found
        return Proposal(found.key, found.seq, found.position + 1, found.accepted + 1, found.token, ())


class CancelForgets(ReferenceRoute):
    """After a cancel the candidates stay where they are."""

    def _send_rollback(self, client: MtpClientState, at: int, to: int, tokens: Sequence[int]) -> None:
        if client.unclaimed is None:
            super()._send_rollback(client, at, to, tokens)


class CancelKeepsTheDraw(ReferenceRoute):
    """After a cancel the token drawn behind the accepted candidates is taken for the one behind the certain tokens."""

    def _on_proposal(self, client: MtpClientState, answer: Proposal) -> None:
        super()._on_proposal(client, answer)
        if client.unclaimed is not None:
            client.unclaimed = answer.token


class GuessesSurvive(ReferenceRoute):
    """A lost session keeps the guesses of its former life, and takes them for certain."""

    def _lose(self, client: MtpClientState) -> None:
        guesses = client.drafts
        super()._lose(client)
        client.transcript += guesses


class OldAnswersCount(ReferenceRoute):
    """Listens to answers of an epoch that is over."""

    def _at_pipeline(self, answer: Answer, sender: int) -> None:
        client = self.sessions[answer.key.session]
        if answer.key.epoch != self.epoch and isinstance(answer, Proposal):
            client.transcript.append(answer.token)
            return
        super()._at_pipeline(answer, sender)


DEFECTS: dict[str, tuple[str, Callable[[], ReferenceExecutor]]] = {
    "a budget of one token too many": ("rollback_grid", lambda: ReferenceExecutor(shard_with(ledger=OneTooFar))),
    "upstream's own rule": ("rollback_grid", lambda: ReferenceExecutor(shard_with(ledger=UpstreamsRule))),
    "a budget of one token too few": ("rollback_grid", lambda: ReferenceExecutor(shard_with(ledger=OneTooShort))),
    "rollbacks that add up": ("two_rollbacks_do_not_add_up", lambda: ReferenceExecutor(shard_with(ledger=AddsUp))),
    "the plane beside": ("rollback_grid", lambda: ReferenceExecutor(shard_with(ring=WrongPlane))),
    "no plane at all": ("speculation_changes_no_token", lambda: ReferenceExecutor(shard_with(ring=PlaneIgnored))),
    "a plane without need": (
        "speculation_changes_no_token",
        lambda: ReferenceExecutor(shard_with(ring=PlaneAlwaysTaken)),
    ),
    "a window of 127": ("long_answers_leak_nothing", lambda: ReferenceExecutor(shard_with(layer=ShortWindow))),
    "stale keys in the window": (
        "speculation_changes_no_token",
        lambda: ReferenceExecutor(shard_with(layer=StaleWindow)),
    ),
    "guesses in MTP's cache": (
        "speculation_leaves_no_trace",
        lambda: ReferenceExecutor(shard_with(drafter=GuessesStay)),
    ),
    "the wrong row": ("speculation_leaves_no_trace", lambda: ReferenceExecutor(shard_with(drafter=RowOfTheLast))),
    "one stage skips a rollback": ("speculation_leaves_no_trace", lambda: ReferenceExecutor(SkipsARollback)),
    "old epochs are served": ("an_epoch_drops_everything", lambda: ReferenceExecutor(TakesOldEpochs)),
    "a wrong candidate is accepted": ("speculation_changes_no_token", lambda: ReferenceExecutor(AcceptsOneMore)),
    "a cancel forgets the rollback": (
        "a_cancel_keeps_the_session",
        lambda: ReferenceExecutor(route=CancelForgets),
    ),
    "a cancel keeps the wrong token": (
        "a_cancel_keeps_the_session",
        lambda: ReferenceExecutor(route=CancelKeepsTheDraw),
    ),
    "guesses survive a loss": ("an_epoch_drops_everything", lambda: ReferenceExecutor(route=GuessesSurvive)),
    "answers of an old epoch": ("an_epoch_drops_everything", lambda: ReferenceExecutor(route=OldAnswersCount)),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found(defect: str) -> None:
    check, executor = DEFECTS[defect]
    with pytest.raises((ExamFailed, InvalidTransition, InputError, KeyError, IndexError)):
        CHECKS[check](executor())


def test_parts_that_are_as_they_should_be_pass() -> None:
    """The control: putting parts in is not a defect by itself."""
    sound = shard_with(ledger=RollbackLedger, ring=CompressorRing, layer=ReferenceLayer, drafter=ReferenceDrafter)
    for check in ("speculation_changes_no_token", "speculation_leaves_no_trace", "a_cancel_keeps_the_session"):
        CHECKS[check](ReferenceExecutor(sound))
