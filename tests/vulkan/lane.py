"""What the tests of the Vulkan lane share."""

from __future__ import annotations

from dgr.core.values import ContextParams, Numerics

__all__ = ["LAYERS", "NATIVE", "PACKAGES", "SOFTWARE"]

#: For a software device, and harmless on a card. ggml passes over devices that are CPUs unless they are named; pipelines
#: that are made while the queue runs, and scratch buffers that grow between two dispatches, crash Mesa's lavapipe.
SOFTWARE = {
    "GGML_VK_VISIBLE_DEVICES": "0",
    "GGML_VK_SERIALIZE_SUBMISSIONS": "1",
    "GGML_VK_SCRATCH": str(16 << 20),
}
PACKAGES = "mesa-vulkan-drivers libvulkan-dev glslc spirv-headers"

#: Two SWA layers, one CSA, one HCA, one CSA.
LAYERS = 5
NATIVE = ContextParams(n_ctx=256, n_batch=64, n_ubatch=64, n_seq_max=2, numerics=Numerics.NATIVE)
