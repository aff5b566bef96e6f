"""The fields of request bodies that dgr itself reads: types and ranges. Fields it does not know are ignored."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta, Struct

from dgr.core.files.inputs import NOT_JSON
from dgr.core.values import SamplingParams
from dgr.serving.api.errors import ApiError

__all__ = [
    "MOST_CHOICES",
    "ChatFields",
    "ChoicesFields",
    "CompletionFields",
    "Fields",
    "MessagesFields",
    "ResponsesFields",
    "StreamOptions",
    "decode_body",
    "read_fields",
]

#: Choices of one request; OpenAI's own bound.
MOST_CHOICES = 128
#: Stop strings, and characters of one: what is held back is compared with all of them at every token.
_MOST_STOPS, _LONGEST_STOP = 16, 1024
#: Candidates asked of the tail when log-probabilities are wanted: the drawn token should be among them.
_CANDIDATES = 64
_AT = re.compile(r" - at `\$\.?([^`]*)`$")

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Length = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Stop = str | list[str] | None

#: What would constrain the answer and is not there: refused, since an answer without it would look like one with it.
_REFUSED = {
    "logit_bias": "the sampler takes no biases",
    "grammar": "the sampler knows no grammars",
    "json_schema": "the sampler knows no schemas",
    "guided_json": "the sampler knows no schemas",
    "guided_regex": "the sampler knows no patterns",
    "guided_choice": "the sampler knows no choices",
    "guided_grammar": "the sampler knows no grammars",
    "structured_outputs": "the sampler knows no schemas",
    "functions": "give `tools`",
    "function_call": "give `tool_choice`",
    "suffix": "the model fills nothing in",
    "echo": "the prompt is not repeated",
    "audio": "the model has no audio",
}


_STATELESS = "nothing is kept from one request to the next"


class StreamOptions(Struct):
    """``stream_options``."""

    include_usage: bool | None = None


class Fields(Struct, kw_only=True):
    """What all APIs share, dgr's own parameters of sampling among them."""

    #: What would change the answer, or what a client could rely on, and is not there: by name, and why.
    refused: ClassVar[Mapping[str, str]] = _REFUSED

    model: str | None = None
    stream: bool | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Count] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None

    @property
    def choices(self) -> int:
        """Answers to one prompt."""
        return 1

    @property
    def most_tokens(self) -> int | None:
        """Tokens of an answer; None: not said."""
        raise NotImplementedError

    @property
    def stop_strings(self) -> list[str]:
        raise NotImplementedError

    @property
    def wants_usage(self) -> bool:
        """Whether a stream must end with the numbers of tokens."""
        return True

    @property
    def wants_progress(self) -> bool:
        """Whether a stream must tell how far the prompt is."""
        return False

    @property
    def wants_logprobs(self) -> bool:
        return False

    def check(self) -> None:
        """What one field's type does not say. Raises :class:`ApiError`."""
        stops = self.stop_strings
        if len(stops) > _MOST_STOPS or not all(0 < len(stop) <= _LONGEST_STOP for stop in stops):
            name = "stop_sequences" if isinstance(self, MessagesFields) else "stop"
            message = f"{name}: give up to {_MOST_STOPS} strings of 1 to {_LONGEST_STOP} characters"
            raise ApiError(400, message, param=name, code="invalid_value")

    def sampling(self, seed: int, choice: int) -> SamplingParams:
        """How choice number ``choice`` is drawn. The model card's defaults: temperature 1, everything else off."""
        return SamplingParams(
            temperature=_or(self.temperature, 1.0),
            top_k=max(_or(self.top_k, 0), 0),
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            repeat_penalty=_or(self.repeat_penalty, _or(self.repetition_penalty, 1.0)),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            penalty_last_n=_or(self.repeat_last_n, -1),
            seed=seed,
            choice=choice,
            top_logprobs=_CANDIDATES if self.wants_logprobs else 0,
        )

    def name_of(self, parameter: str) -> str:
        """The field that gave a parameter of :class:`~dgr.core.values.SamplingParams`."""
        by_other_name = parameter == "repeat_penalty" and self.repeat_penalty is None
        return "repetition_penalty" if by_other_name else parameter

    def seed_or_random(self) -> int:
        """The client's seed, or a random one."""
        return secrets.randbits(63) if self.seed is None else self.seed


class ChoicesFields(Fields, kw_only=True):
    """What chat and text completions share."""

    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    best_of: int | None = None
    max_tokens: Length | None = None
    stop: Stop = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def stop_strings(self) -> list[str]:
        return _strings(self.stop)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_progress(self) -> bool:
        return bool(self.return_progress)

    def check(self) -> None:
        super().check()
        if (self.best_of or 1) > self.choices:
            raise ApiError(400, "best_of is not supported: give n", param="best_of", code="unsupported_parameter")


class ChatFields(ChoicesFields, kw_only=True):
    """``/v1/chat/completions``, without what deepseek-recipe reads: messages, tools, thinking."""

    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def most_tokens(self) -> int | None:
        """Tokens of the answer; the newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionFields(ChoicesFields, kw_only=True):
    """``/v1/completions``."""

    #: A text, token ids, or a list of either.
    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class ResponsesFields(Fields, kw_only=True):
    """``/v1/responses``, without what deepseek-recipe reads: input, instructions, tools, reasoning."""

    refused: ClassVar[Mapping[str, str]] = {
        **_REFUSED,
        "previous_response_id": f"{_STATELESS}: give the whole conversation as `input`",
        "conversation": f"{_STATELESS}: give the whole conversation as `input`",
        "store": f"{_STATELESS}: leave it out, or give false",
        "background": f"{_STATELESS}: an answer ends with its connection",
        "prompt": f"{_STATELESS}: give `instructions` and `input`",
        "context_management": "the conversation is not shortened here",
        "max_tool_calls": "no tool runs here",
    }

    max_output_tokens: Length | None = None
    #: Not a field of OpenAI's; all other APIs have it.
    stop: Stop = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def stop_strings(self) -> list[str]:
        return _strings(self.stop)

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())


class MessagesFields(Fields, kw_only=True):
    """``/v1/messages``, without what deepseek-recipe reads: messages, system, tools, thinking."""

    refused: ClassVar[Mapping[str, str]] = {
        **_REFUSED,
        "container": "nothing runs here",
        "mcp_servers": "no tool runs here",
        "context_management": "the conversation is not shortened here",
        "output_format": "the sampler knows no schemas",
    }

    max_tokens: Length | None = None
    stop_sequences: list[str] | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def stop_strings(self) -> list[str]:
        return self.stop_sequences or []


T = TypeVar("T")
F = TypeVar("F", bound=Fields)


def _strings(stop: Stop) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def decode_body(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises :class:`ApiError`."""
    try:
        body = msgspec.json.decode(raw)
    except NOT_JSON as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {type(body).__name__}, not an object", code="invalid_json")
    return body


def read_fields(body: dict[str, Any], kind: type[F]) -> F:
    """The typed fields of a body. Raises :class:`ApiError` naming the parameter."""
    for name, why in kind.refused.items():
        if body.get(name) not in (None, False, {}, [], ""):
            raise ApiError(400, f"{name} is not supported: {why}", param=name, code="unsupported_parameter")
    try:
        fields = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        at = _AT.search(message)
        param = at[1] if at else None
        text = message[: at.start()] if at else message
        raise ApiError(400, f"{param or 'the body'}: {text}", param=param, code="invalid_value") from error
    fields.check()
    return fields
