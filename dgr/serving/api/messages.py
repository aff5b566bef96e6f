"""From the body of Anthropic's Messages API to a prompt. What the encoder would change without a word is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepseek_recipe import MessagesRequest

from dgr.serving.api.errors import ApiError, not_text, nothing_to_answer
from dgr.serving.api.prompts import ChatPrompt, Ladder, Thinking, effort_for, refuse_format, render, thinking_of
from dgr.serving.api.vocabulary import ServingVocabulary

__all__ = ["messages_prompt"]

_PARTS = ("text", "thinking", "tool_use", "tool_result")


def messages_prompt(
    body: Mapping[str, Any],
    vocabulary: ServingVocabulary,
    *,
    default: Thinking,
    ladder: Ladder,
    n_ctx: int | None = None,
) -> ChatPrompt:
    """Render and tokenise a request. Raises :class:`ApiError`, :class:`~dgr.errors.InputError`."""
    config = body.get("output_config")
    refuse_format("output_config.format", config.get("format") if isinstance(config, dict) else None)
    thinking = thinking_of({**body, "thinking": _switch(body.get("thinking"))}, default, "output_config", "effort")
    asked: dict[str, Any] = {} if body.get("system") is None else {"system": body["system"]}
    if body.get("tools") is not None:
        asked["tools"] = _tools(body["tools"])
    asked["messages"] = _messages(body.get("messages"))
    if thinking is Thinking.OFF:
        asked["thinking"] = {"type": "disabled"}
    else:
        asked["output_config"] = {"effort": effort_for(thinking, ladder)}
    if body.get("tool_choice") is not None:
        asked["tool_choice"] = _choice(body["tool_choice"], body.get("tools"))
    return render(MessagesRequest, asked, thinking, vocabulary, n_ctx)


def _switch(thinking: Any) -> Any:
    """``adaptive`` thinking is thinking: how much is the effort's matter, and a budget of tokens is not kept."""
    if isinstance(thinking, dict) and thinking.get("type") == "adaptive":
        return {"type": "enabled"}
    return thinking


def _tools(tools: Any) -> Any:
    """``custom`` is what a tool without a type is; the encoder takes any type for a tool of Anthropic's own."""
    if not isinstance(tools, list):
        return tools
    return [
        {name: value for name, value in tool.items() if name != "type"}
        if isinstance(tool, dict) and tool.get("type") == "custom"
        else tool
        for tool in tools
    ]


def _choice(choice: Any, tools: Any) -> Any:
    """Any tool is the first one to the encoder, which opens a call without its name; left as it is, it would not be held to."""
    if isinstance(choice, dict) and choice.get("type") == "any" and isinstance(tools, list) and tools:
        name = tools[0].get("name") if isinstance(tools[0], dict) else None
        return {"type": "tool", "name": name}
    return choice


def _messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise ApiError(400, "messages must be a list of one message or more", param="messages", code="invalid_value")
    for index, message in enumerate(messages):
        _refuse_parts(f"messages[{index}].content", message.get("content"), _PARTS)
    if messages[-1].get("role") == "assistant":
        raise nothing_to_answer("messages", "; an answer that was begun is not gone on with in this API")
    return messages


def _refuse_parts(where: str, content: object, known: tuple[str, ...]) -> None:
    for index, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in known:
            raise not_text(where, kind)
        if kind == "tool_result":
            _refuse_parts(f"{where}[{index}].content", part.get("content"), ("text",))
