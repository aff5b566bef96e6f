"""The golden files: written the same every time, and replayed by the interpreter's stages and by another implementation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mtp.other_implementation import Stage

from dgr.core.mtp import CONTRACT
from dgr.testing.mtp_contract.episodes import BORDERS, EPISODES
from dgr.testing.mtp_contract.golden import sample_messages, write_golden
from dgr.testing.mtp_contract.messages import (
    HEADER_BYTES,
    ID_BYTES,
    DraftInput,
    DraftOutput,
    MtpRefused,
    MtpWork,
    Proposal,
    Reason,
    Rollback,
    decode_message,
    encode_message,
)
from dgr.testing.mtp_contract.reference import Language
from dgr.testing.mtp_contract.rollback import RollbackShape
from dgr.testing.mtp_contract.shard import ReferenceShard

GOLDEN = Path(__file__).with_name("golden")
MESSAGES = json.loads((GOLDEN / "messages.json").read_text(encoding="utf-8"))
GRID = json.loads((GOLDEN / "episodes" / "border-grid.json").read_text(encoding="utf-8"))


def episode(name: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((GOLDEN / "episodes" / f"{name}.json").read_text(encoding="utf-8"))
    return told


def frames(step: dict[str, Any]) -> list[tuple[str, str, bytes]]:
    return [(one["from"], one["to"], bytes.fromhex(one["frame"])) for one in step.get("sent", ())]


@pytest.mark.slow
def test_the_files_are_written_the_same_every_time(tmp_path: Path) -> None:
    written = write_golden(tmp_path)
    kept = {path.relative_to(GOLDEN) for path in GOLDEN.rglob("*") if path.is_file() and path.name != "README.md"}
    assert {path.relative_to(tmp_path) for path in written} == kept
    for path in written:
        name = path.relative_to(tmp_path)
        again = "run: python -m dgr.testing.mtp_contract.golden tests/mtp/golden"
        assert path.read_bytes() == (GOLDEN / name).read_bytes(), f"{name} differs; {again}"


def test_every_message_reads_back() -> None:
    kinds = set()
    for entry in MESSAGES["messages"]:
        frame = bytes.fromhex(entry["frame"])
        assert (GOLDEN / "messages" / f"{entry['name']}.msgpack").read_bytes() == frame
        known = sample_messages()[entry["name"]]
        kinds.add(entry["type"])
        if isinstance(known, DraftInput | DraftOutput):
            assert msgspec.msgpack.decode(frame, type=type(known)) == known
        else:
            assert decode_message(frame) == known
            assert encode_message(known) == frame
    assert kinds == {
        "Work", "Rollback", "Advanced", "Proposal", "RolledBack", "Refused", "DraftInput", "DraftOutput",
    }  # fmt: skip
    assert MESSAGES["contract"] == CONTRACT


@pytest.mark.parametrize("entry", MESSAGES["refused"], ids=lambda entry: entry["name"])
def test_what_is_no_message_is_refused(entry: dict[str, str]) -> None:
    with pytest.raises(msgspec.DecodeError):  # ValidationError is one
        decode_message(bytes.fromhex(entry["frame"]))


@pytest.mark.parametrize("name", EPISODES)
def test_the_messages_of_an_episode_are_bounded_and_carry_no_state(name: str) -> None:
    recorded = episode(name)
    listed = [frame for step in recorded["steps"] for frame in frames(step)]
    assert msgspec.msgpack.decode((GOLDEN / "episodes" / f"{name}.msgpack").read_bytes()) == [
        list(one) for one in listed
    ]
    for sender, receiver, frame in listed:
        message = decode_message(frame)
        ids = len(message.tokens) if isinstance(message, MtpWork) else len(getattr(message, "drafts", ()))
        assert len(frame) <= HEADER_BYTES + ID_BYTES * ids
        if not isinstance(message, MtpWork):
            assert not hasattr(message, "payload")
        elif receiver == "0":
            assert message.payload == 0
        else:
            assert (int(sender) + 1, message.payload) == (int(receiver), 16 * len(message.tokens))


class Arrivals:
    """The messages of an episode in the order in which stages take them."""

    def __init__(self, recorded: dict[str, Any]) -> None:
        self.opening, self.steps = recorded["steps"][0], recorded["steps"][1:]
        self._waiting: list[tuple[int, bytes]] = []

    def of(self, step: dict[str, Any], n_stages: int) -> Iterator[tuple[int, bytes]]:
        sent = frames(step)
        self._waiting += [(int(receiver), frame) for _, receiver, frame in sent if receiver != "pipeline"]
        answers = [decode_message(frame) for _, receiver, frame in sent if receiver == "pipeline"]
        dropped = {one.seq for one in answers if isinstance(one, MtpRefused) and one.reason is Reason.CANCELLED}
        staying = []
        for at, frame in self._waiting:
            seq = decode_message(frame).seq
            if [str(at), seq] in step["in_flight"]:
                staying.append((at, frame))
            elif at < n_stages and seq not in dropped:
                yield at, frame
        self._waiting = staying


def opens(frame: bytes, epoch: int, session: int) -> bool:
    """Whether the pipeline opens the session before this message: work from position 0."""
    message = decode_message(frame)
    return isinstance(message, MtpWork) and message.expect.position == 0 and message.key.epoch == epoch


def _reference_stages(opening: dict[str, Any], layers: list[str], epoch: int, eos: int) -> list[ReferenceShard]:
    shape = RollbackShape(**opening["shape"])
    stages = [ReferenceShard(index, len(layers), shape, Language(eos=eos)) for index in range(len(layers))]
    assert [str(stage.layers) for stage in stages] == layers
    for stage in stages:
        stage.fence(epoch)
    return stages


@pytest.mark.parametrize("name", EPISODES)
def test_the_interpreters_stages_replay_an_episode(name: str) -> None:
    """From the file alone, without the interpreter's pipeline: messages in, messages out, and where each stage stands."""
    recorded = episode(name)
    session, arrivals = recorded["session"], Arrivals(recorded)
    opening = arrivals.opening
    stages = _reference_stages(opening, opening["layers"], opening["epoch"], recorded["eos"])
    rows: dict[tuple[int, int], list[bytes]] = {}
    for step in arrivals.steps:
        if step["act"] == "change route":
            stages = _reference_stages(opening, step["layers"], step["epoch"], recorded["eos"])
        if step["act"] == "evict":
            stages[step["stage"]].evict(session)

        def thought(at: int, step: dict[str, Any] = step, stages: list[ReferenceShard] = stages) -> Iterator[Proposal]:
            return _guesses(stages[at], session, step)

        tail = str(len(stages) - 1)
        said = [(tail, "pipeline", encode_message(one)) for one in thought(-1)]  # of what it was thinking about
        for at, frame in arrivals.of(step, len(stages)):
            message = decode_message(frame)
            assert isinstance(message, MtpWork | Rollback)
            if at == 0 and opens(frame, stages[0].epoch, session):
                for stage in stages:
                    stage.close(session)
                    stage.open(session)
            answers, onward = stages[at].take(message, rows.get((at, message.seq), []))
            if onward is not None and not stages[at].is_tail:
                rows[at + 1, message.seq] = onward
                forwarded = [bytes(sent) for sender, _, sent in frames(step) if sender == str(at)]
                assert any(decode_message(sent).seq == message.seq for sent in forwarded)
            said += [(str(at), "pipeline", encode_message(answer)) for answer in (*answers, *thought(at))]
        answered = [one for one in frames(step) if one[1] == "pipeline"]
        kept = [one for one in answered if getattr(decode_message(one[2]), "reason", None) is not Reason.CANCELLED]
        assert sorted(said) == sorted(kept), step["act"]
        found = [stage.held.get(session) for stage in stages]
        views = [None if one is None else msgspec.to_builtins(one.trunk.view(one.drafter)) for one in found]
        assert json.loads(json.dumps(views)) == step["stages"], step["act"]


