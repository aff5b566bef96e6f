"""llama-benchy against a server: what it needs without a network, and whether its report and the server's counters agree."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from attrs import frozen

from dgr.selftest.fixture.vocabulary import FixtureVocabulary

_ROW = re.compile(r"(?P<what>pp|tg)(?P<size>\d+) \(c(?P<clients>\d+)\)")


@frozen
class Load:
    """What is asked for."""

    prompt: int
    answer: int
    clients: tuple[int, ...]
    runs: int

    @property
    def requests(self) -> int:
        return sum(self.clients) * self.runs


def write_tokenizer(vocabulary: FixtureVocabulary, folder: Path) -> Path:
    """A tokenizer folder as transformers reads it: byte-level BPE with the fixture's merges."""
    folder.mkdir()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    model = {"type": "BPE", "vocab": vocab, "merges": [merge.split(" ") for merge in vocabulary.merges]}
    told = {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(told), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    return folder


@contextmanager
def book(vocabulary: FixtureVocabulary) -> Iterator[str]:
    """The URL of a text on loopback; of whole words, so that the client counts tokens as the server does."""
    words, pick = [vocabulary.tokens[word][1:] for word in sorted(vocabulary.words)], random.Random(1)
    text = " ".join(pick.choice(words) for _ in range(4000)).encode()

    class Book(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Book) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/book.txt"
        finally:
            server.shutdown()
            thread.join()


def rates_of(output: str) -> dict[tuple[str, int, int], float]:
    """Tokens a second of every row of the table it prints, by ``pp`` or ``tg``, tokens and clients."""
    rates = {}
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 4 and (row := _ROW.fullmatch(cells[2])):
            rates[row["what"], int(row["size"]), int(row["clients"])] = float(cells[3].split()[0])
    return rates


def disagreements(load: Load, output: str, progress: str, metrics: str) -> list[str]:
    """What of a report is missing, is no speed, or is not what the server counted."""
    rates = rates_of(output)
    events = [json.loads(line) for line in progress.splitlines()]
    ends = [event for event in events if event["type"] == "request_end"]
    wanted = [(what, size, n) for n in load.clients for what, size in (("pp", load.prompt), ("tg", load.answer))]
    found = [f"no row for {row}" for row in wanted if row not in rates]
    found += [f"{row}: {rates[row]} tokens/s" for row in wanted if row in rates and not rates[row] > 0]
    found += [f"a request failed: {end['error']}" for end in ends if end["error"]]
    counted = dict(re.findall(r"^(\S+) ([\d.e+-]+)$", metrics, re.MULTILINE))
    for name, told in (
        ('dgr_requests_total{endpoint="chat",status="200"}', load.requests),
        ("dgr_tokens_predicted_total", load.requests * load.answer),
        ("dgr_tokens_predicted_total", sum(end["total_tokens"] for end in ends)),
        ("dgr_prompt_tokens_total", sum(end["prompt_tokens"] for end in ends)),
        ("dgr_e2e_request_latency_seconds_count", len(ends)),
    ):
        if float(counted.get(name, "nan")) != told:
            found.append(f"{name} is {counted.get(name)}, the client says {told}")
    return found
