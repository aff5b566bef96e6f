"""Devices beside the CPU: which there are here, and what a stage is to take of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import frozen

from dgr.core.arguments import check_whole
from dgr.engine.native import Native, default_native
from dgr.errors import InputError

__all__ = ["ALL_DEVICES", "Device", "Placement", "find_devices"]

#: More layers than any model has: what is above is a mistake.
_MOST_LAYERS = 2**15
_NAME = re.compile(r"[A-Za-z][\w.:\[\]-]{0,62}")


@frozen
class Device:
    """A device that can hold layers."""

    #: As llama.cpp calls it, e.g. ``CUDA0``.
    name: str
    #: In its own words.
    description: str
    #: Bytes of its memory, and those that are free now.
    memory_total: int
    memory_free: int


@frozen
class Placement:
    """Where a stage's layers lie.

    ``devices``: names of :func:`find_devices`, in the order in which layers are dealt out, by free memory; ``("CPU",)`` is
    the CPU alone; None: every device there is. ``gpu_layers``: so many of the stage's layers lie on them, the last ones,
    and with them a tail's output; the others stay with the CPU. None: all. Exact numerics run on the CPU alone and admit
    nothing else.
    """

    devices: tuple[str, ...] | None = None
    gpu_layers: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.devices is not None:
            if not self.devices:
                raise InputError("no device is named; name some, or CPU for the CPU alone")
            for name in self.devices:
                if not isinstance(name, str) or not _NAME.fullmatch(name):
                    raise InputError(f"device {name!r} is no name like CUDA0, Vulkan0, ROCm0, Metal or CPU")
        if self.gpu_layers is not None:
            check_whole("gpu_layers", self.gpu_layers, 0, _MOST_LAYERS)

    @classmethod
    def parse(cls, devices: str | None, gpu_layers: int | None = None) -> Placement:
        """From the texts of flags and route files: names with a comma between them."""
        names = None if devices is None else tuple(name.strip() for name in devices.split(","))
        return cls(names, gpu_layers)


#: What llama.cpp does by itself.
ALL_DEVICES = Placement()


def find_devices(native: Native | None = None) -> Sequence[Device]:
    """The devices of this host that this build can compute on; none in a build for the CPU alone."""
    native = native or default_native()
    most = native.lib.DGR_MAX_DEVICES
    out, count = native.ffi.new("dgr_device[]", most), native.ffi.new("int32_t *")
    native.check(native.lib.dgr_devices(out, most, count), "devices")

    def text(value: object) -> str:
        return str(native.ffi.string(value).decode("utf-8", "replace"))

    return tuple(
        Device(text(one.name), text(one.description), int(one.memory_total), int(one.memory_free))
        for one in out[0 : min(count[0], most)]
    )
