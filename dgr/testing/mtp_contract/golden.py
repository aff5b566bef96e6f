"""Golden files of the MTP contract: every message, and whole episodes, for this and any other implementation.

    python -m dgr.testing.mtp_contract.golden tests/mtp/golden     # writes them; the same bytes every time

``tests/mtp/golden/README.md`` describes the files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from dgr.core.files.outputs import write_file
from dgr.core.mtp import CONTRACT
from dgr.core.values import Key, SamplingParams
from dgr.testing.mtp_contract.episodes import EPISODES, ROUTE_ID, border_grid
from dgr.testing.mtp_contract.messages import (
    DraftInput,
    DraftOutput,
    Message,
    MtpAdvanced,
    MtpRefused,
    MtpWork,
    Proposal,
    Reason,
    Rollback,
    RolledBack,
    Want,
    message_name,
)
from dgr.testing.mtp_contract.shard import expectation

__all__ = ["sample_messages", "write_golden"]

#: Characters of a line of JSON, but for frames and long lists of tokens.
_LINE = 260
_KEY = Key(ROUTE_ID, 3, 2**40)
_SAMPLING = SamplingParams(0.75, 40, 0.95, 0.05, 1.1, 0.25, -0.5, 64, 2**40, 1, 3)


def sample_messages() -> dict[str, Message | DraftInput | DraftOutput]:
    """One of every message, and of the values that never leave the tail (rows of two floats a stream)."""
    at, to = expectation(range(3, 135), 132), expectation(range(3, 135), 130)
    row, logits = bytes(range(32)), bytes(range(16))
    return {
        "work-to-head": MtpWork(_KEY, 7, at, (17, 129279, 5), Want.TOKEN, 2, 3, _SAMPLING, 0),
        "work-between-stages": MtpWork(_KEY, 7, at, (17, 129279, 5), Want.TOKEN, 2, 3, _SAMPLING, 3 * 32),
        "work-prefill-chunk": MtpWork(_KEY, 6, expectation([], 0), (17, 33, 5, 91), Want.NOTHING, 0, 0, None, 0),
        "rollback": Rollback(_KEY, 8, at, to),
        "advanced": MtpAdvanced(_KEY, 6, 4),
        "proposal": Proposal(_KEY, 7, 134, 1, 260, (404, 77, 19)),
        "proposal-without-guesses": Proposal(_KEY, 7, 133, 0, 260, ()),
        "rolled-back": RolledBack(_KEY, 8, 130),
        "refused": MtpRefused(_KEY, 9, Reason.BUDGET, 132, 1),
        "draft-input": DraftInput(17, 132, row),
        "draft-output": DraftOutput(132, logits, row),
    }


def _refused_frames() -> dict[str, tuple[bytes, str]]:
    """Bytes that are none of the messages, and why."""
    encode = msgspec.msgpack.encode
    key, at = [ROUTE_ID, 3, 1], [130, bytes(16)]
    return {
        "unknown-tag": (encode([79, key, 1, 130]), "tag 79 is reserved and stands for nothing"),
        "one-field-more": (encode([68, key, 1, 130, b"rows"]), "RolledBack has three fields"),
        "one-field-less": (encode([65, key, 1, at]), "Rollback has four fields"),
        "short-route": (encode([68, [bytes(15), 3, 1], 1, 130]), "a route session has 16 bytes"),
        "negative-position": (encode([68, key, 1, -1]), "positions count from 0"),
        "unknown-reason": (encode([69, key, 1, 12, 130, 0]), "reason 12 stands for nothing"),
        "rows-in-a-rollback": (encode([65, key, 1, at, bytes(64)]), "a rollback says where to, and carries nothing"),
    }


def _dump(data: Any) -> str:
    """JSON that people can read: what fits a line is on one line."""
    line = json.dumps(data, ensure_ascii=False)
    if len(line) <= _LINE or not isinstance(data, list | dict):
        return line
    if isinstance(data, dict):
        return "{\n" + ",\n".join(f"{json.dumps(name)}: {_dump(value)}" for name, value in data.items()) + "\n}"
    if all(isinstance(item, int) for item in data):
        return line
    return "[\n" + ",\n".join(_dump(item) for item in data) + "\n]"


def write_golden(folder: Path) -> list[Path]:
    """Write every golden file; returns their paths."""
    found: dict[str, bytes] = {}
    listed = []
    for name, message in sample_messages().items():
        frame = msgspec.msgpack.encode(message)
        found[f"messages/{name}.msgpack"] = frame
        fields = {key: _shown(value) for key, value in msgspec.structs.asdict(message).items()}
        listed.append({"name": name, "type": message_name(type(message)), "fields": fields, "frame": frame.hex()})
    refused = [{"name": name, "frame": frame.hex(), "why": why} for name, (frame, why) in _refused_frames().items()]
    messages = {"contract": CONTRACT, "messages": listed, "refused": refused}
    found["messages.json"] = (_dump(messages) + "\n").encode()
    for name, make in EPISODES.items():
        episode = make()
        found[f"episodes/{name}.json"] = (_dump(episode.as_json()) + "\n").encode()
        found[f"episodes/{name}.msgpack"] = msgspec.msgpack.encode(episode.frames)
    grid = {"contract": CONTRACT, "planes": 4, "rounds": border_grid()}
    found["episodes/border-grid.json"] = (_dump(grid) + "\n").encode()
    paths = []
    for name, content in sorted(found.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
        paths.append(path)
    return paths


def _shown(value: Any) -> Any:
    """A field as JSON: bytes in hex, structs as arrays, enumerations as numbers."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, msgspec.Struct):
        return [_shown(item) for item in msgspec.structs.astuple(value)]
    if isinstance(value, tuple):
        return [_shown(item) for item in value]
    return value


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give one folder: python -m dgr.testing.mtp_contract.golden tests/mtp/golden")
    print(f"{len(write_golden(Path(sys.argv[1])))} files")
