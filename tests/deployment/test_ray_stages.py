"""`dgr up --ray` in a Ray cluster of this machine: actors and stages are killed, the text goes on, and nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
from fixture_types import Prompt

import dgr
from dgr.cli.keys import make_keys
from dgr.client.pipeline import Pipeline
from dgr.cluster.follow import follow_route
from dgr.cluster.route_file import format_route_file, read_route_file
from dgr.core.values import ContextParams
from dgr.testing.network.processes import Program, free_ports, is_gone, open_program
from dgr.testing.waits import until

pytestmark = pytest.mark.ray

SPLIT = "0:2", "2:5", "5:7"
CONTEXT: dict[str, Any] = {"n_ctx": 256, "n_batch": 32, "n_ubatch": 32}
ANSWER = 40
#: Seconds after which a test gives up: Ray takes many to start.
PATIENCE = 90.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of this machine alone; it ends with the module, and nothing else of Ray does."""
    folder = tempfile.mkdtemp(prefix="ray-")  # a short name: sockets lie in it
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--node-ip-address=127.0.0.1",
        f"--port={address.split(':')[1]}", f"--temp-dir={folder}", "--include-dashboard=false", "--disable-usage-stats",
        "--num-cpus=3", "--object-store-memory=78643200", "--include-log-monitor=true",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        sockets = Path(folder, "session_latest", "sockets")
        deadline = time.monotonic() + PATIENCE
        while not (sockets / "raylet").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield address
    finally:
        left = [process, *psutil.Process(process.pid).children(recursive=True)]
        process.terminate()
        process.wait(PATIENCE)
        for each in left[1:]:
            if isinstance(each, psutil.Process) and not is_gone(each.pid):
                each.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def route(tmp_path: Path, small: Path) -> Path:
    """A route whose addresses are names: a free port of wherever Ray puts each stage."""
    import ray

    own = str(ray.util.get_node_ip_address())
    make_keys(tmp_path / "keys", [own], days=2)
    lines = [f'model = "{small}"', "[context]", *(f"{name} = {value}" for name, value in CONTEXT.items())]
    lines += ["[tls]", 'ca = "keys/ca.pem"', f'certificate = "keys/{own}.pem"', f'key = "keys/{own}.key"']
    for index, layers in enumerate(SPLIT):
        lines += ["[[stage]]", f'address = "stage-{index}:0"', f'layers = "{layers}"']
    path = tmp_path / "cluster.toml"
    path.write_text("\n".join(lines))
    return path


@asynccontextmanager
async def _up(cluster: str, route: Path, live: Path) -> AsyncIterator[Program]:
    options = ("--ray-strategy", "SPREAD", "--threads", "1", "--out", str(live), "--json", "--heartbeat", "0.5")
    async with open_program("up", str(route), "--ray", cluster, *options) as program:
        with trio.fail_after(PATIENCE):
            for index in range(len(SPLIT)):
                await program.ready(f"stage-{index}:0")
        yield program


def _actor_of(pid: int) -> psutil.Process:
    parent = psutil.Process(pid).parent()
    assert parent is not None
    return parent


