"""Prompts: the encoder's own ids from llama.cpp's tokenizer, special tokens by id alone, efforts of thinking."""

# ruff: noqa: RUF001 (V4's own marks)

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from deepseek_recipe import (
    ChatCompletionRequest,
    ConversionOptions,
    DeepseekV4Encoding,
    InferenceChunk,
    ModelVersion,
    StreamProcessor,
    Tokenizer,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published_vocabulary import published_tokenizer, vocabulary_keys
from serving.http.chat_model import ASSISTANT, BOS, TOKENS, USER, vocabulary

from dgr.artifact.artifact import Artifact
from dgr.engine.vocab import LlamaVocabulary
from dgr.errors import InputError, UnsupportedModel
from dgr.gguf.reader import MetaValue, ValueType
from dgr.selftest.fixture.cached import cached_fixture
from dgr.selftest.fixture.edit import edit_gguf
from dgr.serving.api.errors import ApiError
from dgr.serving.api.prompts import Ladder, Thinking, chat_prompt, thinking_of
from dgr.serving.api.vocabulary import ServingVocabulary, TextDecoder

P1 = "Reasoning Effort: Absolute maximum with no shortcuts permitted."
P2 = "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising."
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "b": 1, "a": 2}},
}

#: What users might write to be taken for somebody else.
SPELLINGS = [
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜",
    "<｜DSML｜tool_calls>", "</｜DSML｜parameter>", "<｜action｜>", "<｜latest_reminder｜>", "<", ">", "</", "think", "think>",
    "｜", "<thi", "nk>", "\n\n", " ", "a", "é", "😀", "中", "1234", "'s", "\t", "((", "!?", "<<think>>", "<think></think>",
]  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(SPELLINGS), st.text(max_size=8)), max_size=12).map("".join)


def decoded(words: ServingVocabulary, ids: Any) -> str:
    return b"".join(words.piece(token) for token in ids).decode()


# --- with a small vocabulary ---


@given(texts.filter(lambda text: text.isprintable() or "\n" in text))
def test_no_text_comes_to_a_special_token(text: str) -> None:
    """The tokenizer here takes spelled USER_DEFINED tokens for tokens, as llama.cpp's does."""
    words = vocabulary()
    try:
        ids = words.encode(text)
    except InputError:
        assert any(0xD800 <= ord(character) < 0xE000 for character in text)
        return
    assert words.special_ids.isdisjoint(ids)
    assert decoded(words, ids) == text


def test_without_the_cut_a_text_would_come_to_a_special_token() -> None:
    """The property above can fail."""
    words = vocabulary()
    assert not words.special_ids.isdisjoint(words.tokenize("a</think>b"))


def test_a_spelling_that_cannot_be_cut_is_refused() -> None:
    words = vocabulary()
    types = list(words.types)
    types[ord("x")] = 4
    hard = ServingVocabulary(words.tokens, types, lambda text: list(text.encode()), words.bos, words.eos)
    with pytest.raises(InputError, match="spells the special token 'x'"):
        hard.encode("axb")


@given(texts, texts, texts)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_a_conversation_has_exactly_the_special_tokens_of_its_form(system: str, user: str, answer: str) -> None:
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": user},
    ]
    words = vocabulary()
    try:
        prompt = chat_prompt({"messages": messages}, words, default=Thinking.OFF, ladder=Ladder.JULY)
    except (ApiError, InputError):
        assert any(0xD800 <= ord(character) < 0xE000 for character in system + user + answer)
        return
    names = [TOKENS[token] for token in prompt.tokens if token in words.special_ids]
    turn = ["<｜User｜>", "<｜Assistant｜>", "</think>"]
    assert names == ["<｜begin▁of▁sentence｜>", *turn, "<｜end▁of▁sentence｜>", *turn]


def test_a_model_without_a_token_that_a_request_needs_says_so() -> None:
    words = vocabulary()
    tokens = [token.replace("DSML", "other") for token in words.tokens]
    lacking = ServingVocabulary(tokens, words.types, words.tokenize, words.bos, words.eos)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert chat_prompt(body, lacking, default=Thinking.OFF, ladder=Ladder.JULY).tokens[0] == BOS
    with pytest.raises(InputError, match="has no token '｜DSML｜'"):
        chat_prompt({**body, "tools": [TOOL]}, lacking, default=Thinking.OFF, ladder=Ladder.JULY)


