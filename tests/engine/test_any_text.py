"""Text of any length and kind becomes tokens: as upstream splits it, in linear time, on the smallest of stacks."""

# ruff: noqa: RUF001 (the marks in expressions and special tokens are what they look like)

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dgr.engine.vocab import LlamaVocabulary
from dgr.errors import EngineError, InputError, InvalidToken
from dgr.selftest.fixture.edit import edit_gguf
from dgr.selftest.fixture.metadata import strings
from dgr.selftest.fixture.vocabulary import MIN_VOCAB, SPECIALS, build_vocabulary, byte_symbols
from dgr.selftest.fixture.writer import write_fixture
from dgr.testing.state_inspector import split_text

#: V4's pre-tokenizer, as ``src/llama-vocab.cpp`` spells it.
NUMBERS = r"\p{N}{1,3}"
CJK = "[一-龥぀-ゟ゠-ヿ]+"
REST = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+".replace(r"\"", '"')
    + "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
OURS = (NUMBERS, CJK, REST)


def on_std_regex(*expressions: str) -> list[str]:
    """The same expressions under names that llama.cpp has no splitter for."""
    return [f"(?:{expression})" for expression in expressions]


def characters() -> dict[str, list[str]]:
    """Every character by general category, and the kinds that the expressions look at."""
    found: dict[str, list[str]] = {}
    for code in itertools.chain(range(0xD800), range(0xE000, 0x110000)):
        found.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    found["whitespace"] = [char for char in map(chr, range(0x3001)) if char.isspace()]
    found["newlines"] = ["\r", "\n", "\x85", "\u2028"]
    found["ASCII"] = [chr(code) for code in range(128)]
    found["about CJK"] = [
        chr(code) for code in (*range(0x3030, 0x3110), *range(0x4DF0, 0x4E10), *range(0x9F90, 0x9FB0))
    ]
    return found


def texts(n: int, seed: int) -> Iterator[str]:
    """Texts of a few kinds of characters each, in runs and mixed with what begins and ends words."""
    drawn, pools = random.Random(seed), list(characters().values())
    for _ in range(n):
        mine = drawn.sample(pools, drawn.randint(1, 4))
        parts = []
        for _ in range(drawn.randint(0, 30)):
            char = drawn.choice(drawn.choice(mine) if drawn.random() < 0.8 else " \r\n\t!a'1é")
            parts.append(char * (drawn.randint(1, 5) if drawn.random() < 0.2 else 1))
        yield "".join(parts)


@pytest.fixture(scope="module")
def drawn_texts() -> list[str]:
    return list(texts(2000, seed=1))


@pytest.fixture(scope="module")
def vocabulary(tiny: Path) -> Iterator[LlamaVocabulary]:
    with LlamaVocabulary(tiny) as opened:
        yield opened


def test_text_is_split_as_by_std_regex(drawn_texts: list[str]) -> None:
    reference = on_std_regex(*OURS)
    for text in drawn_texts:
        assert split_text(OURS, text) == split_text(reference, text), ascii(text)


@pytest.mark.slow
def test_every_character_is_split_as_by_std_regex() -> None:
    """Each beside a letter, a digit, a sign, blanks and a newline, on both sides."""
    reference = on_std_regex(*OURS)
    codes = [chr(code) for code in itertools.chain(range(0xD800), range(0xE000, 0x20000), range(0xE0000, 0xE0200))]
    for start in range(0, len(codes), 97):
        text = "".join(f"a{char}a1{char}1!{char}! {char} \n{char}{char}\n" for char in codes[start : start + 97])
        assert split_text(OURS, text) == split_text(reference, text), hex(ord(codes[start]))


