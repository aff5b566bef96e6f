"""Multi-token prediction (MTP): a contract, and the doors that stay shut.

V4's MTP block drafts tokens that the main layers verify. dgr does not run it: :data:`CONTRACT` says who would own, compute
and send what (``docs/mtp-contract.md``), and every way of asking for it ends in
:class:`~dgr.errors.MtpNotExecutable`. Nothing here, and nothing elsewhere, can turn it on: there is no switch to find.

The contract itself, as values and interpreted, is part of the test kit (``dgr.testing.mtp_contract``); nothing that runs
imports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from dgr.errors import MtpNotExecutable

__all__ = [
    "CAPABILITY",
    "CONTRACT",
    "DOCUMENT",
    "RESERVED",
    "asks_for_mtp",
    "not_executable",
    "refuse_capabilities",
    "refuse_names",
    "refuse_value",
]

#: Name and version of the contract; grows when any of it changes.
CONTRACT = "mtp-contract/1"
#: Name of the capability in a handshake, and the only value this version offers or accepts for it.
CAPABILITY, RESERVED = "mtp", "reserved"
DOCUMENT = "docs/mtp-contract.md"

#: How words begin that mean multi-token prediction, in any spelling of a key, a flag, a field or a capability.
_STEMS = ("mtp", "nextn", "draft", "speculat")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


def asks_for_mtp(name: str) -> bool:
    """Whether a key, flag, field or capability of that name would mean MTP: ``mtp``, ``n_draft``, ``SpeculativeTokens``."""
    return any(word.lower().startswith(_STEMS) for word in _WORD.findall(name))


def not_executable(asked: str) -> MtpNotExecutable:
    """The refusal; ``asked`` is what was asked for, and where."""
    return MtpNotExecutable(
        f"{asked} asks for multi-token prediction, which is {RESERVED} in this version of dgr: {CONTRACT} ({DOCUMENT}) says"
        " what it would be, and nothing executes it; leave it out"
    )


def refuse_value(name: str, value: object) -> None:
    """Refuse an argument that stands for MTP and is given: anything but None, ``False`` and ``0`` included."""
    if value is not None:
        raise not_executable(f"{name} = {value!r}")


def refuse_names(names: Iterable[str], where: str) -> None:
    """Refuse keys or fields of which one asks for MTP, whatever its value; others are the caller's to judge."""
    for name in names:
        if asks_for_mtp(name):
            raise not_executable(f"{where}: {name!r}")


def refuse_capabilities(capabilities: Mapping[str, str], who: str) -> None:
    """Refuse a stage that offers MTP as anything but :data:`RESERVED`, or under another name."""
    for name, status in capabilities.items():
        if asks_for_mtp(name) and (name, status) != (CAPABILITY, RESERVED):
            raise not_executable(f"{who}: capability {name!r} as {status!r}")
