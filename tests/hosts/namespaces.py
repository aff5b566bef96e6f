"""Hosts that are network namespaces of this machine, joined by a switch: addresses, wires and failures of their own.

Nothing is left of them when the block ends, even if this process is killed: a namespace lives as long as the process that
holds it, which ends with its input.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest
import trio

from dgr.cli.children import python_module

__all__ = ["Network", "open_network", "shaped", "way_in"]

#: Ways to a namespace: as root, and as anybody where the kernel lets everybody be root in a namespace of users.
_WAYS: Sequence[tuple[str, ...]] = (("--net",), ("--user", "--map-root-user", "--net"))
_NETMASK = 24


def _works(*command: str) -> str:
    """Why a command does not work; empty when it does."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"


def way_in() -> tuple[str, ...]:
    """Flags of `unshare` that make a network here; skips the test, with the reason, where nothing does."""
    missing = [name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no hosts can be made here: {', '.join(missing)} not found (packages util-linux and iproute2)")
    # A veth pair and a bridge, as a network has them: a kernel may have namespaces and neither.
    trial = "ip link add veth0 type veth peer name veth1 && ip link add br0 type bridge"
    whys = []
    for way in _WAYS:
        if not (why := _works("unshare", *way, "sh", "-c", trial)):
            return way
        whys.append(why)
    pytest.skip(
        f"no hosts can be made here, which takes CAP_NET_ADMIN, veth and a bridge: {'; '.join(dict.fromkeys(whys))}"
    )


def shaped(way: Sequence[str], *discipline: str) -> Sequence[str]:
    """``tc`` words of a queueing discipline; skips the test, with the reason, where this kernel has none of the kind."""
    command = "tc qdisc add dev lo root " + " ".join(discipline)
    if why := _works("unshare", *way, "sh", "-c", command):
        pytest.skip(f"this kernel has no queueing discipline {discipline[0]}: {why}")
    return discipline


class Network:
    """Made by :func:`open_network`."""

    def __init__(self) -> None:
        self._holders: dict[str, trio.Process] = {}
        #: How one gets from here to where the others are made.
        self._user: tuple[str, ...] = ()

    def within(self, host: str) -> list[str]:
        """The beginning of a command line that runs on a host: the process is the command itself."""
        user = ("--user", "--preserve-credentials") if self._user else ()
        return ["nsenter", *user, "--net", f"--target={self._holders[host].pid}"]

    def python(self, host: str, module: str, *arguments: str) -> list[str]:
        """A command line that runs a module on a host."""
        return [*self.within(host), *python_module(module, *arguments)]

    async def run(self, host: str, command: str) -> str:
        """What a shell command prints on a host. Raises :class:`subprocess.CalledProcessError`."""
        done = await trio.run_process(
            [*self.within(host), "sh", "-ec", command], capture_stdout=True, capture_stderr=True
        )
        return done.stdout.decode()

    async def reaches(self, host: str, address: str) -> bool:
        """Whether a connection can be made from one host to an address."""
        name, _, port = address.rpartition(":")
        script = f"import socket; socket.create_connection(({name!r}, {port}), timeout=1).close()"
        done = await trio.run_process(
            [*self.within(host), sys.executable, "-c", script], capture_stdout=True, capture_stderr=True, check=False
        )
        return done.returncode == 0

    async def cut(self, host: str) -> None:
        """Pull the host's cable out: nobody hears anything of it any more, and nobody is told."""
        await self.run("switch", f"ip link set to-{host} down")

    async def join(self, host: str) -> None:
        """Put it in again."""
        await self.run("switch", f"ip link set to-{host} up")

    async def dropped(self, host: str) -> int:
        """Packets of a host that the shaping of its wire lost."""
        words = (await self.run(host, "tc -s qdisc show dev eth0")).replace(",", " ").split()
        return sum(int(words[at + 1]) for at, word in enumerate(words) if word == "(dropped")

    async def _hold(self, name: str, *command: str) -> None:
        """Begin a namespace, held by a process that ends with its input."""
        process = await trio.lowlevel.open_process(
            [*command, "sh", "-c", "echo held; exec cat > /dev/null"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._holders[name] = process
        assert process.stdout is not None
        assert await process.stdout.receive_some(16) == b"held\n", f"no namespace for {name}"


@asynccontextmanager
async def open_network(
    way: Sequence[str], hosts: Mapping[str, str], discipline: Sequence[str] = ()
) -> AsyncIterator[Network]:
    """Hosts by name, each with an address of one network, for the length of the block.

    ``way``: of :func:`way_in`. ``discipline``: of :func:`shaped`, for what every host sends.
    """
    network = Network()
    try:
        await network._hold("switch", "unshare", *way)
        network._user = tuple(way[:-1])
        await network.run("switch", "ip link set lo up; ip link add name br0 type bridge; ip link set br0 up")
        for host, address in hosts.items():
            await network._hold(host, *network.within("switch"), "unshare", "--net")
            pid = network._holders[host].pid
            await network.run(
                "switch",
                f"ip link add to-{host} type veth peer name eth0 netns {pid}; ip link set to-{host} master br0 up",
            )
            await network.run(
                host, f"ip link set lo up; ip address add {address}/{_NETMASK} dev eth0; ip link set eth0 up"
            )
            if discipline:
                await network.run(host, f"tc qdisc add dev eth0 root {' '.join(discipline)}")
        yield network
    finally:
        with trio.CancelScope(shield=True):
            for holder in network._holders.values():
                holder.kill()
                await holder.wait()
