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

pytestmark = pytest.mark.transformers

pytest.importorskip("transformers", reason="`make test-transformers` installs it")

import torch

from tools import agree
from tools.train_fixture import __main__ as trainer
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
    assert found["difference_p50"] < 5e-3 * found["deviation"]


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
    assert found["divergence_p50"] < 1e-6


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
