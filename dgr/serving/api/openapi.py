"""What the server takes and gives, as an OpenAPI 3.1 document: schemas of the types that requests are read with.

Of what ``deepseek-recipe`` reads (messages, tools, items of input) the outlines alone are described here: it says what it
refuses. Fields that are not described are ignored, as OpenAI's API does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from dgr.serving.api.errors import ErrorShape
from dgr.serving.api.fields import ChatFields, CompletionFields, MessagesFields, ResponsesFields

__all__ = ["openapi_json"]

Object = dict[str, Any]
Objects = list[Object]
Thinks = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]


# --- requests ---------------------------------------------------------------------------------------------------------


class ThinkingSwitch(Struct):
    """``thinking``: whether the model thinks before it answers."""

    type: Literal["enabled", "disabled"]


class ThinkingMode(Struct):
    """``thinking`` as Anthropic has it; a budget of tokens is not kept."""

    type: Literal["enabled", "disabled", "adaptive"]


class ChatMessage(Struct):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
    content: str | Objects | None = None
    reasoning_content: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None
    #: On the last one, an assistant's: go on with it.
    prefix: bool | None = None


class ChatRequest(ChatFields, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: Objects | None = None
    tool_choice: str | Object | None = None
    reasoning_effort: Thinks | None = None
    thinking: ThinkingSwitch | None = None
    chat_template_kwargs: Object | None = None
    response_format: Object | None = None


class CompletionRequest(CompletionFields, kw_only=True):
    """``POST /v1/completions``."""


class ResponsesRequest(ResponsesFields, kw_only=True):
    """``POST /v1/responses``."""

    input: str | Annotated[Objects, Meta(min_length=1)]
    instructions: str | None = None
    tools: Objects | None = None
    tool_choice: str | Object | None = None
    reasoning: Object | None = None
    thinking: ThinkingSwitch | None = None
    text: Object | None = None
    metadata: dict[str, str] | None = None


class AnthropicMessage(Struct):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | Objects


class MessagesRequest(MessagesFields, kw_only=True):
    """``POST /v1/messages``."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: Object | None = None
    thinking: ThinkingMode | None = None
    output_config: Object | None = None


# --- answers ----------------------------------------------------------------------------------------------------------


class Usage(Struct):
    """Tokens of prompt and answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class ChatChoice(Struct):
    """One answer of a chat."""

    index: int
    message: Object
    logprobs: Object | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Struct):
    """The answer of a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(Struct):
    """One text."""

    index: int
    text: str
    logprobs: Object | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(Struct):
    """The texts that follow the prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class ResponseObject(Struct):
    """OpenAI's response."""

    id: str
    object: Literal["response"]
    status: Literal["completed", "incomplete", "failed"]
    output: Objects
    usage: Object


class MessageObject(Struct):
    """Anthropic's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: Objects
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    usage: dict[str, Any]


class TokenCount(Struct):
    """Tokens of a prompt."""

    input_tokens: Annotated[int, Meta(ge=0)]


class Model(Struct):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int
    max_model_len: int
    thinking: dict[str, str]
    numerics: str
    artifact: str


class Models(Struct):
    """All models: one."""

    object: Literal["list"]
    data: list[Model]


class Alive(Struct):
    """The process lives."""

    status: Literal["ok"]


class Ready(Struct):
    """Whether requests are admitted, and why not."""

    status: Literal["ready", "not ready"]
    route: str
    reason: str | None = None


class Status(Struct):
    """The route as the server sees it, and what its stages have to do."""

    route: str
    epoch: int
    ready: bool
    load: dict[str, int]
    stages: Objects


class ErrorFacts(Struct):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """A refusal or a failure, as OpenAI's API tells of it."""

    error: ErrorFacts


class AnthropicFacts(Struct):
    """What was wrong."""

    type: str
    message: str


