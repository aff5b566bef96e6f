"""Stages loaded from slices and from models in parts give the same bits as stages of the one file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from fixture_types import Model, Prompt
from narrow import present

import dgr
from dgr.artifact.artifact import Artifact
from dgr.artifact.manifest import encode_manifest
from dgr.artifact.parts import part_name
from dgr.artifact.slicing import write_slice
from dgr.core.route import LayerRange, parse_split
from dgr.core.values import ContextParams, LogitsWanted
from dgr.engine.base import Output, ShardEngine, Work
from dgr.engine.llama import LlamaEngine, estimate_memory
from dgr.engine.vocab import LlamaVocabulary
from dgr.errors import ArtifactError
from dgr.selftest.chain import pieces
from dgr.selftest.fixture.edit import write_in_parts
from dgr.selftest.llama_chain import open_chain

CONTEXT = ContextParams(n_ctx=512)
SPLIT = "0:15,15:29,29:43"
RANGES = parse_split(SPLIT, 43)


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "mtp"])
def whole(request: pytest.FixtureRequest, model: Model) -> Artifact:
    return Artifact.open(model("f32", mtp=request.param))


@pytest.fixture(scope="module")
def slices(whole: Artifact, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One slice per range of the split."""
    folder = tmp_path_factory.mktemp("slices")
    return [Path(write_slice(whole, layers, folder / f"{layers.begin}.gguf").path) for layers in RANGES]


