"""What a tokenizer's metadata must be for llama.cpp to load it, and for any text to pass through it.

``llama_vocab::impl::load`` (``src/llama-vocab.cpp``) asserts on some headers, never returns from others, and takes a default
of another model for what is missing. Here V4's own kind is taken, byte-level BPE, and everything else refused with the key
named. That no text is too long for the splitter is true of V4's pre-tokenizer alone (the patch 0006).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dgr.errors import UnsupportedModel
from dgr.gguf.reader import MetaArray, MetaValue, ValueType
from dgr.v4.hyper_parameters import ARCHITECTURE

__all__ = ["has_tokenizer", "vocabulary_size"]

_PREFIX = "tokenizer.ggml."
_MODEL, _PRE, _TOKENS, _MERGES = (_PREFIX + name for name in ("model", "pre", "tokens", "merges"))
_SIZE = f"{ARCHITECTURE}.vocab_size"
_TYPES, _SCORES = _PREFIX + "token_type", _PREFIX + "scores"

#: Byte-level BPE, the only kind of tokenizer that V4 has.
_BPE = "gpt2"
#: What a model that takes token ids alone says of its tokenizer.
_NO_TOKENIZER = ("none", "no_vocab")
#: Names of V4's pre-tokenizer: llama.cpp splits text for all of them by the same three expressions.
_SPLITTERS = ("joyai-llm", "deepseek-v3", "hunyuan-dense", "hy_v4")

#: Tokens, and merges. llama.cpp takes some 300 bytes for each; the largest vocabularies known have a quarter of this.
_MAX_ENTRIES = 1 << 20
#: Bytes of one token; V4's longest has 256. A special one is looked for at every place of a text.
_MAX_TOKEN_BYTES = 4096
#: Bytes that the texts of all tokens may take once llama.cpp has spelled out what is not a byte symbol (``[UNK_BYTE_0x…]``
#: and the whole token again, for every such character).
_MAX_SPELLED_BYTES = 256 << 20
#: The characters that stand for bytes (``unicode_byte_to_utf8_map``).
_BYTE_SYMBOLS = re.compile("[!-~¡-¬®-ÿĀ-Ń]*")
_NO_BYTE_SYMBOL = re.compile("[^!-~¡-¬®-ÿĀ-Ń]")
_MERGE = re.compile(r"[^ \0]+ [^ \0]+")
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")

#: ``llama_token_type``: the last, the one that llama.cpp spells as bytes, and the one that has a hexadecimal text.
_LAST_TYPE, _NORMAL, _BYTE = 6, 1, 6

_FLAGS = (
    *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces"),
    *("normalizer.lowercase", "normalizer.strip_accents"),
)
#: Ids that llama.cpp would replace by 11 where they are missing: another token of this vocabulary, without any error.
_DEMANDED = ("bos_token_id", "eos_token_id")


def _shown(stored: MetaValue) -> str:
    if isinstance(stored.value, MetaArray):
        return f"an array of {len(stored.value)} {stored.value.element.name}"
    return f"{stored.value!r} ({stored.type.name})"


def _refusal(what: str, hint: str = "convert the model again") -> UnsupportedModel:
    return UnsupportedModel(f"{what}; {hint}")


def has_tokenizer(metadata: Mapping[str, MetaValue]) -> bool:
    """Whether the model has one; without one it takes token ids only."""
    stored = metadata.get(_MODEL)
    return stored is None or stored.value not in _NO_TOKENIZER


def vocabulary_size(metadata: Mapping[str, MetaValue]) -> int:
    """How many tokens the model has, after a look at everything llama.cpp reads of its tokenizer.

    The architecture's key ``vocab_size`` counts only where there is no tokenizer (``llama_vocab::n_tokens``). Raises
    :class:`~dgr.errors.UnsupportedModel`.
    """
    if not has_tokenizer(metadata):
        vocab_size = metadata.get(_SIZE)
        if vocab_size is None or vocab_size.type is not ValueType.UINT32 or not isinstance(vocab_size.value, int):
            shown = "missing" if vocab_size is None else _shown(vocab_size)
            raise _refusal(f"{_SIZE} is {shown}, but a model without a tokenizer must say it as UINT32")
        return _counted(_SIZE, vocab_size.value)
    if (model := _text(metadata, _MODEL)) != _BPE:
        raise _refusal(f"{_MODEL} is {model!r}, but DeepSeek V4 has {_BPE!r} (byte-level BPE)")
    if (splitter := _text(metadata, _PRE)) not in _SPLITTERS:
        raise _refusal(f"{_PRE} is {splitter!r}, but DeepSeek V4 splits text as one of {', '.join(_SPLITTERS)}")
    tokens = _strings(metadata, _TOKENS)
    _check_tokens(tokens)
    _check_types(metadata, tokens)
    _check_merges(_strings(metadata, _MERGES))
    _check_ids(metadata, len(tokens))
    _check_others(metadata, len(tokens))
    return len(tokens)


def _counted(what: str, count: int) -> int:
    if not 1 <= count <= _MAX_ENTRIES:
        raise _refusal(f"{what} is {count}, but must be 1 to {_MAX_ENTRIES}")
    return count


def _text(metadata: Mapping[str, MetaValue], key: str) -> str:
    stored = metadata.get(key)
    if stored is None:
        raise _refusal(f"the key {key} is missing: a DeepSeek V4 GGUF needs it")
    if not isinstance(stored.value, str):
        raise _refusal(f"{key} is {_shown(stored)}, but must be a string")
    return stored.value


def _array(metadata: Mapping[str, MetaValue], key: str, *kinds: ValueType) -> MetaArray:
    stored = metadata.get(key)
    if stored is None:
        raise _refusal(f"the key {key} is missing: a DeepSeek V4 GGUF needs it")
    if not isinstance(stored.value, MetaArray) or stored.value.element not in kinds:
        names = " or ".join("strings" if kind is ValueType.STRING else kind.name for kind in kinds)
        raise _refusal(f"{key} is {_shown(stored)}, but must be an array of {names}")
    return stored.value


def _strings(metadata: Mapping[str, MetaValue], key: str) -> tuple[str, ...]:
    array = _array(metadata, key, ValueType.STRING)
    _counted(f"the number of {key}", len(array))
    return tuple(str(value) for value in array.values())


def _check_tokens(tokens: Sequence[str]) -> None:
    """No two alike, as llama.cpp names them, none cut short by a NUL and none endless."""
    named = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    if len(set(named)) != len(named):
        first: dict[str, int] = {}
        index, token = next((i, t) for i, t in enumerate(named) if first.setdefault(t, i) != i)
        raise _refusal(f"{_TOKENS}[{index}] is {token[:60]!r}, which is token {first[token]} already")
    # No character takes more than four bytes of UTF-8.
    for index, token in enumerate(tokens):
        if 4 * len(token) > _MAX_TOKEN_BYTES and (size := _n_bytes(token)) > _MAX_TOKEN_BYTES:
            raise _refusal(f"{_TOKENS}[{index}] is {size} bytes long, but a token may have at most {_MAX_TOKEN_BYTES}")
        if "\0" in token:
            raise _refusal(f"{_TOKENS}[{index}] is {token[:60]!r}, but llama.cpp reads a token only up to a NUL")


def _n_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def _check_types(metadata: Mapping[str, MetaValue], tokens: Sequence[str]) -> None:
    kinds: Sequence[object] = [_NORMAL] * len(tokens)
    if _TYPES in metadata:
        kinds = _per_token(metadata, _TYPES, len(tokens), ValueType.INT32)
    spelled = 0
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == _NORMAL:
            if _BYTE_SYMBOLS.fullmatch(token) is None:
                spelled += len(_NO_BYTE_SYMBOL.findall(token)) * (_n_bytes(token) + len("[UNK_BYTE_0x12345678]"))
        elif not isinstance(kind, int) or not 0 <= kind <= _LAST_TYPE:
            raise _refusal(f"{_TYPES}[{index}] is {kind}, but llama.cpp knows 0 to {_LAST_TYPE}")
        elif kind == _BYTE and _BYTE_TOKEN.fullmatch(token) is None:
            raise _refusal(f"{_TOKENS}[{index}] is {token[:60]!r} of type BYTE, but such a token is called like <0x0A>")
    if spelled > _MAX_SPELLED_BYTES:
        raise _refusal(
            f"the tokens of {_TOKENS} would take {spelled} bytes once spelled out, but may take {_MAX_SPELLED_BYTES}: they"
            " are not in byte symbols"
        )


def _per_token(
    metadata: Mapping[str, MetaValue], key: str, n_tokens: int, *kinds: ValueType
) -> tuple[int | float | bool | str, ...]:
    array = _array(metadata, key, *kinds)
    if len(array) != n_tokens:
        raise _refusal(f"{key} has {len(array)} entries, but must have one per token ({n_tokens})")
    return array.values()


def _check_merges(merges: Sequence[str]) -> None:
    for index, merge in enumerate(merges):
        if _MERGE.fullmatch(merge) is None:
            raise _refusal(f"{_MERGES}[{index}] is {merge[:60]!r}, but a merge is two tokens with a blank between them")


def _check_ids(metadata: Mapping[str, MetaValue], n_tokens: int) -> None:
    """Every special token is one of the vocabulary; begin and end are named."""
    for name in _DEMANDED:
        if _PREFIX + name not in metadata:
            raise _refusal(
                f"the key {_PREFIX}{name} is missing: llama.cpp would take token 11 for it, without any error"
            )
    for key, stored in metadata.items():
        if not (key.startswith(_PREFIX) and key.endswith("_token_id")):
            continue
        if stored.type is not ValueType.UINT32 or not isinstance(stored.value, int) or stored.value >= n_tokens:
            raise _refusal(f"{key} is {_shown(stored)}, but must be a token id from 0 to {n_tokens - 1} as UINT32")


def _check_others(metadata: Mapping[str, MetaValue], n_tokens: int) -> None:
    for name in _FLAGS:
        stored = metadata.get(_PREFIX + name)
        if stored is not None and stored.type is not ValueType.BOOL:
            raise _refusal(f"{_PREFIX}{name} is {_shown(stored)}, but must be a BOOL")
    if _SCORES in metadata:
        _per_token(metadata, _SCORES, n_tokens, ValueType.FLOAT32, ValueType.INT32)
    if _PREFIX + "suppress_tokens" in metadata:
        _array(metadata, _PREFIX + "suppress_tokens", ValueType.INT32)
