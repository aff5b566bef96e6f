"""How a V4 model comes with its block for multi-token prediction, and which files are refused for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum
from pathlib import Path

from dgr.core.mtp import not_executable, refuse_names
from dgr.v4.hyper_parameters import ARCHITECTURE

__all__ = ["Shipped", "mtp_packaging", "refuse_artifact"]

#: Keys of ours in a GGUF; llama.cpp's own ``nextn_predict_layers`` describes a block and asks for nothing.
_OWN_KEYS = f"{ARCHITECTURE}.dgr."


class Shipped(Enum):
    """How a model comes with its MTP block."""

    #: No MTP block: the usual conversion drops it.
    ABSENT = "absent"
    #: Behind the main layers, in the same model. One model cannot hold two hyper-connection heads, since both have the
    #: root names ``output_hc_*``: the block would run with the trunk's head, without an error.
    MERGED = "merged"
    #: In a file of its own (``mtp-*.gguf``), with its own hyper-connection head under the root names.
    ALONE = "alone"


def mtp_packaging(names: Collection[str], n_main: int) -> Shipped:
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
