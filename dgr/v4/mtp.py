"""Multi-token prediction (MTP): a contract, and the doors that stay shut.

V4's MTP block drafts tokens that the main layers verify. dgr does not run it: :data:`CONTRACT` says who would own, compute
and send what (``docs/mtp-contract.md``), and every way of asking for it ends in
:class:`~dgr.errors.MtpNotExecutable`. Nothing here, and nothing elsewhere, can turn it on: there is no switch to find.

The contract itself, as values and interpreted, is part of the test kit (``dgr.testing.mtp_contract``); nothing that runs
imports it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from pathlib import Path

from dgr.errors import MtpNotExecutable
from dgr.v4.hyper_parameters import ARCHITECTURE

__all__ = [
    "CAPABILITY",
    "CONTRACT",
    "DOCUMENT",
    "RESERVED",
    "Shipped",
    "asks_for_mtp",
    "how_shipped",
    "not_executable",
    "refuse_artifact",
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
#: Keys of ours in a GGUF; llama.cpp's own ``nextn_predict_layers`` describes a block and asks for nothing.
_OWN_KEYS = f"{ARCHITECTURE}.dgr."


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


class Shipped(Enum):
    """How a model comes with its MTP block."""

    #: No MTP block: the usual conversion drops it.
    ABSENT = "absent"
    #: Behind the main layers, in the same model. One model cannot hold two hyper-connection heads, since both have the
    #: root names ``output_hc_*``: the block would run with the trunk's head, without an error.
    MERGED = "merged"
    #: In a file of its own (``mtp-*.gguf``), with its own hyper-connection head under the root names.
    ALONE = "alone"


def how_shipped(names: Collection[str], n_main: int) -> Shipped:
    """How tensors of these names come with an MTP block behind ``n_main`` main layers."""
    if f"blk.{n_main}.nextn.eh_proj.weight" not in names:
        return Shipped.ABSENT
    trunk = tuple(f"blk.{layer}." for layer in range(n_main))
    return Shipped.MERGED if any(name.startswith(trunk) for name in names) else Shipped.ALONE


def refuse_artifact(path: Path, keys: Iterable[str], shipped: Shipped) -> None:
    """Refuse a file that is nothing but an MTP block, or whose own keys ask for one.

    llama.cpp takes a file with ``nextn_predict_layers`` and without main layers for an MTP model and makes every main layer
    optional (``load_arch_tensors``); a stage of main layers would then read through null pointers.
    """
    if shipped is Shipped.ALONE:
        raise not_executable(f"{path} holds an MTP block and no main layer: running it")
    refuse_names((key for key in keys if key.startswith(_OWN_KEYS)), str(path))
