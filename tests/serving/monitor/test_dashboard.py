"""The dashboard, the scrape example and the page of metrics, against what a running server and stage expose."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from cluster.remote_stages import PROMPT, TWO, Authority, answer_of, open_hosts
from serving.http.http_servers import Server
from serving.monitor.scrapes import Scrape, scrape, watched

from dgr.cluster.connect import LinkPolicy
from dgr.serving.monitor.stage import StageMonitor
from dgr.testing.waits import until
from dgr.wire.tcp import parse_address

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "deploy/grafana/dgr.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/operations.md").read_text(encoding="utf-8")

#: Every series has these from Prometheus itself.
OF_PROMETHEUS = {"instance", "job"}
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring) \(([^)]*)\)")
_SELECTED = re.compile(r"\b([a-zA-Z_:][\w:]*)\b(?!\s*\()(?:\{([^}]*)\})?")


def expressions(board: dict[str, Any]) -> Iterator[str]:
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in board["templating"]["list"]:
        if (asked := re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])) is not None:
            yield f"sum by ({asked[2]}) ({asked[1]})"


def wrong(expression: str, exposed: dict[str, set[str]]) -> list[str]:
    """What an expression names that is not there. ``exposed``: sample name -> labels."""
    grouped = {label for found in _GROUPING.findall(expression) for label in found.split(", ")}
    rest = re.sub(r"\[[^\]]*\]", "", _GROUPING.sub("", expression))
    named = {name: re.findall(r"(\w+)\s*[=!]", matchers) for name, matchers in _SELECTED.findall(rest)}
    problems = [f"no metric {name}" for name in named if name not in exposed]
    for name, labels in named.items():
        missing = ({*labels} | grouped) - exposed.get(name, set()) - OF_PROMETHEUS
        problems += [f"{name} has no label {label}" for label in sorted(missing)]
    return problems if named else [f"no metric in {expression}"]


def labels_of(seen: Scrape) -> dict[str, set[str]]:
    return {name: {label for key in series for label, _ in key} for name, series in seen.samples.items()}


async def of_server(serve: Callable[..., AbstractAsyncContextManager[Server]]) -> Scrape:
    async with serve() as server:
        assert (await server.chat("hello")).status == 200
        return Scrape.of((await server.ask("GET", "/metrics")).body.decode())


def of_certificates(folder: Path) -> Scrape:
    """What a program with certificates has beside the rest."""
    text = StageMonitor((Authority(folder / "ca").credentials("127.0.0.1"),)).text().decode()
    first = text.index("# HELP dgr_certificate")
    return Scrape.of(text[first : text.index("# HELP process_")])


async def of_stage() -> Scrape:
    async with open_hosts(LinkPolicy(heartbeat=0.05)) as hosts:
        head, tail = await hosts.start_all(TWO)
        async with watched(head) as (_, address), hosts.pipeline([head, tail]) as pipeline:
            await answer_of(pipeline, PROMPT, 4)
            await until(lambda: any(one.round_trip for one in head.server.statistics().traffic.values()))
            return await scrape(address)


async def test_every_expression_names_what_is_exposed(serve: Callable[..., Any]) -> None:
    exposed = {**labels_of(await of_server(serve)), **labels_of(await of_stage())}
    found = list(expressions(DASHBOARD))
    assert len(found) > 40
    assert {expression: problems for expression in found if (problems := wrong(expression, exposed))} == {}


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum(rate(a_total[5m]))", []),
        ("histogram_quantile(0.9, sum by (le, kind) (rate(b_bucket{kind=\"x\"}[5m])))", []),
        ("sum by (instance) (a_total)", []),
        ("sum(a_totals)", ["no metric a_totals"]),
        ("sum by (colour) (a_total) / sum(b_bucket)", ["a_total has no label colour", "b_bucket has no label colour"]),
        ('a_total{colour!~"red"}', ["a_total has no label colour"]),
        ("sum(1)", ["no metric in sum(1)"]),
    ],
)  # fmt: skip
def test_an_expression_that_names_nothing_would_be_seen(expression: str, problem: list[str]) -> None:
    assert wrong(expression, {"a_total": set(), "b_bucket": {"le", "kind"}}) == problem


def test_the_panels_do_not_lie_upon_each_other() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def table(section: str) -> dict[str, tuple[str, set[str], str]]:
    """Metric -> its type, its labels and what it is, as a section of the page tells."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(dgr_\w+)(?:\{([\w,]*)\})?` \| (\w+) \| (.+) \|$", text, re.MULTILINE)
    return {name: (kind, set(labels.split(",")) - {""}, what) for name, labels, kind, what in rows}


async def test_the_page_tells_of_every_metric_and_of_no_other(serve: Callable[..., Any], tmp_path: Path) -> None:
    for section, seen in (
        ("Metrics of a server", await of_server(serve)),
        ("Metrics of a stage", await of_stage()),
        ("Certificates", of_certificates(tmp_path)),
    ):
        labels, exposed = labels_of(seen), {}
        for family, kind in seen.types.items():
            if family.startswith("dgr_") and not family.endswith("_created"):
                name = f"{family}_total" if kind == "counter" else family
                own = labels[f"{family}_count" if kind == "histogram" else name]
                exposed[name] = kind, own, seen.helps[family]
        assert table(section) == exposed, section
        assert all(what for _, _, what in exposed.values())


def test_the_scrape_example_is_of_addresses() -> None:
    text = (ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8")
    targets = [target for found in re.findall(r"targets: (\[.*\])", text) for target in json.loads(found)]
    assert len(targets) == 4
    assert all(parse_address(target)[1] for target in targets)
