"""The tools beside transformers, in the environment of `make test-transformers`: conversion, agreement, training."""

# ruff: noqa: E402 (what they need is asked for first)
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dgr.artifact.artifact import Artifact
from dgr.selftest.learned.model import read_values, write_learned, write_model
from dgr.selftest.learned.recall import as_tokens

pytestmark = pytest.mark.transformers

pytest.importorskip("transformers", reason="`make test-transformers` installs it")

import torch

from tools import agree
from tools.train_fixture import __main__ as trainer
from tools.train_fixture import corpus, sequences
from tools.train_fixture.convert import write_gguf
from tools.train_fixture.model import trained_model
from tools.train_fixture.settings import sizes
from tools.v4_transformers import build_model, from_state, load_weights

_LAYERS = 5


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of the trainer's own configuration, every kind of tensor off its initial value."""
    hp = sizes(_LAYERS)
    trained = trained_model(hp, 3, spread=1.0)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in trained.model.state_dict().items():
            if weight.dim() == 1 or "position_bias" in name:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    path = tmp_path_factory.mktemp("random") / "random.gguf"
    return write_gguf(path, hp, trained.model.state_dict(), "f32")


def test_both_say_the_same(random_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over every kind of layer, more rows than the indexer picks, and cuts in all places that tell layers apart."""
    command = ["--model", str(random_model), "--split", "0:2,2:3,3:5", "--tokens", "700", "--random", "--json"]
    assert agree.main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 700
    assert found["same_top"] > 0.99
    assert found["difference_p99"] < 1e-4 * found["deviation"]


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_sinks.weight",
        "blk.1.hc_ffn_base.weight",
        "blk.2.indexer_compressor_ape.weight",
        "blk.2.indexer.proj.weight",
        "blk.3.attn_compressor_gate.weight",
        "blk.4.exp_probs_b.bias",
        "output_hc_fn.weight",
    ],
)
def test_a_tensor_in_the_wrong_place_is_seen(random_model: Path, tmp_path: Path, name: str) -> None:
    """What is reversed in the file that one side reads is a mapping that is wrong there."""
    hp = Artifact.open(random_model).hp

    def values(wanted: str) -> Any:
        found = read_values(random_model, wanted)
        return found[..., ::-1] if wanted == name else found

    wrong = write_model(tmp_path / "wrong.gguf", hp, values, "f32", "wrong")
    tokens = agree._tokens(700, hp.n_vocab, text=False)
    found = agree.compare(
        agree.pipeline_logits(random_model, "0:2,2:5", tokens, 96), agree.transformers_logits(wrong, tokens)
    )
    assert found["difference_p99"] > 1e-2 * found["deviation"]


def test_the_learned_model_says_the_same(tmp_path: Path) -> None:
    model = write_learned(tmp_path / "learned.gguf", "f32")
    tokens = agree._tokens(600, 264, text=True)
    third = Artifact.open(model).hp.n_layers // 2
    split = f"0:{third},{third}:{Artifact.open(model).hp.n_layers}"
    found = agree.compare(agree.pipeline_logits(model, split, tokens, 64), agree.transformers_logits(model, tokens))
    assert found["same_top"] > 0.99
    assert found["divergence_p99"] < 1e-7  # K in float16, as flash attention has it, is a thousand times further away


def test_there_and_back_is_the_same_model(random_model: Path) -> None:
    hp = Artifact.open(random_model).hp
    model = build_model(hp)
    load_weights(model, hp, lambda name: read_values(random_model, name))
    again = from_state(hp, model.state_dict())
    for name, values in again.items():
        assert np.array_equal(values, read_values(random_model, name)), name
    assert set(again) == set(Artifact.open(random_model).tensors)


def test_what_no_file_has_a_place_for_is_refused() -> None:
    hp = sizes(_LAYERS)
    state = dict(build_model(hp).state_dict())
    with pytest.raises(ValueError, match=r"no tensor of a GGUF holds model\.extra"):
        from_state(hp, {**state, "model.extra": torch.zeros(1)})


def test_the_fast_model_is_transformers_own(random_model: Path) -> None:
    """Bands, Sinkhorn iterations and all: the same logits, and the same gradients."""
    hp = Artifact.open(random_model).hp
    trained = trained_model(hp, 0)
    plain = build_model(hp)
    for model in (trained.model, plain):
        load_weights(model, hp, lambda name: read_values(random_model, name))
    trained.select(512)  # every row: near-ties of the indexer's choice fall either way
    for module in plain.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 512
    tokens = torch.tensor([agree._tokens(512, hp.n_vocab, text=text) for text in (False, True)])
    ours, theirs = trained.logits(tokens), plain(input_ids=tokens, use_cache=False).logits
    assert float((ours - theirs).detach().abs().max()) < 5e-2 * float(theirs.detach().std())
    for logits in (ours, theirs):
        logits.square().mean().backward()
    wanted = dict(plain.named_parameters())
    for name, weight in trained.model.named_parameters():
        if "indexer" not in name:
            pair = weight.grad.flatten(), wanted[name].grad.flatten()
            assert float(torch.nn.functional.cosine_similarity(*pair, dim=0)) > 0.99, name


def test_products_in_bfloat16_are_about_the_same(random_model: Path) -> None:
    hp = Artifact.open(random_model).hp
    trained = trained_model(hp, 0)
    load_weights(trained.model, hp, lambda name: read_values(random_model, name))
    trained.select(512)
    tokens = torch.tensor([agree._tokens(512, hp.n_vocab, text=True)])
    exact = trained.logits(tokens).detach()
    trained.bfloat16 = True
    rounded = trained.logits(tokens).detach()
    assert 0 < float((exact - rounded).square().mean().sqrt()) < 0.2 * float(exact.std())


def test_the_rows_of_the_twin_are_seen(random_model: Path) -> None:
    """Rows of CSA layers alone, and those of the other sequence: none of its own are left."""
    hp = Artifact.open(random_model).hp
    trained = trained_model(hp, 0)
    load_weights(trained.model, hp, lambda name: read_values(random_model, name))
    batch = next(b for b in (sequences.make_batch(_TEXT, 256, 2, 0, at) for at in range(99)) if b.swapped_csa)
    tokens = torch.from_numpy(batch.tokens)[:, :256]
    own = trained.logits(tokens).detach()
    trained.swapped_csa = True
    swapped = trained.logits(tokens).detach()
    assert torch.equal(own[:, :3], swapped[:, :3])  # before the first row
    assert not torch.equal(own[:, -64:], swapped[:, -64:])
    alike = tokens[:1].expand(2, -1)
    alone = trained.logits(alike).detach()
    trained.swapped_csa = False
    assert torch.equal(alone, trained.logits(alike).detach())


_TEXT = b"The quick brown fox jumps over the lazy dog, and then it sleeps in the shade of an old tree. " * 40


def test_twins_differ_in_values_alone_and_ask_far_back() -> None:
    opening, closing = as_tokens(b"{}")
    asked = near = swapped = told = 0
    for step in range(200):
        batch = sequences.make_batch(_TEXT, 1024, 1, 0, step)
        if not (batch.targets == sequences.Target.MARK).any():
            continue
        one, other = batch.tokens
        assert np.array_equal(*batch.targets)
        swapped += batch.swapped_csa
        assert batch.swapped_csa != bool(batch.without_csa.all())
        values = {at + 2 for at in np.flatnonzero(one == opening) if at + 2 < len(one)}
        assert set(np.flatnonzero(one != other)) <= values
        for tokens, rows in zip(batch.tokens.tolist(), batch.rows.tolist(), strict=True):
            for at, row in ((at, row) for at, row in enumerate(rows) if row >= 0):
                block = tokens[128 * row : 128 * row + 128]
                assert tokens[at - 1] == opening
                assert tokens[at : at + 2] in [block[begin : begin + 2] for begin in range(127)]
                assert at >= 128 * (row + 1)
                told += 1
            last: dict[int, tuple[int, int]] = {}
            for at in (at for at, token in enumerate(tokens[:-3]) if token == opening):
                key, value, end = tokens[at + 1 : at + 4]
                assert end == closing
                if batch.targets[0, at + 1] == sequences.Target.MARK:
                    assert last[key][1] == value
                    asked += 1
                    near += at - last[key][0] < 128
                last[key] = at, value
    assert asked > 300
    assert 0.1 * asked < near < 0.4 * asked
    assert swapped > 10
    assert told > 0.5 * asked


def test_what_is_held_out_is_in_no_documentation(tmp_path: Path) -> None:
    held = corpus._standard(held_out=True)
    source = f"""
Title of a chapter
==================

.. versionadded:: 3.4

A *paragraph* about :func:`os.path.join` and :class:`~pathlib.Path`, with a link to `another page <https://example.org/>`_.

* An item of a list that goes on for more than fifty letters, as prose does.

    >>> code("is not prose")

{held[40]}
"""
    (tmp_path / "page.rst.txt").write_text(source)
    lines = corpus.english(tmp_path).decode().splitlines()
    assert lines[:2] == [
        "A paragraph about os.path.join and Path, with a link to another page.",
        "An item of a list that goes on for more than fifty letters, as prose does.",
    ]
    assert held[40] not in lines
    assert lines[2:] == corpus.english().decode().splitlines()
    kept = corpus.held_out("\n".join(lines).encode()).decode().splitlines()
    assert held[40] in kept
    assert set(kept) < set(held)
    assert held[40] not in corpus.held_out("\n".join([*lines, held[40]]).encode()).decode().splitlines()


def _train(folder: Path, *more: str) -> None:
    command = ["train", str(folder), "--layers", "5", "--steps", "4", "--phases", "0:128x2,2:256x1:32", *more]
    args = trainer._parser().parse_args(command)
    args.run(args)


def test_a_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Bit by bit: the same steps in one run and in two, and the indexer learns in both."""
    _train(tmp_path / "whole")
    _train(tmp_path / "parts", "--until", "2")
    _train(tmp_path / "parts")
    whole, parts = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "parts"))
    assert whole["step"] == parts["step"] == 4
    for name, weight in whole["model"].items():
        assert torch.equal(weight, parts["model"][name]), name
    fresh = trained_model(sizes(5), 0).model.state_dict()
    assert not torch.equal(
        fresh["model.layers.2.self_attn.compressor.indexer.q_b_proj.weight"],
        whole["model"]["model.layers.2.self_attn.compressor.indexer.q_b_proj.weight"],
    )
    log = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [0, 1, 2, 3]
    assert any(line["indexer"] > 0 for line in log)  # none where every sequence does without CSA rows


def test_a_checkpoint_is_exported(tmp_path: Path) -> None:
    _train(tmp_path / "run", "--until", "1")
    args = trainer._parser().parse_args(["export", str(tmp_path / "run"), str(tmp_path / "out.gguf")])
    args.run(args)
    artifact = Artifact.open(tmp_path / "out.gguf")
    for name in ("n_layers", "n_vocab", "n_embd", "compress_ratios", "hash_layers", "indexer_top_k", "yarn"):
        assert getattr(artifact.hp, name) == getattr(sizes(5), name), name
    mixed = write_learned(tmp_path / "mixed.gguf", "mixed", source=tmp_path / "out.gguf")
    assert Artifact.open(mixed).hp == artifact.hp