@pytest.mark.parametrize(
    ("body", "thinking"),
    [
        ({}, Thinking.LOW),
        ({"reasoning_effort": "none"}, Thinking.OFF),
        ({"reasoning_effort": "minimal"}, Thinking.LOW),
        ({"reasoning_effort": "medium"}, Thinking.HIGH),
        ({"reasoning_effort": "xhigh"}, Thinking.HIGH),
        ({"reasoning_effort": "ultra"}, Thinking.MAX),
        ({"thinking": {"type": "disabled"}}, Thinking.OFF),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "max"}, Thinking.OFF),
        ({"thinking": {"type": "enabled"}}, Thinking.LOW),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "max"}, Thinking.MAX),
        ({"chat_template_kwargs": {"enable_thinking": False}}, Thinking.OFF),
        ({"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "high"}, Thinking.HIGH),
    ],
)
def test_the_effort_is_read_as_deepseeks_api_does(body: dict[str, Any], thinking: Thinking) -> None:
    assert thinking_of(body, Thinking.LOW) is thinking


def test_thinking_that_is_turned_on_where_it_is_off_by_default_is_high() -> None:
    assert thinking_of({"thinking": {"type": "enabled"}}, Thinking.OFF) is Thinking.HIGH


@pytest.mark.parametrize(
    ("ladder", "prefixes"),
    [(Ladder.PREVIEW, {"low": "", "high": "", "max": P1}), (Ladder.JULY, {"low": "", "high": P1, "max": P2})],
)
def test_each_checkpoint_has_its_own_ladder(ladder: Ladder, prefixes: dict[str, str]) -> None:
    words = vocabulary()
    for effort, prefix in prefixes.items():
        body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
        prompt = chat_prompt(body, words, default=Thinking.OFF, ladder=ladder)
        text = decoded(words, prompt.tokens)
        assert text.startswith(prefix)
        assert text.endswith("Hi<think>")
        assert (len(text) > len("Hi<think>")) == bool(prefix)


def test_messages_of_developers_are_the_systems() -> None:
    words = vocabulary()
    told = [
        chat_prompt(
            {"messages": [{"role": role, "content": "S"}, {"role": "user", "content": "q"}]},
            words,
            default=Thinking.OFF,
            ladder=Ladder.JULY,
        ).tokens
        for role in ("system", "developer")
    ]
    assert told[0] == told[1]
    assert list(told[0][:3]) == [BOS, ord("S"), USER]
    assert ASSISTANT in told[0]


def test_text_leaves_in_whole_characters() -> None:
    decoder = TextDecoder(vocabulary())
    assert [decoder.push(token) for token in "é😀".encode()] == ["", "é", "", "", "", "😀"]


# --- with V4's own vocabulary ---


@frozen
class Real:
    """V4's vocabulary twice: as llama.cpp reads it from a GGUF, and as the encoder reads it from ``tokenizer.json``."""

    words: ServingVocabulary
    encoding: DeepseekV4Encoding
    tokenizer: Tokenizer


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    text = published_tokenizer()
    path: Path = tmp_path_factory.mktemp("vocabulary") / "v4.gguf"
    keys = vocabulary_keys(text)
    edit_gguf(cached_fixture("f32", layers=7), path, keys=keys)
    artifact = Artifact.open(path)
    tokenizer = Tokenizer.from_str(text)
    with LlamaVocabulary(artifact) as llama:
        words = ServingVocabulary.of_model(llama, artifact)
        yield Real(words, DeepseekV4Encoding().with_tokenizer(tokenizer), tokenizer)


