"""Errors in OpenAI's shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from dgr.errors import ContextLimitExceeded, DgrError, InputError, NonFinite, NotServing, QueueFull, RequestTimedOut

__all__ = ["ApiError", "api_error", "overlong"]


class ApiError(Exception):
    """A refusal or a failure as a client sees it: an HTTP status, and ``{"error": {message, type, param, code}}``."""

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
        self.retry_after = retry_after
        self.content: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code, **(facts or {})}
        }

    @property
    def body(self) -> bytes:
        """The response's body, and the data of an error event."""
        return msgspec.json.encode(self.content)

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
            return ApiError(400, message, code="context_length_exceeded")
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


def overlong(n_prompt: int, n_answer: int | None, n_ctx: int, *, at_least: bool = False) -> ApiError:
    """What a client is told of a request that does not fit, with the numbers as fields too."""
    asked = f"{'at least ' if at_least else ''}{n_prompt} in the prompt"
    asked += "" if n_answer is None else f" and {n_answer} for the answer"
    error = ContextLimitExceeded(
        f"this model's context holds {n_ctx} tokens, but the request asks for {asked}; shorten one of them"
    )
    told = api_error(error)
    told.content["error"] |= {"n_prompt_tokens": n_prompt, "n_ctx": n_ctx}
    return told
