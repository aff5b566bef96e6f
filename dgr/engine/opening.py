"""A native stage as it is opened: from values to ``dgr_stage_params``, and from ``dgr_stage_info`` to what it takes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from dgr.artifact.artifact import Artifact
from dgr.core.arguments import check_flag, check_instance, check_whole
from dgr.core.host import available_memory
from dgr.core.route import LayerRange
from dgr.core.values import ContextParams
from dgr.engine.base import DeviceMemory, MemoryReport
from dgr.engine.devices import ALL_DEVICES, Placement, find_devices
from dgr.engine.files import open_stage
from dgr.engine.native import Native, default_native
from dgr.errors import InputError
from dgr.v4.hyper_parameters import HyperParameters
from dgr.v4.state_map import Component

__all__ = [
    "MOST_THREADS",
    "estimate_memory",
    "given",
    "memory_of",
    "open_native",
    "read_info",
    "text_of",
    "warn_beyond_training",
]

_log = logging.getLogger("dgr.stage")

#: More compute threads than any machine has cores: what is above is a mistake.
MOST_THREADS = 2**15

#: ggml_type of the K cache types the shim knows.
_TYPE_K = {"f32": 0, "f16": 1, "q8_0": 8}


def open_native(
    native: Native,
    artifact: Artifact,
    layers: LayerRange,
    context: ContextParams,
    options: dict[str, int | bool],
    placement: Placement = ALL_DEVICES,
    needs: int = 0,
) -> Any:
    """A native stage handle; it must be closed. ``needs``: bytes of its weights, state and buffers, where they are known."""
    _check_type_k(context)
    params = native.ffi.new("dgr_stage_params *", native.lib.dgr_stage_params_default())
    params.layer_begin, params.layer_end = layers.begin, layers.end
    for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max"):
        setattr(params, name, getattr(context, name))
    threads = options.get("threads", 1)
    check_whole("threads", threads, 1, MOST_THREADS)
    for name in ("mmap", "mlock", "check_tensors", "dry_run"):
        check_flag(name, options.get(name, False))
    params.n_threads = threads
    params.type_k = _TYPE_K[context.type_k]
    params.flash_attn = context.flash_attn
    params.exact = context.numerics.exact_kernels
    params.use_mmap = options.get("mmap", False)
    # What does not fit beside the rest would drive itself out again.
    params.prefetch = params.use_mmap and artifact.weight_bytes(layers) < available_memory()
    params.lock = options.get("mlock", False)
    params.check_tensors = options.get("check_tensors", False)
    params.dry_run = options.get("dry_run", False)
    check_instance("placement", placement, Placement)
    _check_devices(native, context, placement)
    names = None if placement.devices is None else native.ffi.new("char[]", ",".join(placement.devices).encode())
    params.devices = native.ffi.NULL if names is None else names
    if placement.gpu_layers:  # a tail's output is a layer to llama.cpp
        params.gpu_layers = placement.gpu_layers + (layers.end == artifact.hp.n_layers)
    elif placement.gpu_layers == 0:
        params.gpu_layers = 0
    return open_stage(native, artifact, layers, params, needs)


def given(
    artifact: Artifact, layers: LayerRange | None, context: ContextParams | None
) -> tuple[ContextParams, LayerRange]:
    """The context and the layers of a stage: what was asked for, or the defaults."""
    context = ContextParams() if context is None else context
    layers = artifact.layers if layers is None else layers
    check_instance("context", context, ContextParams)
    check_instance("layers", layers, LayerRange)
    _check_type_k(context)
    return context, layers


def _check_type_k(context: ContextParams) -> None:
    if context.type_k not in _TYPE_K:
        raise InputError(f"{context.type_k!r} is no K-cache type; choose one of {', '.join(_TYPE_K)}")


def _check_devices(native: Native, context: ContextParams, placement: Placement) -> None:
    """Refuse layers for devices where there is none. Exact numerics refuse them, devices or not."""
    if not placement.gpu_layers or placement.devices is not None or context.numerics.exact_kernels:
        return
    if not find_devices(native):
        raise InputError(
            f"gpu_layers is {placement.gpu_layers}, and there is no device here but the CPU to hold them; leave it out"
        )


def warn_beyond_training(hp: HyperParameters, n_ctx: int) -> None:
    """Log that a context is longer than those the model was trained on."""
    if n_ctx > hp.context_length:
        _log.warning(
            "the context holds %d tokens (n_ctx), the model was trained on %d at most: nobody knows what it answers beyond",
            n_ctx,
            hp.context_length,
        )


def read_info(native: Native, stage: Any) -> Any:
    """What an open stage tells of itself: ``dgr_stage_info``."""
    info = native.ffi.new("dgr_stage_info *")
    native.check(native.lib.dgr_stage_info_get(stage, info), "stage info")
    return info


def text_of(native: Native, value: Any) -> str:
    """Text of a C array of characters."""
    return str(native.ffi.string(value).decode("utf-8", "replace"))


def memory_of(native: Native, info: Any) -> MemoryReport:
    """What a stage takes, from its ``dgr_stage_info``."""
    return MemoryReport(
        weights=int(info.weight_bytes),
        compute=int(info.compute_bytes) + int(info.output_bytes),
        state={component.value: int(info.state_bytes[i]) for i, component in enumerate(Component)},
        devices={
            text_of(native, one.name): DeviceMemory(int(one.weight_bytes), int(one.compute_bytes), int(one.state_bytes))
            for one in info.device_bytes[0 : info.n_device_bytes]
        },
    )


def estimate_memory(
    model: str | Path | Artifact,
    layers: LayerRange | None = None,
    context: ContextParams | None = None,
    placement: Placement = ALL_DEVICES,
) -> MemoryReport:
    """What a stage would allocate, as the native allocator counts it, with nothing allocated.

    To the byte on the CPU; a driver may round what it allocates for the host up a little.
    """
    artifact = model if isinstance(model, Artifact) else Artifact.open(model)
    context, layers = given(artifact, layers, context)
    native = default_native()
    stage = open_native(native, artifact, layers, context, {"dry_run": True}, placement)
    try:
        return memory_of(native, read_info(native, stage))
    finally:
        native.lib.dgr_stage_close(stage)