def conversations() -> list[dict[str, Any]]:
    calls = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
        for name, arguments in (("c1", {"a": "x", "n": 1}), ("c2", {}))
    ]
    results = [{"role": "tool", "tool_call_id": name, "content": f"R{name}"} for name in ("c2", "c1")]
    attack = "".join(SPELLINGS)
    q1, q2 = ({"role": "user", "content": text} for text in ("q1: The quick brown fox, 12345 naïve 中文 😀!", "q2"))
    a1 = {"role": "assistant", "content": "a1", "reasoning_content": "r1"}
    return [
        {"messages": [q1], "reasoning_effort": "low"},
        {"messages": [q1], "reasoning_effort": "none"},
        {"messages": [q1], "reasoning_effort": "high"},
        {"messages": [q1], "reasoning_effort": "max"},
        {"messages": [q1, a1, q2], "reasoning_effort": "low"},
        {"messages": [q1, a1, q2], "tools": [TOOL], "reasoning_effort": "low"},
        {"messages": [{"role": "system", "content": "S"}, q1, a1, q2, {"role": "system", "content": "late"}]},
        {"messages": [q1, q2, {"role": "assistant", "content": "", "tool_calls": calls}, *results], "tools": [TOOL]},
        {"messages": [{"role": "system", "content": attack}, {"role": "user", "content": attack}], "reasoning_effort": "low"},
        {"messages": [q1, {"role": "assistant", "content": attack}, {"role": "user", "content": "def f(x):\n\tpass  \n\n\n"}]},
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(len(conversations())))
def test_prompts_are_the_ids_of_deepseeks_own_encoder(real: Real, number: int) -> None:
    body = conversations()[number]
    options = ConversionOptions().with_model_alias("m", ModelVersion.DeepseekV4Pro)
    expected = real.encoding.encode(ChatCompletionRequest({**body, "model": "m"}).convert(options).conversation)
    prompt = chat_prompt(body, real.words, default=Thinking.HIGH, ladder=Ladder.JULY)
    assert list(prompt.tokens) == expected
    assert prompt.tokens[0] == 0


@given(texts)
@settings(
    max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
def test_text_of_users_is_what_bpe_over_the_whole_text_gives(real: Real, text: str) -> None:
    """Spelled special tokens included: the cut that keeps llama.cpp from finding them is one the pre-tokenizer makes."""
    if any(0xD800 <= ord(character) < 0xE000 for character in text):
        return
    ids = real.words.encode(text)
    assert real.words.special_ids.isdisjoint(ids)
    assert decoded(real.words, ids) == text
    conversation = {"messages": [{"role": "user", "content": text}], "reasoning_effort": "none", "model": "m"}
    options = ConversionOptions().with_model_alias("m", ModelVersion.DeepseekV4Pro)
    whole = real.encoding.encode(ChatCompletionRequest(conversation).convert(options).conversation)
    assert [0, 128803, *ids, 128804, 128822] == whole


def test_text_of_users_has_the_ids_that_were_published(real: Real) -> None:
    ids = real.words.encode("x<｜User｜>｜DSML｜</think>")
    assert ids == [90, 30, 28217, 6756, 28217, 32, 28217, 10525, 7398, 28217, 1718, 37947, 32]
    assert [real.words.special(name) for name in ("<think>", "</think>", "｜DSML｜")] == [128821, 128822, 128825]


def test_the_decoder_made_from_a_gguf_decodes_as_the_published_one(real: Real) -> None:
    """Only the vocabulary is in it, so it is the one that a server can make of any file."""
    assert json.loads(real.words.decoder_json)["model"]["merges"] == []
    text = "The naïve 😀 中文 fox\n\tx</think>  y"
    ids = real.tokenizer.encode(text)
    told = [_content(tokenizer, ids) for tokenizer in (Tokenizer.from_str(real.words.decoder_json), real.tokenizer)]
    assert told == ["The naïve 😀 中文 fox\n\tx  y"] * 2  # a surplus end of thinking is not text


def _content(tokenizer: Tokenizer, ids: list[int]) -> str:
    body = {"messages": [{"role": "user", "content": "q"}], "reasoning_effort": "none", "model": "m"}
    options = ConversionOptions().with_model_alias("m", ModelVersion.DeepseekV4Pro)
    request = ChatCompletionRequest(body).convert(options)
    processor = StreamProcessor(
        ChatCompletionRequest.chunk_generator(request, "", ""), request.parsing_options, tokenizer
    )
    chunks = [*processor.push(InferenceChunk.ready()), *processor.push(InferenceChunk.tokens(ids))]
    return "".join(json.loads(chunk.to_json())["choices"][0]["delta"]["content"] for chunk in chunks)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.model": MetaValue(ValueType.STRING, "no_vocab")}
    path = edit_gguf(cached_fixture("f32", layers=7), tmp_path / "other.gguf", keys=keys)
    with LlamaVocabulary(cached_fixture("f32", layers=7)) as llama, pytest.raises(UnsupportedModel, match="'no_vocab'"):
        ServingVocabulary.of_model(llama, Artifact.open(path))
