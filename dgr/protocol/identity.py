"""Who a stage is, on the wire, and whether two belong together."""

from __future__ import annotations

from collections.abc import Mapping

from dgr.core.mtp import CAPABILITY, CONTRACT, asks_for_mtp, not_executable, refuse_capabilities
from dgr.core.values import ContextParams, StageIdentity
from dgr.errors import InvalidRoute

__all__ = ["check_alike", "check_link", "check_neighbours", "check_wants"]

#: What every stage of a route shares; the words are what a refusal calls it.
_SHARED: Mapping[str, str] = {
    "adapter": "adapter",
    "architecture": "architecture",
    "artifact": "artifact identity",
    "runtime": "runtime (dgr version, llama.cpp pin and patches)",
    "n_layers": "number of main layers",
    "n_vocab": "vocabulary size",
    "token_sideband": "token-id sideband",
    "context": "context parameters",
}


def check_alike(who: str, theirs: StageIdentity, ours: StageIdentity) -> None:
    """Refuse a stage that differs in what a route shares, naming both values, or that offers MTP."""
    refuse_capabilities(theirs.capabilities, who)
    for name, words in _SHARED.items():
        if (their := getattr(theirs, name)) != (our := getattr(ours, name)):
            what = _differences(their, our) if isinstance(our, ContextParams) else f"{their} is not {our}"
            raise InvalidRoute(f"{who} differs in its {words}: {what}")
    if ours.context.numerics.exact_kernels and theirs.kernel_fingerprint != ours.kernel_fingerprint:
        raise InvalidRoute(
            f"{who} has kernel fingerprint {theirs.kernel_fingerprint}, not {ours.kernel_fingerprint}: exact numerics need"
            " equal ones; use numerics = native, or hosts of one kind"
        )


def _differences(theirs: ContextParams, ours: ContextParams) -> str:
    pairs = ((name, getattr(theirs, name), getattr(ours, name)) for name in ContextParams.__struct_fields__)
    return ", ".join(f"{name} {their} is not {our}" for name, their, our in pairs if their != our)


def check_neighbours(before: StageIdentity, after: StageIdentity) -> None:
    """Refuse two stages of which one does not continue where the other ends."""
    if before.layers.end != after.layers.begin:
        raise InvalidRoute(f"layers {before.layers} cannot be followed by {after.layers}")
    if before.width_out != after.width_in:
        raise InvalidRoute(
            f"layers {before.layers} send {before.width_out} floats a token, {after.layers} take {after.width_in}"
        )


def check_link(before: StageIdentity, after: StageIdentity) -> None:
    """Refuse a link from one stage to another that does not come next on any ring: after a tail comes a head."""
    if not (before.is_tail and after.is_head):
        check_neighbours(before, after)


def check_wants(wants: tuple[str, ...], identity: StageIdentity) -> None:
    """Refuse a capability that the stage does not execute; MTP under whatever name, and whatever the stage says of it."""
    offered = identity.capabilities
    executable = ", ".join(key for key, value in offered.items() if value == "executable") or "none"
    for name in wants:
        found = f"capability {name!r} is {offered.get(name, 'unknown')} on this stage"
        if asks_for_mtp(name):
            raise not_executable(f"{found} (executable: {executable}); wanting it")
        if offered.get(name) != "executable":
            raise InvalidRoute(
                f"{found}, so it cannot be asked for; executable: {executable}; reserved: {CAPABILITY} ({CONTRACT})"
            )
