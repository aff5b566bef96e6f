"""Who a stage is, on the wire, and whether two belong together."""

from __future__ import annotations

from collections.abc import Mapping

from dgr.core.mtp import CAPABILITY, CONTRACT, asks_for_mtp, not_executable, refuse_capabilities
from dgr.core.route import LayerRange
from dgr.engine.base import ContextParams, EngineDescription, Numerics
from dgr.errors import InputError, InvalidRoute
from dgr.wire import frames

__all__ = ["WIRE_DTYPE", "check_alike", "check_neighbours", "check_wants", "describe_identity", "identity_of"]

#: How residuals travel: bit-exact.
WIRE_DTYPE = "f32"

#: What every stage of a route shares; the words are what a refusal calls it.
_SHARED: Mapping[str, str] = {
    "adapter": "adapter",
    "architecture": "architecture",
    "artifact": "artifact identity",
    "runtime": "runtime (dgr version, llama.cpp pin and patches)",
    "n_layers": "number of main layers",
    "n_vocab": "vocabulary size",
    "token_sideband": "token-id sideband",
    "wire_dtype": "wire dtype",
    "context": "context parameters",
}


def identity_of(description: EngineDescription) -> frames.Identity:
    """What a stage says of itself in a handshake."""
    context = description.context
    return frames.Identity(
        adapter=description.adapter,
        architecture=description.architecture,
        artifact=description.artifact,
        runtime=description.runtime,
        layer_begin=description.layers.begin,
        layer_end=description.layers.end,
        n_layers=description.n_layers,
        n_vocab=description.n_vocab,
        width_in=description.width_in,
        width_out=description.width_out,
        token_sideband=description.token_sideband,
        kernel_fingerprint=description.kernel_fingerprint,
        wire_dtype=WIRE_DTYPE,
        context=frames.Context(
            context.n_ctx,
            context.n_batch,
            context.n_ubatch,
            context.n_seq_max,
            context.type_k,
            context.flash_attn,
            context.numerics.value,
        ),
        components=description.components,
        capabilities=tuple(sorted(description.capabilities.items())),
        devices=tuple(device[:128] for device in description.devices[:64]),
    )


def describe_identity(identity: frames.Identity) -> EngineDescription:
    """The description behind an identity. Raises :class:`~dgr.errors.InvalidRoute` for values that make no sense."""
    context = identity.context
    try:
        return EngineDescription(
            adapter=identity.adapter,
            architecture=identity.architecture,
            artifact=identity.artifact,
            runtime=identity.runtime,
            layers=LayerRange(identity.layer_begin, identity.layer_end),
            n_layers=identity.n_layers,
            n_vocab=identity.n_vocab,
            width_in=identity.width_in,
            width_out=identity.width_out,
            token_sideband=identity.token_sideband,
            kernel_fingerprint=identity.kernel_fingerprint,
            components=identity.components,
            context=ContextParams(
                n_ctx=context.n_ctx,
                n_batch=context.n_batch,
                n_ubatch=context.n_ubatch,
                n_seq_max=context.n_seq_max,
                type_k=context.type_k,
                flash_attn=context.flash_attn,
                numerics=_numerics(context.numerics),
            ),
            capabilities=dict(identity.capabilities),
            devices=identity.devices,
        )
    except InputError as error:
        raise InvalidRoute(f"a stage says of itself what cannot be: {error}") from error


def _numerics(name: str) -> Numerics:
    try:
        return Numerics(name)
    except ValueError:
        raise InvalidRoute(f"it runs numerics {name!r}; this dgr knows exact and native") from None


def check_alike(who: str, theirs: frames.Identity, ours: frames.Identity) -> None:
    """Refuse a stage that differs in what a route shares, naming both values, or that offers MTP."""
    refuse_capabilities(dict(theirs.capabilities), who)
    for name, words in _SHARED.items():
        if (their := getattr(theirs, name)) != (our := getattr(ours, name)):
            raise InvalidRoute(f"{who} differs in its {words}: {their} is not {our}")
    if ours.context.numerics == Numerics.EXACT.value and theirs.kernel_fingerprint != ours.kernel_fingerprint:
        raise InvalidRoute(
            f"{who} has kernel fingerprint {theirs.kernel_fingerprint}, not {ours.kernel_fingerprint}: exact numerics need"
            " equal ones; use numerics = native, or hosts of one kind"
        )


def check_neighbours(before: frames.Identity, after: frames.Identity) -> None:
    """Refuse two stages of which one does not continue where the other ends."""
    if before.layer_end != after.layer_begin:
        raise InvalidRoute(
            f"layers {before.layer_begin}:{before.layer_end} cannot be followed by {after.layer_begin}:{after.layer_end}"
        )
    if before.width_out != after.width_in:
        raise InvalidRoute(
            f"layers {before.layer_begin}:{before.layer_end} send {before.width_out} floats a token,"
            f" {after.layer_begin}:{after.layer_end} take {after.width_in}"
        )


def check_wants(wants: tuple[str, ...], identity: frames.Identity) -> None:
    """Refuse a capability that the stage does not execute; MTP under whatever name, and whatever the stage says of it."""
    offered = dict(identity.capabilities)
    executable = ", ".join(key for key, value in offered.items() if value == "executable") or "none"
    for name in wants:
        found = f"capability {name!r} is {offered.get(name, 'unknown')} on this stage"
        if asks_for_mtp(name):
            raise not_executable(f"{found} (executable: {executable}); wanting it")
        if offered.get(name) != "executable":
            raise InvalidRoute(
                f"{found}, so it cannot be asked for; executable: {executable}; reserved: {CAPABILITY} ({CONTRACT})"
            )
