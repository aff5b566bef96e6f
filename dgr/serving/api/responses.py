"""From the body of OpenAI's Responses API to a prompt. What the encoder would drop without a word is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from attrs import frozen
from deepseek_recipe import ResponsesEcho, ResponsesRequest

from dgr.serving.api.errors import ApiError, not_text, nothing_to_answer
from dgr.serving.api.prompts import (
    MODEL,
    ChatPrompt,
    Ladder,
    Thinking,
    effort_for,
    encoder_refusals,
    refuse_format,
    render,
    thinking_of,
)
from dgr.serving.api.vocabulary import ServingVocabulary

__all__ = ["ResponsesPrompt", "responses_prompt"]

#: Fields of the body that the encoder gets as they are.
_PASSED = ("instructions", "tools", "tool_choice", "include", "top_logprobs")
_SAID = ("reasoning", "function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
#: Tools whose calls the client answers. The encoder leaves out web searches, as DeepSeek's API does: agents name them always.
_TOOLS = ("function", "custom", "namespace")


@frozen
class ResponsesPrompt:
    """A request of the Responses API ready for a pipeline."""

    chat: ChatPrompt
    #: The settings that responses repeat.
    echo: ResponsesEcho


def responses_prompt(
    body: Mapping[str, Any],
    vocabulary: ServingVocabulary,
    *,
    default: Thinking,
    ladder: Ladder,
    n_ctx: int | None = None,
) -> ResponsesPrompt:
    """Render and tokenise a request. Raises :class:`ApiError`, :class:`~dgr.errors.InputError`."""
    given = body.get("input")
    if not isinstance(given, str):
        given = _items(given)
    text = body.get("text")
    refuse_format("text.format", text.get("format") if isinstance(text, dict) else None)
    _refuse_tools(body.get("tools"))
    thinking = thinking_of(body, default, "reasoning", "effort")
    asked = {name: body[name] for name in _PASSED if body.get(name) is not None}
    asked |= {"input": given, "reasoning": {"effort": effort_for(thinking, ladder)}}
    chat = render(ResponsesRequest, asked, thinking, vocabulary, n_ctx)
    with encoder_refusals():
        settings = ResponsesRequest(msgspec.json.encode({**body, "model": MODEL, "input": ""}))
        return ResponsesPrompt(chat, settings.echo())


def _items(given: object) -> list[dict[str, Any]]:
    """The items of the input as the encoder knows them."""
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise ApiError(400, "input must be a text, or a list of one item or more", param="input", code="invalid_value")
    items = [_item(f"input[{index}]", item) for index, item in enumerate(given)]
    last = items[-1]
    if last["type"] in _SAID or last.get("role") == "assistant":
        raise nothing_to_answer("input")
    return items


def _item(where: str, item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "item_reference":
        message = f"{where}: nothing is kept from one request to the next; give the item itself"
        raise ApiError(400, message, param=where, code="unsupported_parameter")
    if kind not in ("message", *_SAID, *_RESULTS):
        message = f"{where}: an item of type {str(kind)[:40]!r}, which is not known here; leave it out"
        raise ApiError(400, message, param=where, code="unsupported_parameter")
    name = "output" if kind in _RESULTS else "content"
    if kind != "reasoning" and isinstance(item.get(name), list):
        for part in item[name]:
            found = part.get("type") if isinstance(part, dict) else None
            if found not in ("input_text", "output_text"):
                raise not_text(f"{where}.{name}", found)
    role = {"role": "system"} if item.get("role") == "developer" else {}
    return {**item, "type": kind, **role}


def _refuse_tools(tools: object) -> None:
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in _TOOLS and not str(kind).startswith("web_search"):
            where = f"tools[{index}]"
            message = f"{where}: a tool of type {str(kind)[:40]!r}; no tool runs here, so give functions that you run"
            raise ApiError(400, message, param=where, code="unsupported_parameter")
