"""The model that has learned: its questions, its file in every kind of weights, and that it recalls."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import trio
from msgspec.structs import replace

import dgr
from dgr.artifact.artifact import Artifact
from dgr.cli import main
from dgr.engine.vocab import LlamaVocabulary
from dgr.errors import InputError
from dgr.gguf.reader import read_gguf
from dgr.gguf.types import GgmlType
from dgr.selftest.fixture.presets import WEIGHTS
from dgr.selftest.learned import recall
from dgr.selftest.learned.cached import cached_learned
from dgr.selftest.learned.model import KEPT, TEXT, held_out_text, read_values, write_learned
from dgr.selftest.learned.recall import BOS, Kind, as_tokens, make_recital
from dgr.v4.hyper_parameters import V4_FLASH, LayerKind

#: What the file takes of the package, at most.
_MOST_BYTES = 12 << 20


# --- questions ---


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("distance", [8, 24, 104, 296, 1000, 3000])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_recital_asks_what_it_stated(kind: Kind, distance: int, seed: int) -> None:
    recital = make_recital(kind, distance, held_out_text(), seed)
    opening, closing = as_tokens(kind.brackets)
    tokens = recital.tokens
    assert tokens[0] == BOS
    assert tokens.count(opening) == tokens.count(closing) == 2 * kind.statements == 2 * len(recital.questions)
    keys = set()
    for one in recital.questions:
        assert one.asked_at + 1 - one.stated_at == distance
        assert one.stated_at % 4 == 1  # the row that will hold it is not complete
        statement = tokens[one.stated_at - 2 : one.stated_at + 2]
        assert statement == tokens[one.asked_at - 1 : one.asked_at + 3]
        assert statement[2] == one.answer
        assert bytes((one.answer - as_tokens(b"\0")[0],)) in recall.VALUES
        keys.add(statement[1])
    assert len(keys) == kind.statements
    assert recital.first_asked == recital.questions[0].asked_at - 1
    assert recital == make_recital(kind, distance, held_out_text(), seed)
    assert recital != make_recital(kind, distance, held_out_text(), seed + 2)


def test_other_values_change_nothing_else() -> None:
    one, other = (make_recital(Kind.PAIR, 296, held_out_text(), 0, values_seed=seed) for seed in (None, 1))
    changed = {at for at, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b}
    stated = {at for q in one.questions for at in (q.stated_at, q.asked_at + 1)}
    assert changed
    assert changed <= stated


@pytest.mark.parametrize("distance", [-8, 0, 7, 9, 16, 1001])
def test_a_distance_at_which_statements_would_collide_is_refused(distance: int) -> None:
    with pytest.raises(InputError, match=rf"the distance is {distance}; give 8 more than a multiple of 16"):
        make_recital(Kind.PAIR, distance, held_out_text(), 0)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(InputError, match=r"a question over 1000 tokens needs \d+ bytes of text, not 500"):
        make_recital(Kind.MARK, 1000, held_out_text()[:500], 0)


# --- the file ---


def test_the_kept_file_has_every_kind_of_layer_and_fits() -> None:
    hp = Artifact.open(KEPT).hp
    assert {hp.kind(layer) for layer in range(hp.n_layers)} == set(LayerKind)
    assert hp.compress_ratios == V4_FLASH.compress_ratios[: hp.n_layers]
    assert (hp.window, hp.hash_layers, hp.hc_streams) == (V4_FLASH.window, V4_FLASH.hash_layers, V4_FLASH.hc_streams)
    assert KEPT.stat().st_size + TEXT.stat().st_size < _MOST_BYTES
    assert len(held_out_text()) > 17_000  # as the longest recital needs
    assert set(held_out_text()) <= set(range(32, 127)) | {10}
    assert not set(held_out_text()) & set(b"<>{}[]")


@pytest.mark.parametrize("weights", ["f32", "f16", "bf16", "mixed", "q8_0", "q4_0", "mxfp4"])
def test_every_kind_of_weights_is_the_kept_one(tmp_path: Path, weights: str) -> None:
    path = write_learned(tmp_path / "model.gguf", weights)
    assert Artifact.open(path).hp == Artifact.open(KEPT).hp
    kinds = {tensor.type for tensor in read_gguf(path).tensors.values()}
    wanted = set(WEIGHTS[weights].values()) if weights in WEIGHTS else {GgmlType[weights.upper()]}
    assert kinds - {GgmlType.F32, GgmlType.I32} == wanted - {GgmlType.F32}
    for name in ("token_embd.weight", "blk.2.attn_q_b.weight", "blk.3.ffn_down_exps.weight", "blk.0.attn_norm.weight"):
        kept, found = read_values(KEPT, name), read_values(path, name)
        if weights in ("f32", "bf16") or name.endswith("norm.weight"):
            assert np.array_equal(kept, found), name
        else:
            assert np.corrcoef(kept.ravel(), found.ravel())[0, 1] > 0.985, name


def test_rows_that_are_not_whole_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="need rows that are multiples of 256"):
        write_learned(tmp_path / "model.gguf", "q4_k")
    assert not (tmp_path / "model.gguf").exists()


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    assert main(["fixture", "--learned", str(path), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["path"], summary["weights"], summary["file_bytes"]) == (str(path), "mixed", path.stat().st_size)
    assert path.read_bytes() == write_learned(tmp_path / "again.gguf", "mixed").read_bytes()
    for flag in (["--seed", "1"], ["--preset", "tiny"], ["--layers", "5"], ["--mtp"], ["--sparse"], ["--parts", "2"]):
        assert main(["fixture", "--learned", str(tmp_path / "other.gguf"), *flag]) == 2
        assert f"{flag[0]} cannot go with --learned" in capsys.readouterr().err
    assert not (tmp_path / "other.gguf").exists()


def test_a_byte_is_a_token() -> None:
    with LlamaVocabulary(Artifact.open(KEPT)) as vocabulary:
        text = 'The "quick" brown fox <Ab> {Cd} [x]; \té → 你\n\n  end'
        assert vocabulary.encode(text, add_special=True) == [BOS, *as_tokens(text.encode())]


# --- what it has learned ---


@pytest.mark.parametrize("kind", Kind)
def test_it_recalls_through_stages_and_prefers_english(kind: Kind) -> None:
    """Far beyond the window, where a stage's compressed rows alone can tell; chance is one in 26."""
    path = cached_learned("f32")
    hp = Artifact.open(path).hp
    split = f"0:2,2:3,3:{hp.n_layers}"
    context = replace(dgr.ContextParams(), n_ctx=2048, n_batch=128, n_ubatch=128)
    recital = make_recital(kind, 1000, held_out_text(), 5)
    found: dict[int, bytes] = {}

    async def run() -> int:
        async with dgr.open_pipeline(path, split, context=context, chunk=128) as pipeline:
            async with pipeline.session() as session:
                await session.logits(recital.tokens, lambda at, values: found.__setitem__(at, bytes(values)))
            return pipeline.n_vocab

    n_vocab = trio.run(run)
    rows = np.frombuffer(b"".join(found[at] for at in sorted(found)), np.float32).reshape(-1, n_vocab)
    right = sum(int(rows[one.asked_at].argmax()) == one.answer for one in recital.questions)
    assert right >= 0.75 * len(recital.questions)
    wanted = np.array(recital.tokens[1:])
    text = np.isin(wanted, as_tokens(b"etaoinshrdlu "))
    logits = rows[:-1].astype(np.float64)
    told = logits[np.arange(len(wanted)), wanted] - np.log(np.exp(logits).sum(axis=1))
    assert -told[text].mean() / np.log(2) < 2.5  # eight bits a byte would be nothing learned
