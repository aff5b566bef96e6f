"""What a request is refused with, in the shape of the API it was made to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import msgspec

from dgr.errors import ContextLimitExceeded, DgrError, InputError, NonFinite, NotServing, QueueFull, RequestTimedOut

__all__ = ["ApiError", "ErrorShape", "api_error", "naming", "not_text", "nothing_to_answer", "overlong"]

_OVERLONG = "context_length_exceeded"


class ErrorShape(Enum):
    """Whose clients read an error."""

    #: ``{"error": {message, type, param, code}}``
    OPENAI = "openai"
    #: ``{"type": "error", "error": {type, message}}``
    ANTHROPIC = "anthropic"

    @classmethod
    def of(cls, path: str) -> ErrorShape:
        """The shape for what was asked at a URL's path."""
        return cls.ANTHROPIC if path == "/v1/messages" or path.startswith("/v1/messages/") else cls.OPENAI


#: Anthropic's word for a status; what is not here is the request's fault below 500, and the server's above.
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A refusal or a failure as a client sees it: an HTTP status, what was wrong, and facts about it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        #: OpenAI's ``type``.
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.facts = dict(facts or {})

    def content(self, shape: ErrorShape = ErrorShape.OPENAI) -> dict[str, Any]:
        """What the response's body or an error event says."""
        if shape is ErrorShape.ANTHROPIC:
            kind = _ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": self._anthropic_message()}}
        told = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": {**told, **self.facts}}

    def body(self, shape: ErrorShape = ErrorShape.OPENAI) -> bytes:
        """:meth:`content` as JSON."""
        return msgspec.json.encode(self.content(shape))

    def _anthropic_message(self) -> str:
        """Clients of that API know by these words that they must shorten the conversation, or ask for less."""
        if self.code != _OVERLONG:
            return self.message
        match self.facts:
            case {"n_prompt_tokens": prompt, "max_tokens": int(answer), "n_ctx": n_ctx}:
                told = f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > {n_ctx}"
            case {"n_prompt_tokens": prompt, "n_ctx": n_ctx}:
                told = f"prompt is too long: {prompt} tokens > {n_ctx} maximum"
            case _:
                told = "prompt is too long"
        return f"{told}; {self.message}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers beside the content's own."""
        found = {"content-type": "application/json"}
        if self.retry_after is not None:
            found["retry-after"] = str(math.ceil(self.retry_after))
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found


def api_error(error: DgrError) -> ApiError:
    """What a client is told of one of dgr's own errors."""
    message = str(error)
    match error:
        case ContextLimitExceeded():
            return ApiError(400, message, code=_OVERLONG)
        case InputError():
            return ApiError(400, message, code="invalid_value")
        case QueueFull(retry_after=wait):
            return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after=wait)
        case NotServing(retry_after=wait):
            return ApiError(503, message, kind="server_error", code="service_unavailable", retry_after=wait)
        case RequestTimedOut():
            return ApiError(504, message, kind="server_error", code="deadline_exceeded")
        case NonFinite():
            return ApiError(500, message, kind="server_error", code="non_finite")
        case _:
            return ApiError(500, message, kind="server_error", code="internal_error")


@contextmanager
def naming(param: str, before: str = "") -> Iterator[None]:
    """Bad input within is a 400 that names a field. Raises :class:`ApiError`. ``before``: what its message begins with."""
    try:
        yield
    except InputError as error:
        raise ApiError(400, f"{before}{error}", param=param, code="invalid_value") from error


def overlong(n_prompt: int, n_answer: int | None, n_ctx: int, *, at_least: bool = False) -> ApiError:
    """What a client is told of a request that does not fit, with the numbers as fields too."""
    asked = f"{'at least ' if at_least else ''}{n_prompt} in the prompt"
    asked += "" if n_answer is None else f" and {n_answer} for the answer"
    error = ContextLimitExceeded(
        f"this model's context holds {n_ctx} tokens, but the request asks for {asked}; shorten one of them"
    )
    told = api_error(error)
    told.facts = {"n_prompt_tokens": n_prompt, "n_ctx": n_ctx}
    if n_answer is not None and n_prompt <= n_ctx:
        told.facts["max_tokens"] = n_answer
    return told


def not_text(where: str, kind: object) -> ApiError:
    """What a client is told of a part of a message that the model cannot read."""
    message = f"{where}: a part of type {str(kind)[:40]!r}; this model reads text alone"
    return ApiError(400, message, param=where, code="invalid_value")


def nothing_to_answer(param: str, way: str = "") -> ApiError:
    """What a client is told of a conversation that ends with an answer. ``way``: what to do beside adding a message."""
    message = f"the conversation ends with an answer: add a user message{way}"
    return ApiError(400, message, param=param, code="invalid_value")