@pytest.fixture(scope="module")
def parts(whole: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in five files, with its manifest; the first one's path. Copy before taking parts away."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "m.manifest.json").write_bytes(encode_manifest(whole.manifest()))
    return write_in_parts(whole.file.path, folder / "m.gguf", 5)[0]


@pytest.fixture(scope="module")
def passes(whole: Artifact, prompt: Prompt) -> list[list[Output]]:
    """What each stage of the one file gives for each chunk of a prompt."""
    with open_chain(whole, SPLIT, CONTEXT) as chain:
        return [run_stages(chain.engines, work) for work in chunks(prompt(140))]


def chunks(tokens: list[int]) -> Iterator[Work]:
    for begin, end in pieces(len(tokens), 70):
        yield Work(0, begin, tokens[begin:end], logits=LogitsWanted.ALL)


def run_stages(engines: Sequence[ShardEngine], work: Work) -> list[Output]:
    """Each stage's output of its own, given the output of the stage before."""
    outputs = []
    for engine in engines:
        (output,) = engine.run([work])
        outputs.append(output)
        work = Work(work.slot, work.position, work.tokens, residual=output.residual, logits=work.logits)
    return outputs


def payload(output: Output) -> bytes:
    return bytes(output.residual or b"") + bytes(output.logits or b"")


def assert_same_stages(engines: list[LlamaEngine], passes: list[list[Output]], tokens: list[int]) -> None:
    """Every stage gives the bytes that the stage of the one file gave."""
    for work, expected in zip(chunks(tokens), passes, strict=True):
        found = run_stages(tuple(engines), work)
        assert [payload(output) for output in found] == [payload(output) for output in expected]


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mmap"])
def test_slices_equal_the_parents_stages(
    slices: list[Path], whole: Artifact, passes: list[list[Output]], prompt: Prompt, mmap: bool
) -> None:
    with ExitStack() as stack:
        engines = [LlamaEngine(path, None, CONTEXT, mmap=mmap) for path in slices]
        for engine in engines:
            stack.callback(engine.stop)
        assert [engine.describe().layers for engine in engines] == list(RANGES)
        assert {engine.describe().artifact for engine in engines} == {whole.identity}
        assert_same_stages(engines, passes, prompt(140))


def test_memory_of_a_slice_is_that_of_the_parents_stage(slices: list[Path], whole: Artifact) -> None:
    for path, layers in zip(slices, RANGES, strict=True):
        assert estimate_memory(path, None, CONTEXT) == estimate_memory(whole, layers, CONTEXT)
        # Ranges elsewhere can be asked for too: the slice knows the whole model.
        assert estimate_memory(path, LayerRange(14, 30), CONTEXT) == estimate_memory(whole, LayerRange(14, 30), CONTEXT)


@pytest.mark.parametrize("layers", ["15:30", "14:29", "0:43", "0:15"])
def test_a_slice_runs_nothing_outside_itself(slices: list[Path], layers: str) -> None:
    with pytest.raises(ArtifactError, match=f"this slice holds layers 15:29 of the model, not all of {layers}"):
        LlamaEngine(slices[1], LayerRange.parse(layers), CONTEXT)


def test_a_range_within_a_slice_runs(slices: list[Path], whole: Artifact, prompt: Prompt) -> None:
    layers, tokens = LayerRange(16, 20), prompt(50)
    with ExitStack() as stack:
        engines = [LlamaEngine(source, layers, CONTEXT) for source in (slices[1], whole)]
        for engine in engines:
            stack.callback(engine.stop)
        residual = bytes(4 * len(tokens) * engines[0].describe().width_in)
        outputs = [engine.run([Work(0, 0, tokens, residual=residual)])[0] for engine in engines]
    assert payload(outputs[0]) == payload(outputs[1])


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mmap"])
def test_parts_equal_the_one_file(
    parts: Path, whole: Artifact, passes: list[list[Output]], prompt: Prompt, mmap: bool
) -> None:
    with ExitStack() as stack:
        engines = [LlamaEngine(parts, layers, CONTEXT, mmap=mmap) for layers in RANGES]
        for engine in engines:
            stack.callback(engine.stop)
        assert {engine.describe().artifact for engine in engines} == {whole.identity}
        assert_same_stages(engines, passes, prompt(140))


@pytest.mark.parametrize("mmap", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["read", "mmap"])
def test_a_stage_needs_only_the_parts_that_hold_its_tensors(
    parts: Path, whole: Artifact, passes: list[list[Output]], prompt: Prompt, tmp_path: Path, mmap: bool
) -> None:
    def host(layers: LayerRange) -> Path:
        """A folder as a host of one stage has it: first part, manifest, and what the range needs."""
        artifact = Artifact.open(parts)
        needed = {artifact.located[tensor.name][0].path for tensor in artifact.tensors_of(layers)}
        assert len(needed) < 4
        folder = tmp_path / str(layers.begin)
        folder.mkdir()
        for path in {parts, parts.with_name("m.manifest.json"), *needed}:
            shutil.copy(path, folder)
        return folder / parts.name

    with ExitStack() as stack:
        engines = [LlamaEngine(host(layers), layers, CONTEXT, mmap=mmap) for layers in RANGES]
        for engine in engines:
            stack.callback(engine.stop)
        assert {engine.describe().artifact for engine in engines} == {whole.identity}
        assert_same_stages(engines, passes, prompt(140))
        here = Artifact.open(host_of := tmp_path / "15" / parts.name)
        assert len(here.parts.missing) >= 2
        assert estimate_memory(here, LayerRange(0, 43), CONTEXT) == estimate_memory(whole, None, CONTEXT)
        with LlamaVocabulary(host_of) as partial, LlamaVocabulary(whole) as full:
            assert partial.encode("hello world") == full.encode("hello world")
        with pytest.raises(ArtifactError, match=part_name("m", 1, 5)):
            LlamaEngine(here, LayerRange(0, 15), CONTEXT)


def test_without_the_manifest_such_a_stage_says_what_to_do(parts: Path, tmp_path: Path) -> None:
    shutil.copy(parts, tmp_path)
    shutil.copy(parts.with_name(part_name("m", 2, 5)), tmp_path)
    artifact = Artifact.open(tmp_path / parts.name)
    assert artifact.hp.n_layers == 43
    held = sorted({int(name.split(".")[1]) for name in artifact.located if name.startswith("blk.")})
    layers = LayerRange(held[1], held[1] + 1)
    with pytest.raises(ArtifactError, match=r"put the manifest here as m.manifest.json"):
        LlamaEngine(artifact, layers, CONTEXT)


async def test_a_pipeline_over_slices(slices: list[Path], whole: Artifact) -> None:
    async def answer(model: Path | list[str], split: str | None) -> list[int]:
        async with dgr.open_pipeline(model, split, context=CONTEXT) as pipeline, pipeline.session() as session:
            return [token.id async for token in session.generate("The quick brown fox", max_tokens=8)]

    assert await answer([str(path) for path in slices], None) == await answer(whole.file.path, SPLIT)


async def test_slices_that_do_not_match_the_stages(slices: list[Path]) -> None:
    for models, split, message in (
        (slices[:2], None, "the split ends at layer 29"),
        (slices, "0:15,15:43", "3 slices for 2 stages"),
        ([slices[0], slices[2], slices[1]], None, "leaves out layers from 15"),
        ([slices[0], slices[0], slices[2]], SPLIT, "holds layers 0:15 of the model, not all of 15:29"),
        ([], None, "no model was given"),
    ):
        with pytest.raises(dgr.DgrError, match=message):
            async with dgr.open_pipeline(models, split, context=CONTEXT):
                pass


async def test_slices_of_two_models_are_no_pipeline(slices: list[Path], model: Model, tmp_path: Path) -> None:
    other = Artifact.open(model("f32", seed=1))
    write_slice(other, RANGES[1], tmp_path / "other.gguf")
    with pytest.raises(dgr.DgrError, match="differs in its artifact identity"):
        async with dgr.open_pipeline([slices[0], tmp_path / "other.gguf", slices[2]], context=CONTEXT):
            pass


@pytest.mark.slow
def test_the_stage_command_takes_a_slice(slices: list[Path], whole: Artifact) -> None:
    command = [sys.executable, "-m", "dgr", "stage", str(slices[1]), "--layers", "15:29", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--ctx", "512", "--json", "--until-stdin-closes"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        said = json.loads(present(process.stdout).readline())
        present(process.stdin).close()
        assert process.wait(60) == 0
    assert (said["layers"], said["artifact"]) == ("15:29", whole.identity)
    refused = subprocess.run(
        [*command[:6], "15:30", *command[7:]], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 2
    assert "this slice holds layers 15:29 of the model, not all of 15:30" in refused.stderr
