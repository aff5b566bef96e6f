"""What a hop costs: a boundary frame through a dgr link, against a bare echo of the same bytes on the same transport.

    python -m bench.hops [--transport memory tcp tls] [--seconds 3] [--json FILE]

Two shapes: one token's boundary of V4 Flash (65 536 bytes: a decode step) and 512 tokens' (32 MiB: a prefill chunk). For each
the two ways alternate round by round, so that drift of the machine hits both alike. Over TCP and TLS the echo is a process of
its own. Figures are round trips there and back, so a hop is half of one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from dgr import DgrError
from dgr.cli.keys import make_keys
from dgr.wire import Limits, Link, frames, memory_transports, open_link
from dgr.wire.tcp import Credentials, accept_tls, dial, listen

WIDTH = 4 * 4096
N_VOCAB = 129_280
SHAPES = {"decode, 1 token": 1, "prefill, 512 tokens": 512}
LIMITS = Limits(n_batch=512, boundary_width=WIDTH, n_vocab=N_VOCAB)
KEY = frames.Key(bytes(16), 1, 1)


def boundary(n_tokens: int, seq: int) -> frames.Boundary:
    """A frame as a stage sends it."""
    expect = frames.Expectation(1000, bytes(16))
    return frames.Boundary(KEY, seq, expect, tuple(range(n_tokens)), 0, None, payload=4 * n_tokens * WIDTH)


# --- the far side ----------------------------------------------------------------------------------------------------


async def echo(transport: trio.abc.Stream) -> None:
    """Send back what comes: first byte ``b`` for bare bytes, ``l`` for a link."""
    way = await transport.receive_some(1)
    if way == b"l":
        async with open_link(transport, LIMITS) as link:
            async for received in link:
                await link.send(received.frame, received.payload)
                link.grant(0 if received.payload is None else received.payload.nbytes)
    else:
        while data := await transport.receive_some(65536):
            await transport.send_all(data)


async def serve(credentials: Credentials | None) -> None:
    """Be the far side in a process of its own; print the port."""
    listeners, tls = await listen("127.0.0.1:0", credentials=credentials)
    print(listeners[0].socket.getsockname()[1], flush=True)

    async def take(stream: trio.SocketStream) -> None:
        try:
            await echo(await accept_tls(stream, tls, 10))
        except (trio.BrokenResourceError, DgrError):
            return  # the near side is done and does not say goodbye

    await trio.serve_listeners(take, listeners)


# --- the near side ---------------------------------------------------------------------------------------------------


async def bare_round(transport: trio.abc.Stream, payload: bytes) -> float:
    """One round trip of the payload's bytes, sent and read at the same time, as a link does."""
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(transport.send_all, payload)
        left = len(payload)
        while left:
            left -= len(await transport.receive_some(65536))
    return trio.current_time() - began


async def link_round(link: Link, n_tokens: int, seq: int, payload: bytes) -> float:
    """One round trip of a boundary frame."""
    began = trio.current_time()
    await link.send(boundary(n_tokens, seq), payload)
    async for received in link:
        if received.payload is not None and received.payload.nbytes == len(payload):
            return trio.current_time() - began
    raise RuntimeError("the echo went away")


async def compare(connect: Callable[[], Any], n_tokens: int, seconds: float) -> dict[str, float | int]:
    """Alternate both ways for ``seconds``; medians, and the ratio of each pair."""
    payload = bytes(4 * n_tokens * WIDTH)
    bare_times: list[float] = []
    link_times: list[float] = []
    async with connect() as bare, connect() as linked:
        await bare.send_all(b"b")
        await linked.send_all(b"l")
        async with open_link(linked, LIMITS, credit=2 * len(payload)) as link:
            for _ in range(3):  # warm up
                await bare_round(bare, payload)
                await link_round(link, n_tokens, 1, payload)
            ends = trio.current_time() + seconds
            while trio.current_time() < ends or len(bare_times) < 5:
                bare_times.append(await bare_round(bare, payload))
                link_times.append(await link_round(link, n_tokens, 1, payload))
    ratios = [ours / theirs for ours, theirs in zip(link_times, bare_times, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    bare_median, link_median = statistics.median(bare_times), statistics.median(link_times)
    return {
        "bytes": len(payload),
        "rounds": len(ratios),
        "bare_ms": 1e3 * bare_median,
        "link_ms": 1e3 * link_median,
        "extra_ms_per_hop": 1e3 * (link_median - bare_median) / 2,
        "ratio": statistics.median(ratios),
        "ratio_q1": quartiles[0],
        "ratio_q3": quartiles[2],
        "link_mib_per_s": 2 * len(payload) / 2**20 / link_median,
    }


@asynccontextmanager
async def far_process(keys: Path | None) -> AsyncIterator[int]:
    """The echo as a child process; gives its port."""
    command = [sys.executable, "-m", "bench.hops", "--serve", *([] if keys is None else [str(keys)])]
    process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield int(await process.stdout.receive_some(64))
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stdout.aclose()


async def measure(transport: str, seconds: float) -> dict[str, dict[str, float | int]]:
    """All shapes over one transport."""
    if transport == "memory":

        @asynccontextmanager
        async def connect() -> AsyncIterator[trio.abc.Stream]:
            near, far = memory_transports()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(echo, far)
                yield near
                nursery.cancel_scope.cancel()

        return {name: await compare(connect, n_tokens, seconds) for name, n_tokens in SHAPES.items()}
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) if transport == "tls" else None
        if keys is not None:
            make_keys(keys, ["127.0.0.1"], 1)
        credentials = None if keys is None else credentials_in(keys)
        async with far_process(keys) as port:

            @asynccontextmanager
            async def connect() -> AsyncIterator[trio.abc.Stream]:
                stream = await dial(f"127.0.0.1:{port}", credentials=credentials)
                try:
                    yield stream
                finally:
                    await trio.aclose_forcefully(stream)

            return {name: await compare(connect, n_tokens, seconds) for name, n_tokens in SHAPES.items()}


def credentials_in(folder: Path) -> Credentials:
    return Credentials(folder / "ca.pem", folder / "127.0.0.1.pem", folder / "127.0.0.1.key")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", nargs="+", choices=["memory", "tcp", "tls"], default=["memory", "tcp", "tls"])
    parser.add_argument("--seconds", type=float, default=3.0, help="for each shape and transport (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--serve", nargs="*", metavar="KEYS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        trio.run(serve, credentials_in(Path(args.serve[0])) if args.serve else None)
        return
    results = {}
    heading = f"{'transport':<10} {'frame':<22} {'bare ms':>9} {'link ms':>9} {'ratio':>7} {'quartiles':>13}"
    print(f"{heading} {'extra ms/hop':>13} {'MiB/s':>8}")
    for transport in args.transport:
        results[transport] = trio.run(measure, transport, args.seconds)
        for name, row in results[transport].items():
            print(
                f"{transport:<10} {name:<22} {row['bare_ms']:9.3f} {row['link_ms']:9.3f} {row['ratio']:7.3f}"
                f" {row['ratio_q1']:6.3f}-{row['ratio_q3']:.3f} {row['extra_ms_per_hop']:13.3f} {row['link_mib_per_s']:8.0f}"
            )
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
