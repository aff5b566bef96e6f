"""What tests of commands speak of: a command's result, and a stage process."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from attrs import frozen

from dgr.core.route import LayerRange, StageRef

#: The context of every stage here, but where a test says otherwise.
CONTEXT = ("--ctx", "256", "--batch", "32", "--ubatch", "32")


@frozen
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


@frozen
class Stage:
    """A `dgr stage` process that is ready."""

    process: subprocess.Popen[str]
    line: dict[str, Any]

    @property
    def address(self) -> str:
        return str(self.line["address"])

    @property
    def ref(self) -> StageRef:
        return StageRef(self.address, LayerRange.parse(self.line["layers"]))