def _guesses(stage: ReferenceShard, session: int, step: dict[str, Any]) -> Iterator[Proposal]:
    """Let the tail think as long as it did in the step; its answer, if it came to one."""
    held = stage.held.get(session)
    while held is not None and held.thinking is not None and held.drafter is not None:
        recorded = step["stages"][-1] and step["stages"][-1]["drafter"]
        is_answered = any(isinstance(decode_message(frame), Proposal) for _, _, frame in frames(step))
        if not is_answered and recorded == msgspec.to_builtins(held.drafter.view()):
            return
        proposal = stage.think(session)
        if proposal is not None:
            yield proposal


@pytest.mark.parametrize("name", EPISODES)
def test_another_implementation_replays_an_episode(name: str) -> None:
    """Positions, budgets and refusals, from the file and the document alone."""
    recorded = episode(name)
    session, arrivals = recorded["session"], Arrivals(recorded)
    opening = arrivals.opening
    stages = [Stage(opening["shape"], layers, opening["epoch"]) for layers in opening["layers"]]
    for step in arrivals.steps:
        if step["act"] == "change route":
            stages = [Stage(opening["shape"], layers, step["epoch"]) for layers in step["layers"]]
        if step["act"] == "evict":
            stages[step["stage"]].evict()
        answers = [
            (sender, decode_message(frame)) for sender, receiver, frame in frames(step) if receiver == "pipeline"
        ]
        refused = {(int(sender), one.seq): int(one.reason) for sender, one in answers if isinstance(one, MtpRefused)}
        for at, frame in arrivals.of(step, len(stages)):
            if at == 0 and opens(frame, stages[0].epoch, session):
                for stage in stages:
                    stage.open(session)
            seq = msgspec.msgpack.decode(frame)[2]
            assert stages[at].take(frame) == refused.get((at, seq)), (step["act"], at, seq)
        found = [None if stage.opened is None else stage.where() for stage in stages]
        assert found == [_without_drafter(stage) for stage in step["stages"]], step["act"]


def _without_drafter(stage: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if stage is None else {name: value for name, value in stage.items() if name != "drafter"}


def test_the_border_grid_has_every_round_at_every_border() -> None:
    rounds = {(one["k"], one["m"]) for one in GRID["rounds"]}
    assert rounds == {(k, m) for k in range(1, 5) for m in range(k + 1)}
    starts = {one["from"] for one in GRID["rounds"]}
    assert starts == set(BORDERS)
    # Block ends among the rejected positions, for both ratios: the case where a wrong plane would show.
    for ratio in (4, 128):
        assert any(
            any((q + 1) % ratio == 0 for q in range(one["from"] + 1 + one["m"], one["from"] + 1 + one["k"]))
            for one in GRID["rounds"]
        )


def test_a_round_at_a_border_ends_where_the_document_says() -> None:
    for one in GRID["rounds"]:
        begin, k, m = one["from"], one["k"], one["m"]
        stage = Stage({"planes": 4, "n_ubatch": 64, "n_seq_max": 1, "n_ctx": 4096}, "0:4", 0)
        stage.tokens, stage.n_last, stage.decoded = [0] * (begin + 1 + m), k + 1, True
        stage.pending = k - m
        drafter = {"state": "ready", "position": begin + 1 + m, "row": begin + m}
        assert one["stage"] == {**stage.where(), "drafter": drafter}, (begin, k, m)
