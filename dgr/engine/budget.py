"""Memory budgets: how much a stage may take, and the arithmetic of a refusal."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dgr.core.host import available_cpus, usable_memory
from dgr.core.units import human_bytes
from dgr.engine.base import MemoryReport
from dgr.errors import BudgetExceeded, InputError

__all__ = ["available_cpus", "check_budget", "parse_budget"]

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
#: Bytes that no address space holds, and no 64-bit count.
_MOST = 2.0**63
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)", re.IGNORECASE)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")


def parse_budget(text: str | int) -> int:
    """Bytes of a budget: a number, ``24GiB``, or ``50%`` of the memory that this process may use (:mod:`dgr.core.host`)."""
    size: float
    if isinstance(text, int):
        size = text
    elif share := _SHARE.fullmatch(text.strip()):
        size = usable_memory() * float(share[1]) / 100
    elif (match := _SIZE.fullmatch(text.strip())) and match[2].upper() in _UNITS:
        size = float(match[1]) * _UNITS[match[2].upper()]
    else:
        raise InputError(
            f"memory budget {text!r} is neither bytes, nor like 24GiB, nor a share of the usable memory like 50%"
        )
    if not 1 <= size < _MOST:
        given = f"{text[:40]!r}" if isinstance(text, str) else "given"
        raise InputError(f"memory budget {given} is {'less than one byte' if size < 1 else 'over 2^63 bytes'}")
    return int(size)


def _exact(n_bytes: int) -> str:
    return f"{n_bytes} B ({human_bytes(n_bytes)})"


def _of_the_host(reports: Mapping[str, MemoryReport]) -> str:
    return " of the host's memory" if any(report.devices for report in reports.values()) else ""


def check_budget(reports: Mapping[str, MemoryReport], n_slots: int, budget: int | None) -> None:
    """Refuse stages whose weights, state and compute buffers together exceed ``budget`` bytes, showing the arithmetic.

    ``reports``: what each stage takes, by name. ``n_slots``: sequence slots of each. The budget is of the host's memory:
    what lies in a device's own is not counted.
    """
    total = sum(report.host for report in reports.values())
    if budget is None or total <= budget:
        return
    lines = []
    for name, report in reports.items():
        per_slot = sum(report.state.values()) // n_slots
        lines.append(
            f"{name}: weights {_exact(report.weights)} + state {n_slots} sessions x {_exact(per_slot)}"
            f" + compute {_exact(report.compute)} = {_exact(report.total)}"
            + "".join(f", of which {_exact(device.total)} on {where}" for where, device in report.devices.items())
        )
    raise BudgetExceeded(
        "; ".join(lines)
        + f"; in all {_exact(total)}{_of_the_host(reports)}, over the budget of {_exact(budget)} by {_exact(total - budget)}:"
        " lower n_ctx or n_seq_max, own fewer layers, or raise the budget"
    )
