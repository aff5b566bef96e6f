"""Metrics as a scraper reads them, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from attrs import frozen
from cluster.remote_stages import Host
from prometheus_client.parser import text_string_to_metric_families
from serving.http.http_servers import Stream

from dgr.serving.monitor.endpoint import open_endpoint
from dgr.serving.monitor.stage import StageMonitor
from dgr.wire.tcp import parse_address


@frozen
class Scrape:
    """What Prometheus' own parser makes of an exposition."""

    #: Sample name -> labels -> value.
    samples: dict[str, dict[frozenset[tuple[str, str]], float]]
    #: Sample name -> what its help says.
    helps: dict[str, str]
    types: dict[str, str]

    @classmethod
    def of(cls, text: str) -> Scrape:
        samples: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
        helps, types = {}, {}
        for family in text_string_to_metric_families(text):
            helps[family.name], types[family.name] = family.documentation, family.type
            for sample in family.samples:
                series = samples.setdefault(sample.name, {})
                labels = frozenset(sample.labels.items())
                assert labels not in series, f"{sample.name} has the series {dict(labels)} twice"
                series[labels] = sample.value
        return cls(samples, helps, types)

    def __call__(self, name: str, **labels: str) -> float:
        """The one sample of a name that has these labels, among others perhaps."""
        (found,) = self.all(name, **labels)
        return found

    def all(self, name: str, **labels: str) -> list[float]:
        return [value for key, value in self.samples[name].items() if labels.items() <= dict(key).items()]


async def get(address: str, path: str, host: str = "localhost") -> tuple[int, str]:
    """Status and body."""
    stream = Stream(await trio.open_tcp_stream(*parse_address(address)))
    try:
        await stream.send("GET", path, headers={"host": host})
        status, headers = await stream.head()
        return status, (await stream.rest(headers)).decode()
    finally:
        await stream.aclose()


async def scrape(address: str) -> Scrape:
    status, text = await get(address, "/metrics")
    assert status == 200, text
    return Scrape.of(text)


@asynccontextmanager
async def watched(host: Host) -> AsyncIterator[tuple[StageMonitor, str]]:
    """A stage's monitor and its address."""
    monitor = StageMonitor()
    async with open_endpoint("127.0.0.1:0", monitor) as (address,):
        monitor.opened(host.shard, host.server)
        yield monitor, address
