"""Two bare engines in two processes, the residual over a socket pair, no runtime: what two processes cost at least.

python two_bare_processes.py

The whole model in this process draws tokens in turns with them. Medians, milliseconds a token; one thread an engine.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import time

from dgr import ContextParams, LayerRange, LlamaEngine, Numerics, SamplingParams
from dgr.core.values import LogitsWanted
from dgr.engine.base import Work
from dgr.selftest.fixture import cached_fixture

MODEL = cached_fixture("mixed", preset="big")
CONTEXT = ContextParams(n_ctx=512, numerics=Numerics.NATIVE)
CUT, ROUNDS, TOKENS, WARM = 21, 6, 40, 4


def receive(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        data += link.recv(size - len(data))
    return bytes(data)


def draw(engine: LlamaEngine, work: Work) -> int:
    (output,) = engine.run([work])
    assert output.logits is not None
    return engine.sample(output.logits, (), SamplingParams())[0]


def serve_tail(link: socket.socket) -> None:
    engine = LlamaEngine(MODEL, LayerRange(CUT, 43), CONTEXT)
    width = 4 * engine.describe().width_in
    link.sendall(b"r")
    position = 0
    while (token := struct.unpack("<i", receive(link, 4))[0]) >= 0:
        work = Work(0, position, (token,), residual=receive(link, width), logits=LogitsWanted.LAST)
        link.sendall(struct.pack("<i", draw(engine, work)))
        position += 1


def main() -> None:
    link, other = socket.socketpair()
    if os.fork() == 0:
        serve_tail(other)
        os._exit(0)
    head = LlamaEngine(MODEL, LayerRange(0, CUT), CONTEXT)
    receive(link, 1)
    whole = LlamaEngine(MODEL, None, CONTEXT)
    times: dict[str, list[float]] = {"two processes": [], "whole": []}
    tokens = dict.fromkeys(times, 5)
    for at in range(ROUNDS * TOKENS):
        turn = at % TOKENS
        began = time.perf_counter()
        (output,) = head.run([Work(0, at, (tokens["two processes"],))])
        link.sendall(struct.pack("<i", tokens["two processes"]) + bytes(output.residual or b""))
        (tokens["two processes"],) = struct.unpack("<i", receive(link, 4))
        if turn >= WARM:
            times["two processes"].append(time.perf_counter() - began)
        if turn == TOKENS - 1:
            for position in range(at + 1 - TOKENS, at + 1):
                began = time.perf_counter()
                tokens["whole"] = draw(whole, Work(0, position, (tokens["whole"],), logits=LogitsWanted.LAST))
                if position % TOKENS >= WARM:
                    times["whole"].append(time.perf_counter() - began)
    link.sendall(struct.pack("<i", -1))
    medians = {name: statistics.median(values) for name, values in times.items()}
    print({name: f"{1e3 * value:.2f} ms" for name, value in medians.items()})
    print(f"speed of two processes / whole: {medians['whole'] / medians['two processes']:.3f}")


if __name__ == "__main__":
    main()