MUTANTS = {
    "four digits": (NUMBERS.replace("3", "4"), CJK, REST),
    "one more ideograph": (NUMBERS, CJK.replace("龥", "龦"), REST),
    "no katakana": (NUMBERS, CJK.replace("゠-ヿ", ""), REST),
    "letters without marks": (NUMBERS, CJK, REST.replace("[\\p{L}\\p{M}]+", "[\\p{L}]+")),
    "signs without symbols": (NUMBERS, CJK, REST.replace(" ?[\\p{P}\\p{S}]+", " ?[\\p{P}]+")),
    "no newline after signs": (NUMBERS, CJK, REST.replace("[\r\n]*", "")),
    "no blank before signs": (NUMBERS, CJK, REST.replace("| ?[", "|[")),
    "no lead before letters": (NUMBERS, CJK, REST.replace("[^\r\n\\p{L}\\p{P}\\p{S}]?", "")),
    "a newline as lead": (NUMBERS, CJK, REST.replace("[^\r\n\\p{L}", "[^\\p{L}")),
    "a sign takes all letters": (NUMBERS, CJK, REST.replace("[A-Za-z]+", "[\\p{L}]+")),
    "blanks keep their last": (NUMBERS, CJK, REST.replace("|\\s+(?!\\S)", "")),
    "only the first newline": (NUMBERS, CJK, REST.replace("\\s*[\r\n]+", "[\r\n]+")),
    "numbers last": (CJK, REST, NUMBERS),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_another_splitter_would_be_noticed(drawn_texts: list[str], mutant: str) -> None:
    changed = on_std_regex(*MUTANTS[mutant])
    assert MUTANTS[mutant] != OURS
    assert any(split_text(OURS, text) != split_text(changed, text) for text in drawn_texts)


def test_token_ids_are_those_of_the_words_that_std_regex_splits(
    vocabulary: LlamaVocabulary, drawn_texts: list[str]
) -> None:
    """The vocabulary uses these very expressions, and merges within a word alone."""
    built, symbols = build_vocabulary(vocabulary.n_vocab), byte_symbols()
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(built.merges)}
    ids = {token: number for number, token in enumerate(built.tokens)}

    @cache
    def tokens_of(word: bytes) -> tuple[int, ...]:
        parts = [symbols[byte] for byte in word]
        while found := [(ranks[pair], at) for at, pair in enumerate(itertools.pairwise(parts)) if pair in ranks]:
            _, at = min(found)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return tuple(ids[part] for part in parts)

    reference = on_std_regex(*OURS)
    for text in [*drawn_texts[:1000], "  The quick brown fox\r\n\r\n  jumps!over 12345 lazy dogs' tails"]:
        data, at, expected = text.encode(), 0, list[int]()
        for size in split_text(reference, text):
            expected += tokens_of(data[at : at + size])
            at += size
        assert vocabulary.encode(text) == expected, ascii(text)


def parted(text: str, specials: dict[str, int]) -> list[str | int]:
    """A text as upstream parts it by special tokens: the longest first, each from left to right in what is left of it."""
    parts: list[str | int] = [text]
    for special in sorted(specials, key=lambda each: -len(each.encode())):
        found: list[str | int] = []
        for part in parts:
            if isinstance(part, int):
                found.append(part)
                continue
            first, *rest = part.split(special)
            found.append(first)
            for piece in rest:
                found += [specials[special], piece]
        parts = [part for part in found if part != ""]
    return parts


def test_special_tokens_part_a_text_wherever_they_stand(vocabulary: LlamaVocabulary) -> None:
    specials, drawn = {text: token for token, text in enumerate(SPECIALS)}, random.Random(3)
    pieces = [*SPECIALS, *SPECIALS, "<think", "</think>>", "<｜", "｜>", "<", ">", " ", "\n", "a", "漢", "think"]
    seen = set()
    for _ in range(1500):
        text = "".join(drawn.choices(pieces, k=drawn.randint(0, 12)))
        parts = parted(text, specials)
        expected = [token for part in parts for token in ([part] if isinstance(part, int) else vocabulary.encode(part))]
        assert vocabulary.encode(text, parse_special=True) == expected, ascii(text)
        seen.add(tuple(isinstance(part, int) for part in parts))
    assert len(seen) > 200
    assert vocabulary.encode(SPECIALS[0]) != [0]  # not parsed: no more than its letters


