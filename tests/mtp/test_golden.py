"""The golden files: written the same every time, and replayed by the interpreter's stages and by another implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from other_implementation import REFUSED, ROLLBACK, WORK, Stage

from dgr.model.mtp import CONTRACT
from dgr.model.mtp_messages import (
    HEADER_BYTES,
    ID_BYTES,
    DraftInput,
    DraftOutput,
    Refused,
    Rollback,
    Work,
    decode_message,
    encode_message,
)
from dgr.model.mtp_reference import Language
from dgr.model.mtp_rollback import RollbackShape
from dgr.model.mtp_shard import ReferenceShard
from dgr.testing.mtp_episodes import BORDERS, EPISODES
from dgr.testing.mtp_golden import sample_messages, write_golden

GOLDEN = Path(__file__).with_name("golden")
MESSAGES = json.loads((GOLDEN / "messages.json").read_text(encoding="utf-8"))
GRID = json.loads((GOLDEN / "episodes" / "border-grid.json").read_text(encoding="utf-8"))


def episode(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / "episodes" / f"{name}.json").read_text(encoding="utf-8"))


def frames(step: dict[str, Any]) -> list[tuple[str, str, bytes]]:
    return [(one["from"], one["to"], bytes.fromhex(one["frame"])) for one in step.get("sent", ())]


def test_the_files_are_written_the_same_every_time(tmp_path: Path) -> None:
    written = write_golden(tmp_path)
    kept = {path.relative_to(GOLDEN) for path in GOLDEN.rglob("*") if path.is_file() and path.name != "README.md"}
    assert {path.relative_to(tmp_path) for path in written} == kept
    for path in written:
        name = path.relative_to(tmp_path)
        again = "run: python -m dgr.testing.mtp_golden tests/mtp/golden"
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
    assert msgspec.msgpack.decode((GOLDEN / "episodes" / f"{name}.msgpack").read_bytes()) == [list(one) for one in listed]
    for sender, receiver, frame in listed:
        message = decode_message(frame)
        ids = len(message.tokens) if isinstance(message, Work) else len(getattr(message, "drafts", ()))
        assert len(frame) <= HEADER_BYTES + ID_BYTES * ids
        if not isinstance(message, Work):
            assert not hasattr(message, "payload")
        elif receiver == "0":
            assert message.payload == 0
        else:
            assert (int(sender) + 1, message.payload) == (int(receiver), 16 * len(message.tokens))


def _reference_stages(step: dict[str, Any], language: Language) -> list[ReferenceShard]:
    shape, n_stages = RollbackShape(**step["shape"]), len(step["layers"])
    stages = [ReferenceShard(index, n_stages, shape, language) for index in range(n_stages)]
    assert [str(stage.layers) for stage in stages] == step["layers"]
    for stage in stages:
        stage.fence(step["epoch"])
    return stages


@pytest.mark.parametrize("name", EPISODES)
def test_the_interpreters_stages_replay_an_episode(name: str) -> None:
    """From the file alone, without the interpreter's pipeline: messages in, messages out, and where each stage stands."""
    recorded = episode(name)
    session, opening = recorded["session"], recorded["steps"][0]
    stages = _reference_stages(opening, Language(eos=recorded["eos"]))
    rows: dict[tuple[int, int], list[bytes]] = {}
    lost = True
    for step in recorded["steps"][1:]:
        if step["act"] == "change route":
            stages = _reference_stages({**opening, **step}, Language(eos=recorded["eos"]))
            lost = True
        if step["act"] == "evict":
            stages[step["stage"]].evict(session)
        thinking = {}
        for sender, receiver, frame in frames(step):
            message = decode_message(frame)
            if receiver == "pipeline":
                if isinstance(message, Refused) and message.seq < 90 and message.reason.name not in _HARMLESS:
                    lost = True
                continue
            assert isinstance(message, Work | Rollback)
            if lost and sender == "pipeline":
                for stage in stages:
                    stage.close(session)
                    stage.open(session)
                lost = False
            at = int(receiver)
            if step["act"] in ("begin round", "begin prefill") and not _reaches(step, at, frame):
                continue  # the step ends while it is on its way
            answers, onward = stages[at].take(message, rows.get((at, message.seq), []))
            if onward is not None and not stages[at].is_tail:
                rows[at + 1, message.seq] = onward
            for answer in answers:
                assert (str(at), "pipeline", encode_message(answer)) in frames(step)
            if not answers and stages[at].is_tail:
                thinking[at] = message
        if step["act"].startswith("begin") or "skip" in step:
            return  # the rest depends on where the acts of two steps meet; the views were compared up to here
        for at, message in thinking.items():
            while (proposal := stages[at].think(session)) is None and stages[at].held[session].thinking is not None:
                pass
            assert proposal is None or (str(at), "pipeline", encode_message(proposal)) in frames(step), message
        found = [stage.held.get(session) for stage in stages]
        views = [None if one is None else msgspec.to_builtins(one.trunk.view(one.drafter)) for one in found]
        assert json.loads(json.dumps(views)) == step["stages"], step["act"]


