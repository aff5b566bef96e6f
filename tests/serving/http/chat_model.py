"""A model that says what it is told to, behind the real pipeline: prompts, sessions and cancellation are the real ones.

Bytes are token ids; above them come V4's special tokens and some tokens of several characters. What it answers is decided
by the text of the last user message: what :attr:`ChatModel.script` holds for it, else that text again. After anything that
is not a chat it says the alphabet, without end.
"""

# ruff: noqa: RUF001 (V4's own marks)

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

from dgr.core.values import ContextParams, SamplingParams, TopLogprob
from dgr.serving.api.vocabulary import ServingVocabulary, byte_symbols
from dgr.testing.engines.fake import FakeEngine, FakeModel
from dgr.testing.offline import Offline, open_fake_pipeline

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_CONTROLS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
)
_USER_DEFINEDS = ("<think>", "</think>", "｜DSML｜")
_WORDS = ("hello", "STOP now", "x</y", "caf\u00e9")


def _symbols(text: str) -> str:
    return "".join(byte_symbols()[byte] for byte in text.encode())


TOKENS = (*byte_symbols(), *_CONTROLS, *_USER_DEFINEDS, *map(_symbols, _WORDS))
TYPES = (
    (_NORMAL,) * 256 + (_CONTROL,) * len(_CONTROLS) + (_USER_DEFINED,) * len(_USER_DEFINEDS) + (_NORMAL,) * len(_WORDS)
)
ID = {name: 256 + index for index, name in enumerate((*_CONTROLS, *_USER_DEFINEDS, *_WORDS))}
BOS, EOS, USER, ASSISTANT = (ID[name] for name in _CONTROLS[:4])
THINK, UNTHINK, DSML = (ID[name] for name in _USER_DEFINEDS)


def tokenize(text: str) -> list[int]:
    """As llama.cpp does: bytes, but for text that spells a USER_DEFINED token, which becomes that token."""
    ids: list[int] = []
    while text:
        name = next((name for name in _USER_DEFINEDS if text.startswith(name)), None)
        ids += text[0].encode() if name is None else [ID[name]]
        text = text[1 if name is None else len(name) :]
    return ids


@lru_cache
def _spelled(text: str) -> tuple[int, ...]:
    return tuple(spelled(text))


def spelled(text: str) -> list[int]:
    """Ids of a text in which every name of a token stands for that token."""
    ids: list[int] = []
    while text:
        name = next((name for name in ID if text.startswith(name)), None)
        ids += text[0].encode() if name is None else [ID[name]]
        text = text[1 if name is None else len(name) :]
    return ids


def vocabulary() -> ServingVocabulary:
    return ServingVocabulary(TOKENS, TYPES, tokenize, BOS, EOS)


_OPENED = spelled("\n\n<｜DSML｜tool_calls>\n")


class ChatModel:
    """What it says, and a gate before every token of it."""

    def __init__(self, offline: Offline) -> None:
        self.offline = offline
        self.script: dict[str, str] = {}
        #: Ids of the histories it drew from, newest last.
        self.seen: list[list[int]] = []
        self.drawn: list[SamplingParams] = []
        #: Runs that the head may begin; None: as many as come.
        self._allowed: int | None = None
        self._gate = threading.Condition()
        self._waits = False
        self.attach()

    @property
    def head(self) -> FakeEngine:
        return self.offline.engines["stage-0"]

    def attach(self) -> None:
        """Speak through the tail, also after a restart."""
        tail = self.offline.engines["stage-2"]
        vars(tail)["sample"] = self._sample
        for engine in self.offline.engines.values():
            engine.inline = True
        self.head.watch = self._watch

    def hold(self, after: int = 0) -> None:
        """The head begins ``after`` more runs and then waits."""
        self.head.inline = False  # in a thread, so that the gate holds nobody else up
        with self._gate:
            self._allowed = after

    def release(self) -> None:
        """It begins whatever comes."""
        self.head.inline = True
        with self._gate:
            self._allowed = None
            self._gate.notify_all()

    @property
    def is_waiting(self) -> bool:
        """Whether the head stands before the gate."""
        return self._waits

    def _watch(self, _: object) -> None:
        with self._gate:
            self._waits = self._allowed == 0
            assert self._gate.wait_for(lambda: self._allowed != 0, 20)
            self._waits = False
            if self._allowed is not None:
                self._allowed -= 1

    def _sample(
        self, _logits: object, history: Sequence[int], params: SamplingParams
    ) -> tuple[int, tuple[TopLogprob, ...]]:
        history = list(history)
        self.seen.append(history)
        self.drawn.append(params)
        token = self._say(history)
        others = [other for other in range(97, 97 + params.top_logprobs) if other != token]
        ranked = [token, *others] if token != ID["x</y"] else others
        return token, tuple(TopLogprob(one, -0.5 - rank) for rank, one in enumerate(ranked[: params.top_logprobs]))

    def _say(self, history: list[int]) -> int:
        if ASSISTANT not in history:
            return 97 + len(history) % 26
        turn = len(history) - 1 - history[::-1].index(ASSISTANT)
        user = turn - 1 - history[:turn][::-1].index(USER)
        text = bytes(history[user + 1 : turn]).decode()
        answer = _spelled(self.script[text]) if text in self.script else text.encode()
        begun = 2  # after the mark that opens or skips the thinking, and after a call that the prompt opens
        if history[turn + 2 : turn + 2 + len(_OPENED)] == _OPENED and not self.script.get(text, "").startswith("\n"):
            begun += len(_OPENED)
        said = len(history) - turn - begun
        return answer[said] if said < len(answer) else EOS


@asynccontextmanager
async def open_chat_model(n_ctx: int = 4096, sessions: int = 2, **options: Any) -> AsyncIterator[ChatModel]:
    """A pipeline of three fake stages that chats."""
    context = ContextParams(n_ctx=n_ctx, n_batch=64, n_ubatch=64, n_seq_max=sessions)
    model_of_three = FakeModel(n_layers=3, n_vocab=len(TOKENS), width=1)
    async with open_fake_pipeline("0:1,1:2,2:3", model=model_of_three, context=context, **options) as offline:
        model = ChatModel(offline)
        try:
            yield model
        finally:
            model.release()
