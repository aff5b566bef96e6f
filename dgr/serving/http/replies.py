"""The tokens of one answer as the parts that an API has, in order: an opening, some for each token, a closing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec
from attrs import frozen
from deepseek_recipe import (
    ChatCompletionChunkGenerator,
    ChatCompletionRequest,
    InferenceChunk,
    InferenceFinishReason,
    MessagesChunkGenerator,
    ParsingOptions,
    PromptUsage,
    ResponsesChunkGenerator,
    StreamProcessor,
    Tokenizer,
)

from dgr.client.generation import GeneratedToken
from dgr.serving.api.prompts import ChatPrompt
from dgr.serving.api.recipe import no_panic
from dgr.serving.api.vocabulary import ServingVocabulary, TextDecoder

__all__ = ["UNLIKELY", "ChatReply", "CompletionReply", "ParsedReply", "Reply", "logprob_of"]

#: What makes the parts of each API.
Generator = ChatCompletionChunkGenerator | MessagesChunkGenerator | ResponsesChunkGenerator
#: Of a drawn token, and of the likeliest ones by id.
_Logprobs = tuple[float, list[tuple[int, float]]]

#: OpenAI's word for "not among the likeliest tokens that were asked for".
UNLIKELY = -9999.0

_THINK_END, _DSML = "</think>", "｜DSML｜"  # noqa: RUF001 (V4's own bar)


def logprob_of(token: GeneratedToken) -> float:
    """Its natural-log probability, or :data:`UNLIKELY` when it was not among the candidates the tail told of."""
    return next((each.logprob for each in token.top if each.token == token.id), UNLIKELY)


class Reply(Protocol):
    """What turns tokens into the parts that the API has: events, or choices of chunks as dictionaries."""

    #: Set when a stop string was found: no token after this one counts.
    finished: bool
    #: Tokens of reasoning so far; None where the choice has no such thing.
    reasoning_tokens: int | None

    def opening(self) -> list[Any]: ...

    def token(self, token: GeneratedToken) -> list[Any]: ...

    def closing(self, finish_reason: str) -> list[Any]: ...


@frozen
class Drawn:
    """A token for the parser."""

    id: int
    logprobs: _Logprobs | None = None


class ParsedReply:
    """An answer to a conversation: deepseek-recipe finds reasoning, content, tool calls and stop strings, and makes its parts.

    What it gets are the answer's tokens without special ones that have no place in an answer, so none can leak. A tool call
    that it cannot read is text after all: an empty answer would tell nobody what happened.
    """

    def __init__(
        self,
        generator: Generator,
        prompt: ChatPrompt,
        vocabulary: ServingVocabulary,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str],
        top_logprobs: int | None = None,
    ) -> None:
        self.finished = False
        self.reasoning_tokens: int | None = None
        self._prompt = prompt
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._top = top_logprobs
        options = prompt.conversation.parsing_options
        options.stop_sequences = stop
        # Where the prompt opened a call, what the model writes first opens one to the parser too, or is text.
        options.starts_in_tool_calls = False
        self._processor = StreamProcessor(generator, options, tokenizer)
        self._closed: list[Any] = []
        markers = (_THINK_END, _DSML) if prompt.has_tools else (_THINK_END,)
        ids = {vocabulary.special(name) for name in markers}
        self._dropped = vocabulary.special_ids - ids
        self._dsml = vocabulary.special(_DSML) if prompt.has_tools else None
        #: A token that ends like what comes before a call's first mark, until the next one.
        self._before: list[Drawn] = []
        #: What begins like a tool call, until it is known to be one.
        self._trial: _Trial | None = None
        self._has_called = False
        # deepseek-recipe counts by encoding the text again, for which the decoder has no merges.
        stage = options.thinking_initial_stage
        self._reasons = stage is not None and stage.starts_in_reasoning()
        if stage is not None:
            self.reasoning_tokens = 0
        self._ends_reasoning = ids

    def opening(self) -> list[Any]:
        return self._push(InferenceChunk.ready(prompt_usage=PromptUsage(prompt_tokens=len(self._prompt.tokens))))

    def token(self, token: GeneratedToken) -> list[Any]:
        reasons = self._reasons
        if token.id in self._ends_reasoning:
            self._reasons = False
        elif reasons and self.reasoning_tokens is not None:
            self.reasoning_tokens += 1
        if token.id in self._dropped:
            return []
        drawn = Drawn(token.id, None if self._top is None else self._logprobs(token))
        before, self._before = self._before, []
        if token.id == self._dsml and self._trial is None and not self._has_called:
            self._trial = _Trial(self._prompt, self._tokenizer, cuts_reasoning=reasons)
            self._trial.read(before)
        elif self._trial is None:
            if self._dsml is not None and self._vocabulary.piece(token.id).endswith(b"<"):
                self._before = [drawn]
                return self._push_tokens(before)
            return self._push_tokens([*before, drawn])
        if not self._trial.read([drawn]):
            return []
        trial, self._trial, self._has_called = self._trial, None, True
        return self._push_tokens(trial.tokens)

    def closing(self, finish_reason: str) -> list[Any]:
        rest = self._before if self._trial is None else self._as_text(self._trial)
        parts = self._push_tokens(rest)
        if self.finished:
            return [*parts, *self._closed]
        reason = InferenceFinishReason.Length if finish_reason == "length" else InferenceFinishReason.Stop
        return [*parts, *self._push(InferenceChunk.finish(reason))]

    def _as_text(self, trial: _Trial) -> list[Drawn]:
        """The same text with nothing in it that is a mark, but for the end of the reasoning that the call would have been."""
        words, special = self._vocabulary, self._vocabulary.special_ids
        unthink = words.special(_THINK_END) if trial.cuts_reasoning else None
        text = [] if unthink is None else [Drawn(unthink)]
        for drawn in trial.tokens:
            text += map(Drawn, words.encode(words.tokens[drawn.id])) if drawn.id in special else [Drawn(drawn.id)]
        return text

    def _push_tokens(self, tokens: Sequence[Drawn]) -> list[Any]:
        """Parts for tokens; none once a stop string was found, which are for the closing."""
        if not tokens or self.finished:
            return []
        logprobs = [drawn.logprobs for drawn in tokens if drawn.logprobs is not None]
        parts = self._push(InferenceChunk.tokens([drawn.id for drawn in tokens], logprobs or None))
        if not self._processor.finished:
            return parts
        self.finished, self._closed = True, parts
        return []

    def _push(self, chunk: InferenceChunk) -> list[Any]:
        with no_panic("an answer"):
            return self._processor.push(chunk)

    def _logprobs(self, token: GeneratedToken) -> _Logprobs:
        return logprob_of(token), [(each.token, each.logprob) for each in token.top[: self._top]]


class _Trial:
    """Tokens that begin like a tool call, and whether they are one."""

    def __init__(self, prompt: ChatPrompt, tokenizer: Tokenizer, *, cuts_reasoning: bool) -> None:
        self.cuts_reasoning = cuts_reasoning
        self.tokens: list[Drawn] = []
        generator = ChatCompletionRequest.chunk_generator(prompt.conversation, "", "")
        self._processor = StreamProcessor(generator, ParsingOptions(), tokenizer)
        self._push(InferenceChunk.ready())

    def read(self, tokens: Sequence[Drawn]) -> bool:
        """Keep more of it. Whether a call was understood by now, or is over."""
        self.tokens += tokens
        pushed = self._push(InferenceChunk.tokens([drawn.id for drawn in tokens])) if tokens else []
        chunks = [msgspec.json.decode(chunk.to_json()) for chunk in pushed]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        return any(delta.get("tool_calls") or delta.get("content") for delta in deltas)

    def _push(self, chunk: InferenceChunk) -> list[Any]:
        with no_panic("a tool call"):
            return self._processor.push(chunk)


class ChatReply(ParsedReply):
    """A choice of a chat completion: dictionaries with ``index``, ``delta``, ``logprobs``, ``finish_reason``."""

    def __init__(
        self,
        index: int,
        prompt: ChatPrompt,
        vocabulary: ServingVocabulary,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str],
        top_logprobs: int | None,
    ) -> None:
        generator = ChatCompletionRequest.chunk_generator(prompt.conversation, "", "")
        super().__init__(generator, prompt, vocabulary, tokenizer, stop=stop, top_logprobs=top_logprobs)
        self._index = index

    def opening(self) -> list[dict[str, Any]]:
        return self._choices(super().opening(), keep_empty=True)

    def token(self, token: GeneratedToken) -> list[dict[str, Any]]:
        return self._choices(super().token(token))

    def closing(self, finish_reason: str) -> list[dict[str, Any]]:
        return self._choices(super().closing(finish_reason))

    def _choices(self, chunks: Iterable[Any], *, keep_empty: bool = False) -> list[dict[str, Any]]:
        found = []
        for chunk in chunks:
            (choice,) = msgspec.json.decode(chunk.to_json())["choices"]
            choice["index"] = self._index
            choice["delta"] = {key: value for key, value in choice["delta"].items() if value is not None}
            if choice["finish_reason"] is not None:
                choice["delta"] = {}
            elif not keep_empty:
                choice["delta"] = {key: value for key, value in choice["delta"].items() if value != ""}
                if not choice["delta"]:
                    continue
            found.append(choice)
        return found


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
