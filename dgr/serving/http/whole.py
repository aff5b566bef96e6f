"""Chunks of choices put together to whole ones, for answers that are not streamed."""

from __future__ import annotations

from typing import Any

__all__ = ["whole_chat", "whole_completion"]


def whole_chat(chunks_of: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The choices of a chat completion."""
    return [_chat_choice(index, chunks) for index, chunks in enumerate(chunks_of)]


def _chat_choice(index: int, chunks: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    logprobs: dict[str, list[Any]] | None = None
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        delta = chunk["delta"]
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            _add_call(calls, call)
        for name, values in (chunk.get("logprobs") or {}).items():
            logprobs = logprobs or {"content": []}
            logprobs.setdefault(name, []).extend(values or ())
    if calls:
        message["tool_calls"] = calls
    if message["content"] is None and not calls:
        message["content"] = ""
    reason = next(chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"] is not None)
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def _add_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    if part["index"] == len(calls):
        calls.append({"id": part["id"], "type": part["type"], "function": {**part["function"]}})
    else:
        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


def whole_completion(chunks_of: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The choices of a text completion."""
    return [_text_choice(index, chunks) for index, chunks in enumerate(chunks_of)]


def _text_choice(index: int, chunks: list[dict[str, Any]]) -> dict[str, Any]:
    logprobs: dict[str, list[Any]] | None = None
    for chunk in chunks:
        for name, values in (chunk["logprobs"] or {}).items():
            logprobs = logprobs or {}
            logprobs.setdefault(name, []).extend(values)
    text = "".join(chunk["text"] for chunk in chunks)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": chunks[-1]["finish_reason"]}
