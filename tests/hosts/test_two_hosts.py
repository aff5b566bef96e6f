"""Two hosts for real: network namespaces, TLS, real stages, cables that are pulled out. The text is that of one machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import frozen
from cluster.remote_stages import answer_of
from fixture_types import Prompt
from hosts.namespaces import Network, open_network, shaped, way_in

import dgr
from dgr.cli.keys import make_keys
from dgr.testing.network.processes import Program, open_command
from dgr.testing.waits import until

pytestmark = pytest.mark.hosts

#: Two hosts with stages, and a client's.
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2", "client": "10.77.0.3"}
HEAD, TAIL, SPARE = "10.77.0.1:7701", "10.77.0.2:7701", "10.77.0.1:7702"
#: Seconds of a link's heartbeat; three are the time within which silence is noticed.
BEAT = 0.25
#: Tokens of an answer, and those that are drawn before anything happens.
ANSWER, SOME = 120, 12
CONTEXT: dict[str, Any] = {"n_ctx": 512, "n_batch": 32, "n_ubatch": 32}

#: What is done with what a host sends, in words of `tc`.
WIRES = {
    "as it is": (),
    # What queues for longer than that is lost: bursts are.
    "slow, and loses": ("tbf", "rate", "40mbit", "burst", "4k", "limit", "6k"),
    "long, and loses": ("netem", "delay", "5ms", "2ms", "loss", "0.5%", "rate", "200mbit"),
}


@pytest.fixture(scope="session")
def way() -> Sequence[str]:
    """How hosts are made here; what cannot be made skips the tests, with the reason."""
    return way_in()


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest, way: Sequence[str]) -> Sequence[str]:
    words = WIRES[request.param]
    return shaped(way, *words) if words else words


@pytest.fixture(scope="session")
def right(small: Path, prompt: Prompt) -> list[int]:
    """What the whole model, undisturbed and in this process, answers."""

    async def ask() -> list[int]:
        async with dgr.open_pipeline(small, context=dgr.ContextParams(**CONTEXT)) as pipeline:
            return await answer_of(pipeline, prompt(96), ANSWER)

    return trio.run(ask)


@frozen
class Cluster:
    """Stages on two hosts, and a client on a third."""

    network: Network
    route: Path
    stages: dict[str, Program]
    client: Program

    def drawn(self) -> list[int]:
        return [line["token"] for line in self.client.lines if "token" in line]

    def told(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.client.lines if line.get("event") == event]

    async def ask(self, prompt: Sequence[int], count: int) -> None:
        """Have an answer drawn; its tokens come among the client's lines."""
        self.client.lines.clear()
        assert self.client.process.stdin is not None
        await self.client.process.stdin.send_all(json.dumps([list(prompt), count]).encode() + b"\n")

    async def until(self, what: str, condition: object) -> None:
        assert callable(condition)
        await until(lambda: condition() or self.client.process.returncode is not None, 60, what)
        assert condition(), f"{what}: {self.client.errors}"

    async def until_drawn(self, count: int) -> None:
        await self.until(f"token {count}", lambda: len(self.drawn()) >= count)

    async def until_ended(self) -> None:
        await self.until("the end of the answer", lambda: self.told("end"))

    def assert_in_the_middle(self, event: str) -> None:
        """It was told while the answer was drawn, neither before nor after."""
        kinds = ["token" if "token" in line else line["event"] for line in self.client.lines]
        assert SOME <= kinds[: kinds.index(event)].count("token") < ANSWER, kinds

    async def examined(self) -> dict[str, Any]:
        """What `dgr doctor` says on the client's host."""
        command = self.network.python("client", "dgr", "doctor", "--route", str(self.route), "--json")
        done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
        report = json.loads(done.stdout)
        assert isinstance(report, dict)
        return report


@asynccontextmanager
async def open_cluster(
    model: Path, folder: Path, way: Sequence[str], wire: Sequence[str] = ()
) -> AsyncIterator[Cluster]:
    keys = folder / "keys"
    make_keys(keys, [ADDRESSES["a"], ADDRESSES["b"], "client"], 1)
    route = folder / "route.toml"
    lines = ["[context]", *(f"{name} = {value}" for name, value in CONTEXT.items()), "", "[tls]"]
    lines += ['ca = "keys/ca.pem"', 'certificate = "keys/client.pem"', 'key = "keys/client.key"']
    for address, layers in ((HEAD, "0:3"), (TAIL, "3:7"), (SPARE, "3:7")):
        lines += ["", "[[stage]]", f'address = "{address}"', f'layers = "{layers}"']
    route.write_text("\n".join(lines) + "\n")
    beat = 2 * BEAT if wire else BEAT  # a packet that is lost twice is silent for longer
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(open_network(way, ADDRESSES, wire))
        stages = {}
        for host, address, layers in (("a", HEAD, "0:3"), ("b", TAIL, "3:7"), ("a", SPARE, "3:7")):
            own = [f"--tls-{kind}={keys / name}" for kind, name in _files(ADDRESSES[host])]
            flags = ["--ctx=512", "--batch=32", "--ubatch=32", "--threads=1", "--json", f"--heartbeat={beat}"]
            command = ["stage", str(model), f"--layers={layers}", f"--listen={address}", *flags, *own]
            stages[address] = await stack.enter_async_context(open_command(*network.python(host, "dgr", *command)))
        for stage in stages.values():
            await stage.first_line()
        script = str(Path(__file__).with_name("far_client.py"))
        command = [*network.within("client"), sys.executable, script, str(route), str(beat)]
        client = await stack.enter_async_context(open_command(*command, stdin=subprocess.PIPE))
        await client.first_line()
        yield Cluster(network, route, stages, client)
        # Leaving in good order: none of them was hurt by what happened to the others.
        assert client.process.stdin is not None
        await client.process.stdin.aclose()
        assert await client.wait() == 0, client.errors
        for program in (client, *stages.values()):
            assert "Traceback" not in program.errors, program.errors


