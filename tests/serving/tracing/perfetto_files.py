"""What a file of JSON trace events must be for Perfetto and Chrome to show it as it is meant."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

__all__ = ["faults", "processes", "slices"]

#: Fields of every kind of event that dgr writes (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
_FIELDS = {
    "X": {"pid", "tid", "name", "cat", "ts", "dur", "args"},
    "M": {"pid", "tid", "name", "args"},
    "s": {"pid", "tid", "name", "cat", "id", "ts"},
    "t": {"pid", "tid", "name", "cat", "id", "ts"},
    "f": {"pid", "tid", "name", "cat", "id", "ts", "bp"},
}
_META = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def slices(file: dict[str, Any], pid: int | None = None) -> list[dict[str, Any]]:
    return [one for one in file["traceEvents"] if one["ph"] == "X" and pid in (None, one["pid"])]


def processes(file: dict[str, Any]) -> dict[str, int]:
    """Name -> number."""
    return {one["args"]["name"]: one["pid"] for one in file["traceEvents"] if one["name"] == "process_name"}


def faults(file: dict[str, Any]) -> list[str]:
    """What would not be shown, or as something else."""
    return [*_of_events(file), *_of_names(file), *_of_tracks(file), *_of_arrows(file)]


def _of_events(file: dict[str, Any]) -> Iterator[str]:
    if file.get("displayTimeUnit") not in ("ms", "ns"):
        yield "no unit"
    for event in file["traceEvents"]:
        kind = event.get("ph")
        if kind not in _FIELDS or set(event) != _FIELDS[kind] | {"ph"}:
            yield f"not an event: {event}"
        elif not all(math.isfinite(event.get(field, 0)) and event.get(field, 0) >= 0 for field in ("ts", "dur")):
            yield f"no time: {event}"
        elif kind == "M" and event["name"] not in _META:
            yield f"no metadata: {event}"


def _of_names(file: dict[str, Any]) -> Iterator[str]:
    events = file["traceEvents"]
    named = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    rows = set(processes(file).values())
    for event in events:
        if event["pid"] not in rows:
            yield f"process {event['pid']} has no name"
        if event["ph"] != "M" and (event["pid"], event["tid"]) not in named:
            yield f"track {event['tid']} of process {event['pid']} has no name"


def _of_tracks(file: dict[str, Any]) -> Iterator[str]:
    """Slices of a track follow each other."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in slices(file):
        tracks.setdefault((one["pid"], one["tid"]), []).append((one["ts"], one["ts"] + one["dur"]))
    for track, times in tracks.items():
        for (_, end), (start, _) in itertools.pairwise(sorted(times)):
            if start < end - 1e-3:  # a thousandth of a microsecond is the files' own unit
                yield f"slices of {track} overlap at {start}"


def _of_arrows(file: dict[str, Any]) -> Iterator[str]:
    """An arrow begins once, ends once, goes forward in time, and each of its ends is where a slice begins."""
    begins = {(one["pid"], one["tid"], one["ts"]) for one in slices(file)}
    arrows: dict[int, list[dict[str, Any]]] = {}
    for event in file["traceEvents"]:
        if event["ph"] in "stf":
            arrows.setdefault(event["id"], []).append(event)
    for number, ends in arrows.items():
        kinds = "".join(one["ph"] for one in ends)
        if kinds != "s" + "t" * (len(ends) - 2) + "f":
            yield f"arrow {number} is {kinds}"
        if any(after["ts"] < before["ts"] for before, after in itertools.pairwise(ends)):
            yield f"arrow {number} goes back in time"
        if any((one["pid"], one["tid"], one["ts"]) not in begins for one in ends):
            yield f"arrow {number} is bound to nothing"
