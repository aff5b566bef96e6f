"""The lane under AddressSanitizer and UBSan (`make test-sanitizers`): it sees faults, and a pipeline from end to end has none.

Nothing here is skipped where the build has no sanitizers, it fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from conversations import take
from fixture_types import Prompt

import dgr
from dgr.core.values import Numerics, SamplingParams, Wire
from dgr.engine.native import build_info
from dgr.testing import _probe

pytestmark = pytest.mark.sanitizers

SPLIT = "0:2,2:5,5:7"
#: The faults of dgr_probe_fault that this build must see, and what is reported of each.
FAULTS = {
    _probe.lib.DGR_FAULT_OVERRUN: "heap-buffer-overflow",
    _probe.lib.DGR_FAULT_FREED: "heap-use-after-free",
    _probe.lib.DGR_FAULT_OVERFLOW: "signed integer overflow",
    _probe.lib.DGR_FAULT_SHIFT: "shift exponent 32 is too large",
}


@pytest.fixture(scope="session", autouse=True)
def sanitized() -> None:
    if "-fsanitize=address,undefined" not in build_info()["flags"].split():
        pytest.fail(
            "this build has no sanitizers: run `make test-sanitizers`, which makes one of its own", pytrace=False
        )


@pytest.mark.parametrize(("fault", "report"), FAULTS.items())
def test_a_fault_in_the_extension_ends_the_process_with_a_report(fault: int, report: str) -> None:
    script = f"from dgr.testing._probe import lib; lib.dgr_probe_fault({fault}); print('nothing was seen')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode not in (0, -signal.SIGSEGV)
    assert report in done.stderr
    assert "dgr_probe_fault.cpp" in done.stderr  # with the place
    assert "nothing was seen" not in done.stdout


def test_a_race_is_for_another_build() -> None:
    assert _probe.lib.dgr_probe_fault(_probe.lib.DGR_FAULT_RACE) == _probe.lib.DGR_ERR_ARGUMENT
    assert b"DGR_SANITIZE=thread" in _probe.ffi.string(_probe.lib.dgr_last_error())


def test_reports_end_the_process() -> None:
    """Where UBSan only writes and goes on, a green run says nothing."""
    assert "halt_on_error=1" in os.environ["UBSAN_OPTIONS"]


@pytest.mark.parametrize(
    ("numerics", "wire"), [(Numerics.EXACT, Wire.F32), (Numerics.NATIVE, Wire.F32), (Numerics.SAME_CUTS, Wire.Q8)]
)
async def test_a_pipeline_from_end_to_end(small: Path, prompt: Prompt, numerics: Numerics, wire: Wire) -> None:
    """Text in and out, chunks, turns, forks, draws, a cancelled prefill, two sessions at once, every row of logits."""
    context = dgr.ContextParams(n_ctx=512, n_batch=64, n_ubatch=32, n_seq_max=2, numerics=numerics, wire=wire)
    drawn = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, repeat_penalty=1.1, seed=7, top_logprobs=5)
    async with dgr.open_pipeline(small, SPLIT, context=context, chunk=16) as pipeline:
        async with pipeline.session() as session:
            text = await take(session.generate("Once upon a time, \N{SNOWMAN}", max_tokens=8, stop=()))
            assert len(text) == 8
            await take(session.generate(" and then", max_tokens=8, sampling=drawn, stop=()))
            async with session.fork() as other:
                one = await take(session.generate(" so", max_tokens=4, stop=()))
                assert await take(other.generate(" so", max_tokens=4, stop=())) == one
        async with pipeline.session() as session:
            with trio.move_on_after(0.05):
                await take(session.generate(prompt(400), max_tokens=4, stop=()))
            await take(session.generate(prompt(60, seed=1), max_tokens=4, stop=()))
        async with pipeline.session() as one_of_two, pipeline.session() as other, trio.open_nursery() as nursery:
            for seed, each in enumerate((one_of_two, other)):
                nursery.start_soon(take, each.generate(prompt(100, seed=seed), max_tokens=8, stop=()))
        rows: list[int] = []
        async with pipeline.session() as session:
            await session.logits(prompt(40), lambda position, values: rows.append(values.nbytes))
        assert sum(rows) == 40 * 4 * pipeline.n_vocab