#: Refusals of a pipeline's own rollback by the head, after which the session lives on.
_HARMLESS = ("RANGE", "PLANES", "PENDING", "BUDGET", "CANCELLED")


def _reaches(step: dict[str, Any], at: int, frame: bytes) -> bool:
    return any(sender == str(at) for sender, _, sent in frames(step) if sent[:40] == frame[:40]) or at == 0


@pytest.mark.parametrize("name", EPISODES)
def test_another_implementation_replays_an_episode(name: str) -> None:
    """Positions, budgets and refusals, from the file and the document alone."""
    recorded = episode(name)
    opening = recorded["steps"][0]
    stages = [Stage(opening["shape"], layers, opening["epoch"]) for layers in opening["layers"]]
    refused = {
        (int(sender), message.seq): message.reason
        for step in recorded["steps"]
        for sender, receiver, frame in frames(step)
        if receiver == "pipeline" and isinstance(message := decode_message(frame), Refused)
    }
    queue: list[tuple[int, bytes]] = []
    for step in recorded["steps"][1:]:
        if step["act"] == "change route":
            stages = [Stage(opening["shape"], layers, step["epoch"]) for layers in step["layers"]]
        if step["act"] == "evict":
            stages[step["stage"]].evict()
        sent = frames(step)
        queue += [(int(receiver), frame) for _, receiver, frame in sent if receiver != "pipeline"]
        for at, frame in list(queue):
            if step["act"].startswith("begin") and not _was_taken(stages, step, at, frame):
                continue
            queue.remove((at, frame))
            tag, (_, epoch, session), seq, expect, *_ = msgspec.msgpack.decode(frame)
            if at >= len(stages) or refused.get((at, seq)) == 11:  # the head dropped it: a cancel
                continue
            if tag == WORK and expect[0] == 0 and epoch == stages[at].epoch and session == recorded["session"]:
                stages[at].open(session)  # a session is opened on every stage before its first token
            reason = stages[at].take(frame)
            assert reason == refused.get((at, seq)), (step["act"], at, seq)
        found = [None if stage.opened is None else stage.where() for stage in stages]
        assert found == [_without_drafter(stage) for stage in step["stages"]], step["act"]
    assert {tag for tag in (WORK, ROLLBACK, REFUSED)} == {64, 65, 69}


def _was_taken(stages: list[Stage], step: dict[str, Any], at: int, frame: bytes) -> bool:
    """Whether the step's record shows the stage behind the message: it ended before the message arrived otherwise."""
    expect, tokens = msgspec.msgpack.decode(frame)[3:5]
    seen = step["stages"][at]
    return seen is not None and seen["position"] != len(stages[at].tokens) and bool(expect) and bool(tokens)


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


@pytest.mark.parametrize("one", GRID["rounds"], ids=lambda one: f"{one['from']}-{one['m']}of{one['k']}")
def test_a_round_at_a_border_ends_where_the_document_says(one: dict[str, Any]) -> None:
    begin, k, m = one["from"], one["k"], one["m"]
    stage = Stage({"planes": 4, "n_ubatch": 64, "n_seq_max": 1, "n_ctx": 4096}, "0:4", 0)
    stage.tokens, stage.n_last, stage.decoded = [0] * (begin + 1 + m), k + 1, True
    stage.pending = k - m
    drafter = {"state": "ready", "position": begin + 1 + m, "row": begin + m}
    assert one["stage"] == {**stage.where(), "drafter": drafter}
