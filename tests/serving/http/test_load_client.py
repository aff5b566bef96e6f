"""llama-benchy, the load client that people compare servers with: offline, against a fixture on two stages."""

from __future__ import annotations

import os
import subprocess
import urllib.request
from pathlib import Path

import pytest
from serving.http.load_client import Load, book, disagreements, write_tokenizer
from serving.http.programs import served

from dgr.selftest.fixture.vocabulary import build_vocabulary

#: Where `make test-load` installs it.
PROGRAM = Path(__file__).resolve().parents[3] / "build" / "load-client" / "bin" / "llama-benchy"

LOAD = Load(prompt=64, answer=8, clients=(1, 2), runs=1)
#: What a real one printed and what the server counted.
TABLE = """
| model   |      test |     t/s (total) |      t/s (req) |       peak t/s |
|:--------|----------:|----------------:|---------------:|---------------:|
| tiny    | pp64 (c1) |  6692.97 ± 0.00 | 6692.97 ± 0.00 |                |
| tiny    |  tg8 (c1) |  329.42 ± 70.37 | 329.42 ± 70.37 | 376.48 ± 80.42 |
| tiny    | pp64 (c2) | 1378.33 ± 20.40 |                |                |
| tiny    |  tg8 (c2) |  150.71 ± 19.08 | 118.09 ± 44.00 | 172.24 ± 21.81 |
"""
PROGRESS = 3 * '{"type":"request_end","request_id":0,"total_tokens":8,"prompt_tokens":68,"error":""}\n'
METRICS = """# TYPE dgr_tokens_predicted_total counter
dgr_prompt_tokens_total 204.0
dgr_tokens_predicted_total 24.0
dgr_requests_total{endpoint="chat",status="200"} 3.0
dgr_e2e_request_latency_seconds_count 3.0
"""


def test_a_recorded_report_agrees() -> None:
    assert disagreements(LOAD, TABLE, PROGRESS, METRICS) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("| tiny    |  tg8 (c2)", "| tiny    |  tg9 (c2)", "no row for ('tg', 8, 2)"),
        ("329.42 ± 70.37 |", "0.00 ± 0.00 |", "('tg', 8, 1): 0.0 tokens/s"),
        ("1378.33", "nan", "('pp', 64, 2): nan tokens/s"),
        ('"total_tokens":8', '"total_tokens":7', "dgr_tokens_predicted_total is 24.0, the client says 21"),
        ('"prompt_tokens":68', '"prompt_tokens":64', "dgr_prompt_tokens_total is 204.0, the client says 192"),
        ("predicted_total 24.0", "predicted_total 25.0", "dgr_tokens_predicted_total is 25.0, the client says 24"),
        ("dgr_e2e", "other_e2e", "dgr_e2e_request_latency_seconds_count is None, the client says 3"),
        ('"error":""', '"error":"refused"', "a request failed: refused"),
        ("} 3.0", "} 2.0", 'dgr_requests_total{endpoint="chat",status="200"} is 2.0, the client says 3'),
    ],
)
def test_a_report_that_is_wrong_would_be_seen(old: str, new: str, said: str) -> None:
    texts = [text.replace(old, new) for text in (TABLE, PROGRESS, METRICS)]
    assert texts != [TABLE, PROGRESS, METRICS]
    assert said in disagreements(LOAD, *texts)


@pytest.mark.load
def test_its_table_and_the_servers_counters_agree(small: Path, tmp_path: Path) -> None:
    """No warm-up and no second guess at the prompt's size: every token that it reports is one that the server counted."""
    assert PROGRAM.exists(), "llama-benchy is not there; run `make test-load`"
    load = Load(prompt=64, answer=8, clients=(1, 2, 4), runs=2)
    vocabulary, progress = build_vocabulary(512), tmp_path / "progress.jsonl"
    tokenizer = write_tokenizer(vocabulary, tmp_path / "tokenizer")
    with (
        book(vocabulary) as url,
        served("--model", small, "--split", "0:3,3:7", "--name", "tiny", "--thinking", "off", "--sessions", "2") as (
            _,
            line,
        ),
    ):
        command = [
            PROGRAM,
            "--base-url",
            f"{line['url']}/v1",
            "--model",
            "tiny",
            "--tokenizer",
            tokenizer,
            "--book-url",
            url,
        ]
        command += ["--pp", load.prompt, "--tg", load.answer, "--runs", load.runs, "--concurrency", *load.clients]
        command += ["--exact-tg", "--no-warmup", "--no-adapt-prompt", "--skip-coherence", "--latency-mode", "none"]
        command += ["--exit-on-first-fail", "--emit-progress", progress]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HOME": os.fspath(tmp_path)}
        done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        with urllib.request.urlopen(f"{line['url']}/metrics") as metrics:
            assert disagreements(load, done.stdout, progress.read_text(), metrics.read().decode()) == []
