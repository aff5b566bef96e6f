"""From the body of a chat request to a prompt, with DeepSeek's own encoder; and which effort of thinking it asks for.

The encoder (``deepseek-recipe``) renders a conversation as text and says which parts are special tokens. It covers messages,
tools and history. Around it this module handles what it leaves out or decides otherwise than a local server should: one
model under its own name, two ladders of effort, ``developer`` messages, ``reasoning`` as an alias, images, answers to go on.
The encoder's two other APIs are read in :mod:`~dgr.serving.api.responses` and :mod:`~dgr.serving.api.messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import msgspec
from attrs import frozen
from deepseek_recipe import (
    ChatCompletionRequest,
    ConversationRequest,
    ConversionError,
    ConversionOptions,
    DeepseekV4Encoding,
    MessagesRequest,
    ModelVersion,
    ResponsesRequest,
)

from dgr.errors import InputError
from dgr.serving.api.errors import ApiError, not_text, nothing_to_answer, overlong
from dgr.serving.api.fields import decode_body
from dgr.serving.api.recipe import no_panic
from dgr.serving.api.vocabulary import ServingVocabulary

__all__ = [
    "MODEL",
    "ChatPrompt",
    "Ladder",
    "Thinking",
    "chat_prompt",
    "effort_for",
    "encoder_refusals",
    "refuse_beyond",
    "refuse_format",
    "render",
    "thinking_of",
]

#: The one model, by its name to the encoder.
MODEL = "served"
_OPTIONS = ConversionOptions().with_model_alias(MODEL, ModelVersion.DeepseekV4Pro)
#: Fields of the body that the encoder gets. All others are read by dgr, or are nothing to a local model.
_PASSED = ("tools", "tool_choice", "logprobs", "top_logprobs")


class Thinking(StrEnum):
    """How much the model thinks before it answers."""

    #: Not at all.
    OFF = "off"
    #: Briefly.
    LOW = "low"
    #: Thoroughly; DeepSeek's API does where nothing is said.
    HIGH = "high"
    #: As far as it goes.
    MAX = "max"


class Ladder(StrEnum):
    """Which words a checkpoint was trained to take for which effort; a GGUF tells only by its name."""

    #: The April preview: high is the plain prompt, max the first prefix; low is not known to it and means high.
    PREVIEW = "preview"
    #: The checkpoints of 31 July and later: low is the plain prompt, high the first prefix, max the second.
    JULY = "0731"


#: ``reasoning_effort`` as DeepSeek's API reads it.
_EFFORTS = {
    "none": Thinking.OFF,
    "minimal": Thinking.LOW,
    "low": Thinking.LOW,
    "medium": Thinking.HIGH,
    "high": Thinking.HIGH,
    "xhigh": Thinking.HIGH,
    "max": Thinking.MAX,
    "ultra": Thinking.MAX,
}

#: What the encoder, which knows the later ladder alone, must be told for the earlier one.
_PREVIEW = {Thinking.LOW: Thinking.LOW, Thinking.HIGH: Thinking.LOW, Thinking.MAX: Thinking.HIGH}


@frozen
class ChatPrompt:
    """A chat request ready for a pipeline."""

    tokens: tuple[int, ...]
    #: The encoder's view of it: how to read the answer's tokens.
    conversation: ConversationRequest
    thinking: Thinking
    has_tools: bool


def thinking_of(body: Mapping[str, Any], default: Thinking, *names: str) -> Thinking:
    """The effort a body asks for: ``thinking``, ``reasoning_effort``, ``chat_template_kwargs``, or the server's default.

    ``names``: where the API has the effort instead of ``reasoning_effort``, from the outermost object to the innermost.
    """
    names = names or ("reasoning_effort",)
    effort: Any = body
    for name in names:
        effort = effort.get(name) if isinstance(effort, dict) else None
    if effort is not None and (not isinstance(effort, str) or effort not in _EFFORTS):
        where = ".".join(names)
        raise ApiError(
            400,
            f"{where} is {str(effort)[:40]!r}; give one of {', '.join(_EFFORTS)}",
            param=where,
            code="invalid_value",
        )
    wanted = None if effort is None else _EFFORTS[effort]
    switch = _switch(body)
    if switch is False:
        return Thinking.OFF
    if wanted is not None and not (switch and wanted is Thinking.OFF):
        return wanted
    if switch:
        return Thinking.HIGH if default is Thinking.OFF else default
    return default


def _switch(body: Mapping[str, Any]) -> bool | None:
    """Whether thinking is turned on or off in so many words."""
    thinking = body.get("thinking")
    if thinking is not None:
        kind = thinking.get("type") if isinstance(thinking, dict) else None
        if kind not in ("enabled", "disabled"):
            message = 'thinking: give {"type": "enabled"} or {"type": "disabled"}'
            raise ApiError(400, message, param="thinking", code="invalid_value")
        return bool(kind == "enabled")
    keywords = body.get("chat_template_kwargs")
    if isinstance(keywords, dict):
        for name in ("thinking", "enable_thinking"):
            if isinstance(keywords.get(name), bool):
                return bool(keywords[name])
    return None


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages as the encoder knows them. Raises :class:`ApiError` for what it would change or garble."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise ApiError(400, "messages must be a list of one message or more", param="messages", code="invalid_value")
    return [_message(index, dict(message)) for index, message in enumerate(messages)]


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") == "developer":
        message["role"] = "system"
    if "reasoning" in message and message.get("reasoning_content") is None:
        message["reasoning_content"] = message.pop("reasoning")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise not_text(f"messages[{index}].content", kind)
    return message


def chat_prompt(
    body: Mapping[str, Any],
    vocabulary: ServingVocabulary,
    *,
    default: Thinking,
    ladder: Ladder,
    n_ctx: int | None = None,
) -> ChatPrompt:
    """Render and tokenise a chat request. Raises :class:`ApiError`, :class:`~dgr.errors.InputError`."""
    messages = _messages(body)
    last = messages[-1]
    if last.get("role") == "assistant" and not last.get("prefix"):
        raise nothing_to_answer("messages", ', or set "prefix": true on the last one to go on with it')
    refuse_format("response_format", body.get("response_format"))
    thinking = thinking_of(body, default)
    asked: dict[str, Any] = {name: body[name] for name in _PASSED if body.get(name) is not None}
    asked |= {"reasoning_effort": effort_for(thinking, ladder), "messages": messages}
    return render(ChatCompletionRequest, asked, thinking, vocabulary, n_ctx)


def effort_for(thinking: Thinking, ladder: Ladder) -> str:
    """What the encoder must be told for an effort."""
    if thinking is Thinking.OFF:
        return "none"
    return (_PREVIEW[thinking] if ladder is Ladder.PREVIEW else thinking).value


def render(
    kind: Callable[[bytes], ChatCompletionRequest | MessagesRequest | ResponsesRequest],
    asked: dict[str, Any],
    thinking: Thinking,
    vocabulary: ServingVocabulary,
    n_ctx: int | None = None,
) -> ChatPrompt:
    """Render and tokenise a body of one of the encoder's three APIs. Raises :class:`ApiError`, ``InputError``."""
    with encoder_refusals():
        # As text: its own parser bounds numbers and depth.
        conversation = kind(msgspec.json.encode({**asked, "model": MODEL})).convert(_OPTIONS)
        rendered = DeepseekV4Encoding().render_conversation(conversation.conversation)
    if n_ctx is not None:
        refuse_beyond(rendered.prompt, vocabulary, n_ctx)
    tokens = tuple(vocabulary.encode_parts(rendered.prompt, rendered.special_ranges))
    if not tokens:
        raise InputError("the conversation renders to no token")
    return ChatPrompt(tokens, conversation, thinking, bool(conversation.conversation.tools))


@contextmanager
def encoder_refusals() -> Iterator[None]:
    """What the encoder refuses is a 400. Raises :class:`ApiError`."""
    try:
        with no_panic("a conversation"):
            yield
    except ConversionError as error:
        told = decode_body(error.body.encode()).get("error", {})
        raise ApiError(400, str(told.get("message", error)), code="invalid_value") from error
    except (ValueError, OverflowError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
        raise ApiError(400, str(error), code="invalid_value") from error


def refuse_beyond(text: str, vocabulary: ServingVocabulary, n_ctx: int) -> None:
    """Refuse a text that cannot fit, before seconds are spent on tokenising it. Raises :class:`ApiError`."""
    if (least := vocabulary.least_tokens(text)) > n_ctx:
        raise overlong(least, None, n_ctx, at_least=True)


def refuse_format(name: str, given: object) -> None:
    """Refuse any format of the answer but text. Raises :class:`ApiError`."""
    kind = given.get("type") if isinstance(given, dict) else given
    if kind not in (None, "text"):
        raise ApiError(
            400,
            f"{name} {str(kind)[:40]!r} is not supported: the sampler knows no schemas, so the answer could not be held to it;"
            " ask for JSON in the prompt",
            param=name,
            code="unsupported_parameter",
        )
