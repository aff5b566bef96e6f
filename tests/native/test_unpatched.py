"""Our patches change nothing of a whole model: three ways to the same bytes."""

from __future__ import annotations

import array
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dgr.engine._native import ffi, lib
from dgr.selftest.fixture import write_fixture
from dgr.v4.published import PUBLISHED

CFFI_BUILD = Path(__file__).resolve().parents[2] / "cffi_build"
N_VOCAB, CHUNK, N_CTX, N_UBATCH = 512, 96, 1024, 128

#: A fixed text of 300 tokens: past two HCA blocks, several sub-batches and the window.
TOKENS = array.array("i", [(i * 2654435761 >> 7) % N_VOCAB for i in range(300)])


def build_reference(folder: Path, *flavour: str) -> Path:
    """Return upstream's whole_logits, linked to a flavour of the pinned llama.cpp."""
    prefix = subprocess.run(
        [sys.executable, CFFI_BUILD / "llama_cpp.py", *flavour], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    source = CFFI_BUILD / "ctest" / "reference"
    # cmake and ninja are wheels of this environment, which need not be active.
    tools = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    configure = ["cmake", "-S", str(source), "-B", str(folder), "-G", "Ninja", f"-DLLAMA_PREFIX={prefix}"]
    subprocess.run(configure, check=True, env=tools)
    subprocess.run(["cmake", "--build", folder], check=True, env=tools)
    return folder / "whole_logits"


def shim_logits(model: Path, *, flash_attn: bool, type_k: int) -> bytes:
    """Logits of the whole model through the shim, in native numerics."""
    params = ffi.new("dgr_stage_params *", lib.dgr_stage_params_default())
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads = N_CTX, N_UBATCH, N_UBATCH, 1
    params.exact, params.flash_attn, params.type_k = False, flash_attn, type_k
    out = ffi.new("dgr_stage **")
    assert lib.dgr_stage_open(str(model).encode(), params, out) == 0, ffi.string(lib.dgr_last_error())
    stage = ffi.gc(out[0], lib.dgr_stage_close)

    logits = bytearray()
    for at in range(0, len(TOKENS), CHUNK):
        tokens = TOKENS[at : at + CHUNK]
        n = len(tokens)
        rows = bytearray(n * N_VOCAB * 4)
        keep = {
            "tokens": ffi.new("int32_t[]", tokens.tolist()),
            "positions": ffi.new("int32_t[]", list(range(at, at + n))),
            "slots": ffi.new("int32_t[]", n),
            "want_logits": ffi.new("uint8_t[]", [1] * n),
            "logits_out": ffi.from_buffer("float[]", rows),
            "row_finite": ffi.new("uint8_t[]", n),
        }
        run = ffi.new("dgr_run *", {"n_tokens": n, **keep})
        assert lib.dgr_stage_run(stage, run) == 0, ffi.string(lib.dgr_last_error())
        logits += rows
    return bytes(logits)


@pytest.mark.native_reference
def test_patched_whole_is_unpatched_whole(tmp_path: Path) -> None:
    references = [build_reference(tmp_path / "unpatched", "--unpatched"), build_reference(tmp_path / "patched")]
    ids = tmp_path / "tokens.i32"
    ids.write_bytes(TOKENS.tobytes())

    for weights in ("f32", "mixed", *PUBLISHED):
        model = tmp_path / f"{weights}.gguf"
        write_fixture(model, weights=weights, layers=7 if weights in PUBLISHED else 43)
        for flash_attn, type_k in ((True, "f16"), (False, "f32")):
            rows = []
            for number, reference in enumerate(references):
                out = tmp_path / f"{number}.f32"
                options = [CHUNK, 1, int(flash_attn), type_k, N_CTX, N_UBATCH]
                subprocess.run([reference, model, ids, out, *map(str, options)], check=True)
                rows.append(out.read_bytes())
            rows.append(shim_logits(model, flash_attn=flash_attn, type_k={"f32": 0, "f16": 1}[type_k]))
            assert len(rows[0]) == len(TOKENS) * N_VOCAB * 4
            assert rows[0] == rows[1] == rows[2], (weights, flash_attn, type_k)
