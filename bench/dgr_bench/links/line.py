"""Round trips of boundary frames over TCP and a line that is long, slow or bad, as the kernel is set up.

    python -P -m dgr_bench.links.line --delay 20 --loss 0.1 --rate 50 --sysctl net.ipv4.tcp_congestion_control=bbr

Two network namespaces, each with a TUN device, and between them this process, which passes IP packets on: each after a delay,
some not at all, no more than a rate. So what is measured is the kernel's TCP with the settings that ``--sysctl`` names, as
between two hosts. It prints the median of the milliseconds of a round trip, with quartiles. Linux, root and ``ip`` are needed.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import select
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence

import trio
from attrs import define, field

from dgr.cli.children import python_module
from dgr_bench.links.echo import link_round, open_echo_link, payload_bytes

_NEAR, _FAR, _PORT = "10.9.0.1", "10.9.0.2", 7801
_NEW_NETWORK = 0x40000000
#: ``TUNSETIFF``, and an interface of IP packets without a header of its own.
_SET_INTERFACE, _TUN = 0x400454CA, 0x0001 | 0x1000
_PACKET = 2048
#: Bytes that the line holds each way; what comes beyond is lost.
_HOLDS = 1 << 20
#: Round trips that count for nothing, and seconds for the far side to start.
_WARM_UP, _START = 5, 60.0


def _new_network() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        raise SystemExit(f"no network namespace: {os.strerror(ctypes.get_errno())}; run it as root, on Linux")


def _open_interface(address: str, settings: Sequence[str]) -> int:
    """A TUN device in the namespace that this process is in now."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH", b"line", _TUN))
    commands = [
        ["ip", "address", "add", f"{address}/24", "dev", "line"],
        ["ip", "link", "set", "line", "up", "mtu", "1500", "txqueuelen", "10000"],
        *(["sysctl", "-qw", setting] for setting in settings),
    ]
    for command in commands:
        subprocess.run(command, check=True)
    return device


@define
class _Line:
    """Packets on their way between two devices."""

    delay: float
    loss: float
    #: Bytes a second, each way.
    rate: float
    devices: tuple[int, int]
    _chance: random.Random = field(factory=lambda: random.Random(1))
    #: When it is due, a running number, where to, and the packet.
    _under_way: list[tuple[float, int, int, bytes]] = field(factory=list)
    #: By the device it goes to: when the line is free again, and bytes on their way.
    _free: dict[int, float] = field(factory=dict)
    _held: dict[int, int] = field(factory=dict)
    _count: int = 0

    def pass_on(self) -> None:
        """What is due, then what has come."""
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, _, to, packet = heapq.heappop(self._under_way)
            self._held[to] -= len(packet)
            os.write(to, packet)
        wait = min(0.05, max(0.0, self._under_way[0][0] - now)) if self._under_way else 0.05
        for device in select.select(self.devices, [], [], wait)[0]:
            to = self.devices[1] if device == self.devices[0] else self.devices[0]
            try:
                while True:
                    self._take(os.read(device, _PACKET), to)
            except BlockingIOError:
                continue

    def _take(self, packet: bytes, to: int) -> None:
        held = self._held.setdefault(to, 0)
        if self._chance.random() < self.loss or held > _HOLDS:
            return
        self._free[to] = max(self._free.get(to, 0.0), time.monotonic()) + len(packet) / self.rate
        self._held[to] = held + len(packet)
        self._count += 1
        heapq.heappush(self._under_way, (self._free[to] + self.delay, self._count, to, packet))


async def _measure(tokens: int, rounds: int, rest: float) -> None:
    """Be the side that asks; the other one may still be starting."""
    with trio.fail_after(_START):
        while True:
            try:
                stream = await trio.open_tcp_stream(_NEAR, _PORT)
                break
            except OSError:
                await trio.sleep(0.2)
    payload = bytes(payload_bytes(tokens))
    times = []
    async with open_echo_link(stream) as link:
        for _ in range(_WARM_UP + rounds):
            await trio.sleep(rest)
            times.append(1e3 * await link_round(link, tokens, payload))
    low, median, high = statistics.quantiles(times[_WARM_UP:], n=4)
    print(f"{median:.1f} ms ({low:.1f} to {high:.1f})", flush=True)


def _join(args: argparse.Namespace) -> int:
    _new_network()
    near = _open_interface(_NEAR, args.sysctl)
    echo = subprocess.Popen(python_module("dgr_bench.links.echo", f"{_NEAR}:{_PORT}"), stdout=subprocess.DEVNULL)
    try:
        _new_network()
        far = _open_interface(_FAR, args.sysctl)
        asking = [f"--{name}={getattr(args, name)}" for name in ("tokens", "rounds", "rest")]
        client = subprocess.Popen(python_module("dgr_bench.links.line", "--ask", *asking))
        line = _Line(args.delay / 1e3, args.loss / 100, args.rate * 1e6 / 8, (near, far))
        while client.poll() is None:
            line.pass_on()
        return client.returncode
    finally:
        echo.kill()
        echo.wait()


def main(argv: Sequence[str]) -> int:
    """Join both sides and print the result; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -P -m dgr_bench.links.line", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--delay", type=float, default=20.0, metavar="MS", help="one way (default: 20)")
    parser.add_argument(
        "--loss", type=float, default=0.0, metavar="PERCENT", help="of the packets, each way (default: 0)"
    )
    parser.add_argument("--rate", type=float, default=50.0, metavar="MBIT", help="megabits a second (default: 50)")
    parser.add_argument("--tokens", type=int, default=1, metavar="N", help="of a frame (default: 1, a decode step)")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="round trips (default: 20)")
    parser.add_argument("--rest", type=float, default=0.0, metavar="SECONDS", help="idleness before each (default: 0)")
    parser.add_argument("--sysctl", action="append", default=[], metavar="NAME=VALUE", help="in both namespaces")
    parser.add_argument("--ask", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.ask:
        trio.run(_measure, args.tokens, args.rounds, args.rest)
        return 0
    return _join(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
