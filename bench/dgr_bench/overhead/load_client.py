"""Tokens a second of a server that speaks OpenAI's completions, asked by several clients at once.

    python bench/dgr_bench/overhead/load_client.py http://127.0.0.1:8000 --clients 1 4 8

Standard library alone, so that it takes little of the machine it measures and runs as a file by itself. Every client streams
``--requests`` answers of ``--tokens`` tokens, one after another, to prompts of ``--prompt`` token ids of its own. The rate is
of all tokens drawn over the time from the first question to the last answer, so prompts are in it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import threading
import time
import urllib.parse


class Client(threading.Thread):
    """Asks one question after another; ``first`` are the seconds to the first token of each answer."""

    def __init__(self, host: str, number: int, args: argparse.Namespace) -> None:
        super().__init__()
        self.first: list[float] = []
        self._host = host
        self._args = args
        self._random = random.Random(number)

    def run(self) -> None:
        args = self._args
        connection = http.client.HTTPConnection(self._host)
        for _ in range(args.requests):
            prompt = [self._random.randrange(300, args.vocabulary) for _ in range(args.prompt)]
            body = {"prompt": prompt, "max_tokens": args.tokens, "temperature": 0, "ignore_eos": True, "stream": True}
            began = time.perf_counter()
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {response.read()[:300]!r}")
            first = 0.0
            for line in response:
                if not first and line.startswith(b"data: {") and json.loads(line[6:]).get("choices"):
                    first = time.perf_counter() - began
            response.close()
            self.first.append(first)


def measure(host: str, clients: int, args: argparse.Namespace) -> dict[str, float]:
    """One row: clients, seconds from the first question to the last answer, tokens drawn, milliseconds to an answer's first."""
    running = [Client(host, number, args) for number in range(clients)]
    began = time.perf_counter()
    for client in running:
        client.start()
    for client in running:
        client.join()
    seconds = time.perf_counter() - began
    first = [each for client in running for each in client.first]
    if len(first) < clients * args.requests:
        raise SystemExit("some answers failed")
    tokens = clients * args.requests * args.tokens
    return {"clients": clients, "seconds": seconds, "tokens": tokens, "first_ms": 1000 * statistics.median(first)}


def told(row: dict[str, float]) -> str:
    """A row for people."""
    rate = row["tokens"] / row["seconds"]
    return f"{row['clients']:3} clients  {rate:7.1f} tokens/s  {row['first_ms']:7.0f} ms to the first"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=32, metavar="N", help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens of an answer")
    parser.add_argument("--vocabulary", type=int, default=4000, metavar="N", help="token ids are below this one")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each row")
    args = parser.parse_args()
    host = urllib.parse.urlsplit(args.url).netloc
    for clients in args.clients:
        row = measure(host, clients, args)
        print(json.dumps(row) if args.json else told(row), flush=True)


if __name__ == "__main__":
    main()