# --- length -----------------------------------------------------------------------------------------------------------

#: Encodes and decodes runs of one kind on a thread with little stack. Prints kind, seconds and tokens; dies of what it proves.
RUNS = """
import json, sys, threading, time
from dgr.engine.vocab import LlamaVocabulary
vocabulary = LlamaVocabulary(sys.argv[1])
runs = json.load(open(sys.argv[2]))
def work():
    for kind, char in runs.items():
        text = (char * (int(sys.argv[3]) // len(char) + 1))[:int(sys.argv[3])]
        begin = time.thread_time()
        tokens = vocabulary.encode(text, add_special=True, parse_special=True)
        took = time.thread_time() - begin
        spelled = b"".join(map(vocabulary.piece, tokens[1:1000]))
        assert text.encode().startswith(spelled), kind
        print(kind, took, len(tokens), sep="\\t", flush=True)
threading.stack_size(256 << 10)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def kinds_of_runs() -> dict[str, str]:
    """One character of every general category, and what texts really have long runs of."""
    runs = {category: chars[len(chars) // 2] for category, chars in characters().items() if len(category) == 2}
    runs |= {f"U+{ord(char):04X}": char for char in map(chr, range(0x3001)) if char.isspace()}
    runs |= {f"U+{code:04X}": chr(code) for code in (0, 1, 0x1F, 0x7F, 0x200D, 0xFEFF, 0xFFFD, 0x10FFFF)}
    return runs | {
        "letters": "a",
        "signs": "!",
        "dashes": "-",
        "digits": "7",
        "CJK": "漢",
        "kana": "の",
        "emoji": "😀",
        "DNA": "GATTACA",
        "CR LF": "\r\n",
        "blanks and newlines": " \n ",
        "marks": "e\u0301\u0302",
        "words": "the quick ",
        "JSON": '{"a":[1,2],"b":null},',
        "begin tokens": "<｜begin▁of▁sentence｜>",
        "begin tokens apart": "<think>x",
        "base64": "q83vASNFZ4k+/",
        "mixed": "a1 漢!\n😀é-",
    }


def measure_runs(model: Path, folder: Path, length: int, kinds: dict[str, str]) -> dict[str, float]:
    """Seconds that a run of each kind takes in a child of its own."""
    (folder / "runs").write_text(json.dumps(kinds), encoding="ascii")
    done = subprocess.run(
        [sys.executable, "-c", RUNS, str(model), str(folder / "runs"), str(length)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    took = {line.split("\t")[0]: float(line.split("\t")[1]) for line in done.stdout.splitlines()}
    missing = [kind for kind in kinds if kind not in took]
    assert not missing, f"the process ended with {done.returncode} at {missing[0]}: {done.stderr[-500:]}"
    return took


def test_runs_of_every_category_pass_on_a_small_stack(tiny: Path, tmp_path: Path) -> None:
    measure_runs(tiny, tmp_path, 10_000, kinds_of_runs())


#: Kinds that each take another way through the splitter, the partition by special tokens and the merges.
WAYS = ("letters", "signs", "U+0020", "U+000A", "CJK", "U+0001", "marks", "words", "begin tokens", "begin tokens apart")


def slower_than_linear(model: Path, folder: Path, ways: dict[str, str]) -> dict[str, int]:
    """Kinds whose 20-fold length takes more than the 120-fold time, and how much; quadratic would be 400."""
    short, long = (measure_runs(model, folder, length, ways) for length in (10_000, 200_000))
    return {kind: round(long[kind] / short[kind]) for kind in ways if long[kind] > 120 * short[kind] + 0.05}


@pytest.mark.slow
def test_time_grows_with_the_length_and_no_faster(tiny: Path, tmp_path: Path) -> None:
    ways = {kind: char for kind, char in kinds_of_runs().items() if kind in WAYS}
    assert slower_than_linear(tiny, tmp_path, ways) == {}


#: Merges that never end in a run of ``a``: of the longest token and one more, or of two alike.
ENDLESS = {
    "one by one": [("a" * n, "a") for n in range(1, 58)],
    "doubled": [("a" * 2**power, "a" * 2**power) for power in range(8)],
}


@pytest.mark.slow
@pytest.mark.parametrize("merges", ENDLESS.values(), ids=ENDLESS)
def test_long_tokens_grow_out_of_merges_in_linear_time(tmp_path: Path, merges: list[tuple[str, str]]) -> None:
    plain = write_fixture(tmp_path / "plain.gguf", preset="min", layers=4).path
    keys = {
        "tokens": strings([*build_vocabulary(MIN_VOCAB).tokens, *(left + right for left, right in merges)]),
        "merges": strings([f"{left} {right}" for left, right in merges]),
        "token_type": None,
    }
    path = edit_gguf(
        plain, tmp_path / "merging.gguf", keys={f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    )
    with LlamaVocabulary(path) as vocabulary:
        tokens = vocabulary.encode("a" * 1024)
        assert len(tokens) < 600
        assert b"".join(map(vocabulary.piece, tokens)) == b"a" * 1024
    assert slower_than_linear(path, tmp_path, {"letters": "a"}) == {}


@pytest.mark.slow
def test_runs_of_a_million_of_every_category_pass_on_a_small_stack(tiny: Path, tmp_path: Path) -> None:
    took = measure_runs(tiny, tmp_path, 1_000_000, kinds_of_runs())
    assert max(took.values()) < 60


def test_other_threads_run_while_a_long_text_is_encoded(vocabulary: LlamaVocabulary) -> None:
    """The native call has let go of the GIL: else nothing here would move until it returns."""
    ended, moved = threading.Event(), 0

    def encode() -> None:
        vocabulary.encode("a lazy dog " * 100_000)
        ended.set()

    thread = threading.Thread(target=encode)
    begin = time.perf_counter()
    thread.start()
    while not ended.is_set() and time.perf_counter() - begin < 60:
        moved += 1
        time.sleep(0)
    thread.join()
    assert moved > 1000


# --- what is not text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "where"), [("\ud83d", 0), ("caf\udce9", 3), ("漢字 \udfff!", 3), ("\ud83d\ude00", 0)])
def test_a_lone_surrogate_is_named_with_its_place(vocabulary: LlamaVocabulary, text: str, where: int) -> None:
    with pytest.raises(InputError, match=rf"a lone surrogate, U\+{ord(text[where]):04X}, at character {where}"):
        vocabulary.encode(text)


@pytest.mark.parametrize("value", [b"bytes", None, 7, ["a"]])
def test_what_is_not_a_string_is_refused(vocabulary: LlamaVocabulary, value: Any) -> None:
    with pytest.raises(InputError, match=f"the text is a {type(value).__name__}; give a str"):
        vocabulary.encode(value)


def test_more_text_than_memory_should_hold_is_refused(vocabulary: LlamaVocabulary) -> None:
    with pytest.raises(InputError, match="has 16777218 bytes; one text may have 16777216"):
        vocabulary.encode("é" * (8 << 20) + "é")


@pytest.mark.parametrize("token", [-1, 512, 2**31, 2**64, 1.0, "1", None])
def test_a_token_outside_the_vocabulary_is_refused(vocabulary: LlamaVocabulary, token: Any) -> None:
    assert vocabulary.n_vocab == 512
    with pytest.raises(InvalidToken, match="token id"):
        vocabulary.piece(token)


def test_any_integer_type_names_a_token(vocabulary: LlamaVocabulary) -> None:
    integer: Any = np.int64(300)  # as callers without types have it
    assert vocabulary.piece(integer) == vocabulary.piece(300)


def test_a_closed_vocabulary_says_so(tiny: Path) -> None:
    vocabulary = LlamaVocabulary(tiny)
    vocabulary.close()
    for use in (lambda: vocabulary.encode("a"), lambda: vocabulary.piece(1)):
        with pytest.raises(EngineError, match="the vocabulary was closed"):
            use()
