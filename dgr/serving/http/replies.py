"""The tokens of one choice as the chunks of OpenAI's APIs, in order: an opening, some for each token, a closing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec
from deepseek_recipe import (
    ChatCompletionRequest,
    InferenceChunk,
    InferenceFinishReason,
    PromptUsage,
    StreamProcessor,
    Tokenizer,
)

from dgr.client.generation import GeneratedToken
from dgr.serving.api.prompts import ChatPrompt
from dgr.serving.api.recipe import no_panic
from dgr.serving.api.vocabulary import ServingVocabulary, TextDecoder

__all__ = ["UNLIKELY", "ChatReply", "CompletionReply", "Reply", "logprob_of"]

#: OpenAI's word for "not among the likeliest tokens that were asked for".
UNLIKELY = -9999.0

_THINK_END, _DSML = "</think>", "｜DSML｜"  # noqa: RUF001 (V4's own bar)


def logprob_of(token: GeneratedToken) -> float:
    """Its natural-log probability, or :data:`UNLIKELY` when it was not among the candidates the tail told of."""
    return next((each.logprob for each in token.top if each.token == token.id), UNLIKELY)


class Reply(Protocol):
    """What turns tokens into choices of chunks: dictionaries with ``index``, a delta or a text, ``finish_reason``."""

    #: Set when a stop string was found: no token after this one counts.
    finished: bool
    #: Tokens of reasoning so far; None where the choice has no such thing.
    reasoning_tokens: int | None

    def opening(self) -> list[dict[str, Any]]: ...

    def token(self, token: GeneratedToken) -> list[dict[str, Any]]: ...

    def closing(self, finish_reason: str) -> list[dict[str, Any]]: ...


class ChatReply:
    """A choice of a chat completion: reasoning, content, tool calls and stop strings are found by deepseek-recipe.

    What it gets are the answer's tokens without special ones that have no place in an answer, so none can leak. A tool call
    that it cannot read is text after all: an empty answer would tell nobody what happened.
    """

    def __init__(
        self,
        index: int,
        prompt: ChatPrompt,
        vocabulary: ServingVocabulary,
        tokenizer: Tokenizer,
        *,
        top_logprobs: int | None,
    ) -> None:
        self.finished = False
        self.reasoning_tokens: int | None = None
        self._index = index
        self._vocabulary = vocabulary
        self._top = top_logprobs
        generator = ChatCompletionRequest.chunk_generator(prompt.conversation, "", "")
        self._processor = StreamProcessor(generator, prompt.conversation.parsing_options, tokenizer)
        markers = (_THINK_END, _DSML) if prompt.has_tools else (_THINK_END,)
        ids = {vocabulary.special(name) for name in markers}
        self._dropped = vocabulary.special_ids - ids
        self._dsml = vocabulary.special(_DSML) if prompt.has_tools else None
        #: What a tool call that is being read looks like as text; None before one begins, and once one was understood.
        self._unread: bytearray | None = None
        self._understood = False
        self._closed: list[dict[str, Any]] = []
        # deepseek-recipe counts by encoding the text again, for which the decoder has no merges.
        stage = prompt.conversation.parsing_options.thinking_initial_stage
        self._reasons = stage is not None and stage.starts_in_reasoning()
        if stage is not None:
            self.reasoning_tokens = 0
        self._ends_reasoning = ids

    def opening(self) -> list[dict[str, Any]]:
        ready = InferenceChunk.ready(prompt_usage=PromptUsage())
        return self._choices(self._push(ready), keep_empty=True)

    def token(self, token: GeneratedToken) -> list[dict[str, Any]]:
        if token.id in self._ends_reasoning:
            self._reasons = False
        elif self._reasons and self.reasoning_tokens is not None:
            self.reasoning_tokens += 1
        if token.id in self._dropped:
            return []
        if token.id == self._dsml and self._unread is None and not self._understood:
            self._unread = bytearray(b"<")
        if self._unread is not None:
            self._unread += _DSML.encode() if token.id == self._dsml else self._vocabulary.piece(token.id)
        logprobs = None if self._top is None else [self._logprobs(token)]
        choices = self._choices(self._push(InferenceChunk.tokens([token.id], logprobs)))
        self.finished = self._processor.finished
        return choices

    def closing(self, finish_reason: str) -> list[dict[str, Any]]:
        if not self._processor.finished:
            reason = InferenceFinishReason.Length if finish_reason == "length" else InferenceFinishReason.Stop
            self._closed = self._choices(self._push(InferenceChunk.finish(reason)), keep_last=True)
        *rest, last = self._closed
        if self._unread:
            text = self._unread.decode("utf-8", "ignore")
            rest.append({"index": self._index, "delta": {"content": text}, "logprobs": None, "finish_reason": None})
        return [*rest, last]

    def _push(self, chunk: InferenceChunk) -> list[Any]:
        with no_panic("an answer"):
            return self._processor.push(chunk)

    def _logprobs(self, token: GeneratedToken) -> tuple[float, list[tuple[int, float]]]:
        return logprob_of(token), [(each.token, each.logprob) for each in token.top[: self._top]]

    def _choices(
        self, chunks: Iterable[Any], *, keep_empty: bool = False, keep_last: bool = False
    ) -> list[dict[str, Any]]:
        """The choices of chunks. The last one is kept for :meth:`closing`, so that it is the last whatever comes."""
        found = []
        for chunk in chunks:
            data = msgspec.json.decode(chunk.to_json())
            (choice,) = data["choices"]
            choice["index"] = self._index
            choice["delta"] = {key: value for key, value in choice["delta"].items() if value is not None}
            if choice["finish_reason"] is not None:
                choice["delta"] = {}
                if not keep_last:
                    self._closed = [choice]
                    continue
            elif not keep_empty:
                choice["delta"] = {key: value for key, value in choice["delta"].items() if value != ""}
                if not choice["delta"]:
                    continue
                self._note(choice["delta"])
            found.append(choice)
        return found

    def _note(self, delta: dict[str, Any]) -> None:
        """A call that was understood, or text after it: nothing is left unread."""
        if "tool_calls" in delta or (self._unread is not None and "content" in delta):
            self._unread, self._understood = None, True


class CompletionReply:
    """A choice of a text completion: the tokens' text, up to a stop string."""

    def __init__(self, index: int, vocabulary: ServingVocabulary, *, stop: list[str], top_logprobs: int | None) -> None:
        self.finished = False
        self.reasoning_tokens: int | None = None
        self._index = index
        self._vocabulary = vocabulary
        self._decoder = TextDecoder(vocabulary)
        self._stop = stop
        self._top = top_logprobs
        #: Text that may be how a stop string begins, or whose token is not complete.
        self._held = ""
        self._sent = 0
        self._logprobs: list[tuple[int, float, dict[str, float]]] = []

    def opening(self) -> list[dict[str, Any]]:
        return []

    def token(self, token: GeneratedToken) -> list[dict[str, Any]]:
        if self._top is not None:
            top = {self._spelled(each.token): each.logprob for each in token.top[: self._top]}
            self._logprobs.append((token.id, logprob_of(token), top))
        self._held += self._decoder.push(token.id)
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.finished = True
            self._held = self._held[: min(found)]
            return []  # the rest goes with the closing
        safe = len(self._held) - self._may_begin_stop()
        text, self._held = self._held[:safe], self._held[safe:]
        return [self._choice(text, None)] if text else []

    def closing(self, finish_reason: str) -> list[dict[str, Any]]:
        return [self._choice(self._held, "stop" if self.finished else finish_reason)]

    def _may_begin_stop(self) -> int:
        """Characters at the end of what is held with which a stop string may begin."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _spelled(self, token: int) -> str:
        return self._vocabulary.piece(token).decode("utf-8", "replace")

    def _choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        logprobs: dict[str, list[Any]] | None = None
        if self._top is not None:
            logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            offset = self._sent
            for token, logprob, top in self._logprobs:
                spelled = self._spelled(token)
                logprobs["tokens"].append(spelled)
                logprobs["token_logprobs"].append(logprob)
                logprobs["top_logprobs"].append(top)
                logprobs["text_offset"].append(offset)
                offset += len(spelled)
            self._logprobs = []
        self._sent += len(text)
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
