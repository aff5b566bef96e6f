"""Every error dgr raises on purpose, in one tree.

Each message names the value, the limit it broke and the next step. The classes say *whose act* it was: an
:class:`InputError` is the caller's, an :class:`ArtifactError` the file's, an :class:`EngineError` the native code's,
a :class:`WireError` the link's or the peer's, a :class:`SessionError` the state's. Each has a cause, which is its docstring,
and a ``next_step`` that helps whatever the message says; ``docs/errors.md`` lists them all.
"""

from __future__ import annotations

from typing import ClassVar

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

    #: What to do whatever the message says: the second line of a command that ends with the error.
    next_step: ClassVar[str] = (
        "read what the message asks for; where it asks for nothing, report it with the log at level debug"
    )

    def __str__(self) -> str:
        return one_line(super().__str__())


# --- the caller's act ------------------------------------------------------------------------------------------------


class InputError(DgrError, ValueError):
    """The caller gave a value that dgr refuses; nothing was changed."""

    next_step = "give a value that the message allows; --help of the command, or the class's docstring, has the ranges"


class InvalidLayerRange(InputError):
    """A layer range is empty, malformed or reaches beyond the model's last main layer."""

    next_step = "choose A:B within the main layers: `dgr inspect MODEL` counts them, `--cuts` says where one may cut"


class InvalidRoute(InputError):
    """The layer ranges of a route do not cover the main layers exactly once, in order."""

    next_step = (
        "let the ranges follow one another from 0 to the last main layer, as `dgr plan MODEL --stages N` writes them"
    )


class InvalidToken(InputError):
    """A token id lies outside the vocabulary."""

    next_step = "use ids that this model's own vocabulary gave; `dgr inspect MODEL` shows how many there are"


class ContextLimitExceeded(InputError):
    """Prompt plus history do not fit n_ctx; dgr never trims or shifts a prompt."""

    next_step = "shorten the prompt, ask for fewer tokens, or give all stages a larger n_ctx (`--ctx`)"


class NumericsRefused(InputError):
    """Exact numerics were asked for with a weight or K-cache type that is not exact on this machine."""

    next_step = "run `dgr selftest numerics` here, take a file of the types that it lists, or choose native numerics"


class MtpNotExecutable(InputError):
    """Something asked for multi-token prediction, which dgr knows by contract only; the message names its version."""

    next_step = "leave the flag or the key out; docs/mtp-contract.md says what is missing"


class BudgetExceeded(InputError):
    """Weights, state and compute buffers do not fit the memory budget; the message shows the arithmetic."""

    next_step = "own fewer layers (`dgr plan`), fewer sessions or a shorter context, or raise `--memory`"


class SessionBusy(InputError):
    """A session was asked for a second generation while one is still running."""

    next_step = "end the running generation (`aclose()`), or take another session for the second one"


# --- the file's act --------------------------------------------------------------------------------------------------


class ArtifactError(DgrError):
    """A GGUF file is missing, truncated, malformed or lacks a tensor that the layer range needs."""

    next_step = "check the path, and the file itself; `dgr inspect FILE` reads it without its weights"


class UnsupportedModel(ArtifactError):
    """The GGUF is sound, but not a model this version runs (architecture, compress ratio, MTP execution, ...)."""

    next_step = (
        "take a DeepSeek V4 file that `dgr inspect` accepts; docs/artifacts.md lists the published ones that are"
    )


# --- the native code's act -------------------------------------------------------------------------------------------


class EngineError(DgrError):
    """Native code failed; the sessions in the batch are lost on every stage."""

    next_step = "ask again, the session is prefilled anew; if it repeats, `--log debug` shows what llama.cpp says"


class NonFinite(EngineError):
    """NaN or Inf in a residual or in logits, or a value too great for the wire type: ends one request, never the stage."""

    next_step = (
        "drop the session and ask again; if it repeats, check the file (`dgr inspect --identity`) and a wider `--wire`"
    )


# --- the link's or the peer's act ------------------------------------------------------------------------------------


class WireError(DgrError):
    """Something went wrong on a link."""

    next_step = "look at the route: `dgr doctor --route ROUTE.toml`"


class FrameError(WireError):
    """Bytes on a link are not a frame of this schema, or break a negotiated limit."""

    next_step = "run the same version of dgr at both ends, and let nothing but dgr connect to the port"


class SchemaMismatch(FrameError):
    """The other side is a dgr that speaks another schema."""

    next_step = "install the same version of dgr at both ends: the message says which of them is the older one"


class ClosedError(WireError):
    """The link was closed on this side."""

    next_step = "open the pipeline or the link again; what was closed takes no more work"


class LinkBroken(WireError):
    """The link was closed or broken by the other side."""

    next_step = "see whether the stage runs (`dgr doctor --route`); its pipeline reaches it again by itself"


class NoCandidate(WireError):
    """None of the stages that own the same layers can be had; the message names them all."""

    next_step = "bring one of the stages that are named back, or add a spare; `dgr doctor --route` says what each lacks"


class PeerRefused(WireError):
    """A stage refused a request; the message carries its reason."""

    next_step = "do what the stage's reason asks for; `dgr doctor --route` compares what the stages are"


class Overloaded(PeerRefused):
    """A stage has no free sequence slot and no idle session to evict, or its inbox is full."""

    next_step = "ask again when a session has ended, or give the stages more slots (`--sessions`)"


class StageDraining(Overloaded):
    """A stage is about to be maintained and takes no new sessions."""

    next_step = (
        "ask again in a moment, add a spare of its layers, or take the drain back (`dgr drain HOST:PORT --undo`)"
    )


class DeadlineExceeded(WireError, TimeoutError):
    """A stated deadline passed without an answer."""

    next_step = "see which stage is slow or silent (`dgr top`, `dgr doctor --route`), or allow more time"


# --- the state's act -------------------------------------------------------------------------------------------------


class SessionError(DgrError):
    """A session cannot go on as it was."""

    next_step = "open a new session with the same text; the route is not touched"


class SessionLost(SessionError):
    """The session's state is gone on at least one stage; a re-prefill would restore it."""

    next_step = "ask again: the transcript is prefilled from its first token"


class CacheMissed(SessionLost):
    """A stage does not hold exactly the state that the frame expected."""

    next_step = "ask again: the transcript is prefilled from its first token"


class PrefillFailed(SessionError):
    """The transcript could not be re-prefilled within the bounded number of tries."""

    next_step = "mend what the cause says, which failed at every try, and ask again"


# --- the server's act ------------------------------------------------------------------------------------------------


class ServingError(DgrError):
    """A server does not answer a request now; the same request may be answered later.

    ``retry_after``: seconds after which it is worth asking again; None when nobody can tell.
    """

    next_step = "ask again after `retry_after` seconds"

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(ServingError):
    """As many requests or prompt tokens wait as may wait; nothing of this one was begun."""

    next_step = "ask again after `retry_after` seconds, or raise `--max-queued` and `--max-queued-tokens`"


class NotServing(ServingError):
    """The route has no stages that answer, or the server is about to end."""

    next_step = "ask again when `/ready` is 200; its `reason` says what is awaited"


class RequestTimedOut(ServingError, TimeoutError):
    """The request's own deadline passed before its answer was complete."""

    next_step = "ask the same again, which goes on where this answer stopped, or raise `--deadline`"
