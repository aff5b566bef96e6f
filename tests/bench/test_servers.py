"""``dgr-bench servers``: upstream's llama-server as a side, the clients that ask, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from attrs import evolve

from dgr import ContextParams
from dgr.engine.native import build_info
from dgr.errors import EngineError, InputError
from dgr_bench.cli import main
from dgr_bench.overhead import servers
from dgr_bench.overhead.servers import ServersPlan, load_seconds
from dgr_bench.upstream.llama_server import LlamaServer

COMMIT = build_info()["llama_cpp_commit"]
PLAN = ServersPlan(
    name="a plan",
    clients=(1, 4),
    threads=(1,),
    split=("0:3", "3:7"),
    prompt=3,
    answer=5,
    requests=2,
    rounds=1,
    vocabulary=512,
    numerics="exact",
    judged=True,
)

#: Says what llama-server says, and answers at once with as many tokens as were asked for.
PROGRAM = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if "--version" in sys.argv:
    print("version: 0.5.0-dev (build 0, commit {commit})", file=sys.stderr)
    sys.exit()
{begin}
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, body, kind="application/json"):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(b"{{}}")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert len(asked["prompt"]) == 3 and max(asked["prompt"]) < 512 and asked["ignore_eos"], asked
        event = b"data: " + json.dumps({{"choices": [{{"text": "a"}}]}}).encode() + b"\\n\\n"
        self.answer(event * asked["max_tokens"], "text/event-stream")

    def log_message(self, *_):
        pass

ThreadingHTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
"""


def program(folder: Path, *, commit: str = COMMIT, begin: str = "") -> Path:
    path = folder / "llama-server"
    path.write_text(PROGRAM.format(python=sys.executable, commit=commit, begin=begin))
    path.chmod(0o755)
    return path


def server(binary: Path) -> LlamaServer:
    return LlamaServer(binary, COMMIT, Path("model.gguf"), ContextParams(n_ctx=256, n_seq_max=4), threads=2)


def test_the_command_has_every_setting() -> None:
    context = ContextParams(n_ctx=256, n_batch=128, n_ubatch=64, n_seq_max=4, type_k="f32", flash_attn=False)
    name, offline, *command = evolve(server(Path("llama-server")), context=context).command(8000)
    assert (name, offline) == ("llama-server", "--offline")
    assert dict(zip(command[::2], command[1::2], strict=True)) == {
        "--model": "model.gguf", "--host": "127.0.0.1", "--port": "8000", "--parallel": "4", "--ctx-size": "1024",
        "--batch-size": "128", "--ubatch-size": "64", "--threads": "2", "--threads-batch": "2", "--flash-attn": "off",
        "--cache-type-k": "f32", "--cache-type-v": "f32", "--load-mode": "none", "--cache-ram": "0",
    }  # fmt: skip


async def test_a_side_answers_clients_and_ends_with_its_block(tmp_path: Path) -> None:
    async with server(program(tmp_path)).running() as url:
        assert 0 < await load_seconds(url, 2, PLAN) < 60
    with pytest.raises(EngineError, match=r"2 clients of http.* got no answers: .*refused"):
        await load_seconds(url, 2, PLAN)


async def test_another_pin_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"abcdef012, dgr from 0c1e57098; build one of the same pin with .* --llama-server"
    ):
        async with server(program(tmp_path, commit="abcdef012")).running():
            pass


async def test_a_server_that_fails_says_why(tmp_path: Path) -> None:
    binary = program(tmp_path, begin='sys.exit("failed to load model")')
    with pytest.raises(EngineError, match="exit status 1: failed to load model"):
        async with server(binary).running():
            pass


def test_the_goal_is_asked_of_one_stage_and_many_clients() -> None:
    compared = {each.name: each.goal for each in servers.comparisons(Path("model"), PLAN, Path("llama-server"))}
    assert {name: goal and str(goal) for name, goal in compared.items()} == {
        "1 client, one stage / llama-server, 1 thread": None,
        "4 clients, one stage / llama-server, 1 thread": "at least 1",
        "1 client, two stages of 1 thread / llama-server, 2 threads": None,
        "4 clients, two stages of 1 thread / llama-server, 2 threads": None,
    }


@pytest.mark.llama_bench
def test_the_command_measures_the_real_one(small: Path, tmp_path: Path) -> None:
    assert main(["servers", "--quick", "--model", str(small), "--out", str(tmp_path / "out")]) == 0
    report = (tmp_path / "out" / "report.md").read_text()
    assert "2 clients, two stages of 1 thread / llama-server, 2 threads" in report
    assert (tmp_path / "out" / "plots" / "servers.png").exists()