class AnthropicError(Struct):
    """A refusal or a failure, as Anthropic's API tells of it."""

    type: Literal["error"]
    error: AnthropicFacts


_TYPES: Sequence[type[Struct]] = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    ChatCompletion,
    TextCompletion,
    ResponseObject,
    MessageObject,
    TokenCount,
    Models,
    Model,
    Alive,
    Ready,
    Status,
    Error,
    AnthropicError,
)

# --- the document -----------------------------------------------------------------------------------------------------

_REF = "#/components/schemas/{name}"
_EVENTS = {"schema": {"description": "server-sent events, where `stream` is true"}}


def _content(kind: type[Struct]) -> Object:
    return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}


def _failures(path: str) -> Object:
    kind = AnthropicError if ErrorShape.of(path) is ErrorShape.ANTHROPIC else Error
    return {
        "4XX": {"description": "The request's fault: what was wrong, and with which field.", "content": _content(kind)},
        "5XX": {"description": "The server cannot answer, now or at all.", "content": _content(kind)},
    }


def _post(path: str, summary: str, asked: type[Struct], given: type[Struct], *, streams: bool = True) -> Object:
    content = _content(given)
    if streams:
        content["text/event-stream"] = _EVENTS
    answers = {"200": {"description": "The answer.", "content": content}, **_failures(path)}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": _content(asked)},
            "responses": answers,
        }
    }


def _get(
    path: str, summary: str, content: Object, parameters: Sequence[Object] = (), more: Object | None = None
) -> Object:
    told: Object = {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content}, **_failures(path), **(more or {})},
    }
    return {"get": {**told, "parameters": list(parameters)} if parameters else told}


_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}


def _paths() -> Mapping[str, Object]:
    text, page = {"text/plain": {"schema": {"type": "string"}}}, {"text/html": {"schema": {"type": "string"}}}
    any_object = {"application/json": {"schema": {"type": "object"}}}
    unready = {"503": {"description": "Requests are not admitted.", "content": _content(Ready)}}
    chat, messages = "/v1/chat/completions", "/v1/messages"
    return {
        chat: _post(chat, "A chat, with reasoning and tools", ChatRequest, ChatCompletion),
        "/v1/completions": _post("/v1/completions", "Texts that follow prompts", CompletionRequest, TextCompletion),
        "/v1/responses": _post("/v1/responses", "OpenAI's Responses API", ResponsesRequest, ResponseObject),
        messages: _post(messages, "Anthropic's Messages API", MessagesRequest, MessageObject),
        f"{messages}/count_tokens": _post(
            f"{messages}/count_tokens", "Tokens of a prompt", MessagesRequest, TokenCount, streams=False
        ),
        "/v1/models": _get("/v1/models", "The model", _content(Models)),
        "/v1/models/{name}": _get("/v1/models/", "The model, by its name", _content(Model), [_NAME]),
        "/health": _get("/health", "The process lives", _content(Alive)),
        "/ready": _get("/ready", "Whether requests are admitted", _content(Ready), more=unready),
        "/status": _get("/status", "The route and the load of its stages", _content(Status)),
        "/metrics": _get("/metrics", "Prometheus' text format", text),
        "/openapi.json": _get("/openapi.json", "This document", any_object),
        "/": _get("/", "A page to chat on", page),
    }


@cache
def openapi_json(model: str) -> bytes:
    """The document of a server of this model, as JSON."""
    _, schemas = msgspec.json.schema_components(_TYPES, ref_template=_REF)
    for request in ("ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest"):
        schemas[request]["properties"]["model"] = {"enum": [model, None], "default": None}
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "dgr",
                "version": version("dgr"),
                "description": "A pipeline behind OpenAI's and Anthropic's APIs. A key is needed where the server has keys.",
            },
            "paths": _paths(),
            "components": {"schemas": schemas, "securitySchemes": schemes},
            "security": [{"bearer": []}, {"key": []}, {}],
        }
    )
