"""Every error dgr raises on purpose, in one tree.

Each message names the value, the limit it broke and the next step. The classes say *whose act* it was: an
:class:`InputError` is the caller's, an :class:`ArtifactError` the file's, an :class:`EngineError` the native code's,
a :class:`WireError` the link's or the peer's, a :class:`SessionError` the state's.
"""

from __future__ import annotations

from dgr.text import one_line

__all__ = [
    "ArtifactError",
    "BudgetExceeded",
    "CacheMissed",
    "ClosedError",
    "ContextLimitExceeded",
    "DeadlineExceeded",
    "DgrError",
    "EngineError",
    "FrameError",
    "InputError",
    "InvalidLayerRange",
    "InvalidRoute",
    "InvalidToken",
    "LinkBroken",
    "MtpNotExecutable",
    "NoCandidate",
    "NonFinite",
    "NotServing",
    "NumericsRefused",
    "Overloaded",
    "PeerRefused",
    "PrefillFailed",
    "QueueFull",
    "RequestTimedOut",
    "SchemaMismatch",
    "ServingError",
    "SessionBusy",
    "SessionError",
    "SessionLost",
    "StageDraining",
    "UnsupportedModel",
    "WireError",
]


class DgrError(Exception):
    """Root of the tree: catch this to catch everything dgr raises on purpose.

    As text it is one line without control characters, whatever a peer or a file had to say in it.
    """

    def __str__(self) -> str:
        return one_line(super().__str__())


# --- the caller's act ------------------------------------------------------------------------------------------------


class InputError(DgrError, ValueError):
    """The caller gave a value that dgr refuses; nothing was changed."""


class InvalidLayerRange(InputError):
    """A layer range is empty, malformed or reaches beyond the model's last main layer."""


class InvalidRoute(InputError):
    """The layer ranges of a route do not cover the main layers exactly once, in order."""


class InvalidToken(InputError):
    """A token id lies outside the vocabulary."""


class ContextLimitExceeded(InputError):
    """Prompt plus history do not fit n_ctx; dgr never trims or shifts a prompt."""


class NumericsRefused(InputError):
    """Exact numerics were asked for with a weight or K-cache type that is not exact on this machine."""


class MtpNotExecutable(InputError):
    """Something asked for multi-token prediction, which dgr knows by contract only; the message names its version."""


class BudgetExceeded(InputError):
    """Weights, state and compute buffers do not fit the memory budget; the message shows the arithmetic."""


class SessionBusy(InputError):
    """A session was asked for a second generation while one is still running."""


# --- the file's act --------------------------------------------------------------------------------------------------


class ArtifactError(DgrError):
    """A GGUF file is missing, truncated, malformed or lacks a tensor that the layer range needs."""


class UnsupportedModel(ArtifactError):
    """The GGUF is sound, but not a model this version runs (architecture, compress ratio, MTP execution, ...)."""


# --- the native code's act -------------------------------------------------------------------------------------------


class EngineError(DgrError):
    """Native code failed; the sessions in the batch are lost on every stage."""


class NonFinite(EngineError):
    """NaN or Inf in a residual or in logits, or a value too great for the wire type: ends one request, never the stage."""


# --- the link's or the peer's act ------------------------------------------------------------------------------------


class WireError(DgrError):
    """Something went wrong on a link."""


class FrameError(WireError):
    """Bytes on a link are not a frame of this schema, or break a negotiated limit."""


class SchemaMismatch(FrameError):
    """The other side is a dgr that speaks another schema."""


class ClosedError(WireError):
    """The link was closed on this side."""


class LinkBroken(WireError):
    """The link was closed or broken by the other side."""


class NoCandidate(WireError):
    """None of the stages that own the same layers can be had; the message names them all."""


class PeerRefused(WireError):
    """A stage refused a request; the message carries its reason."""


class Overloaded(PeerRefused):
    """A stage has no free sequence slot and no idle session to evict, or its inbox is full."""


class StageDraining(Overloaded):
    """A stage is about to be maintained and takes no new sessions."""


class DeadlineExceeded(WireError, TimeoutError):
    """A stated deadline passed without an answer."""


# --- the state's act -------------------------------------------------------------------------------------------------


class SessionError(DgrError):
    """A session cannot go on as it was."""


class SessionLost(SessionError):
    """The session's state is gone on at least one stage; a re-prefill would restore it."""


class CacheMissed(SessionLost):
    """A stage does not hold exactly the state that the frame expected."""


class PrefillFailed(SessionError):
    """The transcript could not be re-prefilled within the bounded number of tries."""


# --- the server's act ------------------------------------------------------------------------------------------------


class ServingError(DgrError):
    """A server does not answer a request now; the same request may be answered later.

    ``retry_after``: seconds after which it is worth asking again; None when nobody can tell.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(ServingError):
    """As many requests or prompt tokens wait as may wait; nothing of this one was begun."""


class NotServing(ServingError):
    """The route has no stages that answer, or the server is about to end."""


class RequestTimedOut(ServingError, TimeoutError):
    """The request's own deadline passed before its answer was complete."""