async def test_actors_and_stages_are_killed_and_the_text_goes_on(
    cluster: str, route: Path, small: Path, prompt: Prompt, tmp_path: Path
) -> None:
    async with dgr.open_pipeline(small, context=ContextParams(**CONTEXT)) as whole, whole.session() as session:
        expected = [token.id async for token in session.generate(prompt(24), max_tokens=ANSWER, stop=())]
    live = tmp_path / "live.toml"
    pids: list[int] = []
    async with _up(cluster, route, live) as program:
        file = read_route_file(live)
        assert [str(ref.layers) for ref in file.route.stages] == [*SPLIT]
        first, second = (program.events(f"stage-{index}:0", "ready")[0] for index in (1, 2))
        async with dgr.open_route(file) as pipeline, trio.open_nursery() as nursery:
            nursery.start_soon(follow_route, pipeline, file)
            answer = []
            with trio.fail_after(PATIENCE):
                async with pipeline.session() as session:
                    async for token in session.generate(prompt(24), max_tokens=ANSWER, stop=()):
                        answer.append(token.id)
                        if len(answer) == 8:
                            actor = _actor_of(first["pid"])
                            assert "StageActor" in " ".join(actor.cmdline())
                            actor.kill()
                            # A stage ends with its actor, and another actor is made, which has a stage at another port.
                            await until(lambda: is_gone(first["pid"]), PATIENCE, "the end of the stage")
                        if len(answer) == 20:
                            widow = partial(is_gone, _actor_of(second["pid"]).pid)
                            os.kill(second["pid"], signal.SIGKILL)
                            await until(widow, PATIENCE, "the end of the actor")
            assert answer == expected
            again = [await program.ready(f"stage-{index}:0", times=2) for index in (1, 2)]
            assert await _addresses(pipeline) == [ref.address for ref in read_route_file(live).route.stages]
            assert await _addresses(pipeline) != [ref.address for ref in file.route.stages]
            assert not {*again} & {first["pid"], second["pid"]}
            nursery.cancel_scope.cancel()
        pids = program.stage_pids()
        assert len(pids) == 5
    assert program.process.returncode == 0, program.errors
    await until(lambda: all(map(is_gone, pids)), PATIENCE, "the end of every stage")


def test_spares_are_placed_and_written_too(route: Path, tmp_path: Path) -> None:
    from dgr.cli.ray_up import _placed_route

    route.write_text(route.read_text() + '[[stage]]\naddress = "spare:0"\nlayers = "2:5"\nmetrics = "spare:9"\n')
    file = read_route_file(route)
    known = {
        ref: {"address": f"10.0.0.{at}:1", "metrics": f"10.0.0.{at}:9" if ref.address == "spare:0" else None}
        for at, ref in enumerate(file.stages)
    }
    placed = _placed_route(file, known, tmp_path / "live.toml")
    (tmp_path / "live.toml").write_text(format_route_file(placed))
    again = read_route_file(tmp_path / "live.toml")
    assert [(ref.address, str(ref.layers)) for ref in again.stages] == [
        ("10.0.0.0:1", "0:2"), ("10.0.0.1:1", "2:5"), ("10.0.0.2:1", "2:5"), ("10.0.0.3:1", "5:7"),
    ]  # fmt: skip
    assert [ref.address for ref in again.spares] == ["10.0.0.2:1"]
    assert again.stage_metrics == {"10.0.0.2:1": "10.0.0.2:9"}


async def _addresses(pipeline: Pipeline) -> list[str]:
    await pipeline.wait_live()
    return [ref.address for ref in pipeline.route.stages]


@pytest.mark.parametrize(
    ("change", "options", "complaint"),
    [
        (
            ('layers = "0:2"', 'layers = "0:2"\nmodel = "none.gguf"'),
            ("--ray-strategy", "SPREAD"),
            "refuses its arguments",
        ),
        (("", ""), (), "3 stages on hosts of their own, but the cluster has 1"),
        (("", ""), ("--ray-strategy", "SPREAD", "--threads", "0"), "--threads is 0"),
    ],
)
async def test_what_cannot_be_placed_is_refused(
    cluster: str, route: Path, tmp_path: Path, change: tuple[str, str], options: tuple[str, ...], complaint: str
) -> None:
    text = await trio.Path(route).read_text()
    await trio.Path(route).write_text(text.replace(*change, 1))
    out = tmp_path / "live.toml"
    async with open_program("up", str(route), "--ray", cluster, "--out", str(out), "--json", *options) as program:
        assert await program.wait(PATIENCE) == 2
    assert complaint in program.errors
    assert "Traceback" not in program.errors
    assert not out.exists()