def _files(host: str) -> list[tuple[str, str]]:
    return [("ca", "ca.pem"), ("cert", f"{host}.pem"), ("key", f"{host}.key")]


async def test_a_host_cut_off_in_mid_answer_is_replaced_and_comes_back(
    way: Sequence[str], wire: Sequence[str], small: Path, prompt: Prompt, right: list[int], tmp_path: Path
) -> None:
    async with open_cluster(small, tmp_path, way, wire) as cluster:
        network, client = cluster.network, cluster.client
        assert client.lines[0]["stages"] == [HEAD, TAIL]
        # Host b is cut off; its layers are on host a, too.
        await cluster.ask(prompt(96), ANSWER)
        await cluster.until_drawn(SOME)
        await network.cut("b")
        began = trio.current_time()
        await cluster.until("the loss", lambda: cluster.told("down"))
        noticed = trio.current_time() - began
        await cluster.until_ended()
        assert cluster.drawn() == right
        cluster.assert_in_the_middle("down")
        assert cluster.told("route")[-1]["stages"] == [HEAD, SPARE]
        assert not await network.reaches("client", TAIL)
        # It comes back, and is as good as before: whatever it held of the lost route is gone.
        await network.join("b")
        with trio.fail_after(30):
            while not await network.reaches("client", TAIL):
                await trio.lowlevel.checkpoint()
        if not wire:  # it fills the links to measure them, which a wire that loses takes long for
            report = await cluster.examined()
            assert report["problems"] == [], report
        await cluster.ask(prompt(96), ANSWER)
        await cluster.until_drawn(SOME)
        cluster.stages[SPARE].process.kill()
        await cluster.until_ended()
        assert cluster.drawn() == right
        cluster.assert_in_the_middle("down")
        assert cluster.told("route")[-1]["stages"] == [HEAD, TAIL]
        lost = {host: await network.dropped(host) for host in ADDRESSES} if wire else {}
        print(f"noticed after {noticed:.2f} s; packets lost by the wires: {lost}")
        assert not wire or any(lost.values())


async def test_a_clients_host_cut_off_in_mid_answer_goes_on_when_it_is_back(
    way: Sequence[str], small: Path, prompt: Prompt, right: list[int], tmp_path: Path
) -> None:
    async with open_cluster(small, tmp_path, way) as cluster:
        await cluster.ask(prompt(96), ANSWER)
        await cluster.until_drawn(SOME)
        await cluster.network.cut("client")
        await cluster.until("the loss", lambda: cluster.told("down"))
        before = len(cluster.drawn())
        await cluster.network.join("client")
        await cluster.until_ended()
        assert cluster.drawn() == right
        assert SOME <= before < ANSWER
        assert cluster.told("again")


async def test_both_hosts_cut_off_from_each_other_alone(
    way: Sequence[str], small: Path, prompt: Prompt, right: list[int], tmp_path: Path
) -> None:
    """The client reaches both; the head does not reach its next stage, and says so: the way is what is left alone."""
    async with open_cluster(small, tmp_path, way) as cluster:
        network = cluster.network
        await cluster.ask(prompt(96), ANSWER)
        await cluster.until_drawn(SOME)
        await network.run("a", f"ip route add blackhole {ADDRESSES['b']}/32")
        await network.run("b", f"ip route add blackhole {ADDRESSES['a']}/32")
        await cluster.until_ended()
        assert cluster.drawn() == right
        cluster.assert_in_the_middle("down")
        assert cluster.told("route")[-1]["stages"] == [HEAD, SPARE]
        assert await network.reaches("client", TAIL)


async def test_the_wires_are_what_carries_it(way: Sequence[str]) -> None:
    """The mutant: hosts that reach each other by another way, or a cut that cuts nothing, would prove nothing above."""
    async with open_network(way, ADDRESSES) as network:
        listen = (
            "import socket; s = socket.create_server(('0.0.0.0', 7701)); print('{}', flush=True); s.accept()[0].recv(1)"
        )
        async with open_command(*network.within("b"), sys.executable, "-c", listen) as b:
            await b.first_line()
            assert not await network.reaches("switch", TAIL)  # nor anybody without a cable
            await network.cut("b")
            assert not await network.reaches("a", TAIL)
            await network.join("b")
            assert await network.reaches("a", TAIL)
            b.process.kill()
