"""Metrics of a certificate, from its raw units: curves over context, latencies, distances, the canary."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET

from dgr import LayerRange, Numerics
from dgr.v4.state_map import expected_state, state_map
from dgr_bench.benchmark import Units
from dgr_bench.certify.checks import Raw, not_certified
from dgr_bench.certify.profiles import Profile
from dgr_bench.distance.report import distance_metrics
from dgr_bench.quartiles import line_over, median, percentile
from dgr_bench.verdicts import n_alike

#: Shorter contexts say nothing of the slope: steps differ by less than the machine's noise.
_SLOPE_FROM = 500


def rows_file(folder: Path, variant: str, length: int) -> Path:
    """Where the rows of logits of a run are kept, when distances will be asked for."""
    return folder / "rows" / f"{variant}-{length}.f32"


def metrics_of(profile: Profile, subject: Mapping[str, Any], units: Units, folder: Path) -> dict[str, Any]:
    """Everything that a report shows."""
    raw = Raw(profile, subject, units)
    return {
        "not_certified": not_certified(profile, raw.in_process),
        "canary": _canary(raw),
        "lengths": [_length(raw, length) for length in profile.lengths],
        "decode_slope": _slopes(raw),
        "memory": _memory(raw),
        "cancellation": {during: _latency(raw, during) for during in ("prefill", "decode")},
        "clean_up": None if (found := raw.clean_up()) is None else {"seconds": found.seconds},
        "distances": _distances(raw, folder) if profile.numerics is not Numerics.EXACT else [],
        **({} if profile.distance is UNSET else {"between_numerics": distance_metrics(units)}),
    }


def canary_of(profile: Profile, subject: Mapping[str, Any], units: Units) -> dict[str, dict[str, dict[str, str]]]:
    """The digests by which two certificates are compared, from the raw units."""
    return _canary(Raw(profile, subject, units))


def _canary(raw: Raw) -> dict[str, dict[str, dict[str, str]]]:
    """Length -> layers of a stage -> component -> digest of its live rows when prompt and answer are committed."""
    return {
        str(run.length): {state.layers: {part.name: part.digest for part in state.components} for state in run.at_end}
        for run in raw.of("split")
    }


def _length(raw: Raw, length: int) -> dict[str, Any]:
    """What one length took."""
    split, whole = raw.runs.get(("split", length)), raw.runs.get(("whole", length))
    again = raw.runs.get(("re-prefilled", length))
    decode = raw.profile.decode
    found: dict[str, Any] = {"length": length}
    if split is not None and not split.error:
        found["first_token_s"] = split.first_token_s
        found["token_s"] = median(split.token_s)
        found["state_in_use_bytes"] = sum(_in_use(raw, state.layers, state.components) for state in split.at_prompt)
        found["state_formula_bytes"] = sum(_formula(raw, layers, length) for layers in raw.ranges)
        found["resident_bytes"] = split.resident_bytes
        if split.decode_traffic is not None and split.decode_traffic.frames:
            found["bytes_per_decode_frame"] = split.decode_traffic.bytes / split.decode_traffic.frames
        if split.prompt_traffic is not None and split.prompt_traffic.frames:
            hops = max(1, len(raw.ranges) - 1)
            found["bytes_per_prompt_token"] = split.prompt_traffic.bytes / hops / length
    if whole is not None and not whole.error:
        found["whole_first_token_s"] = whole.first_token_s
        found["whole_token_s"] = median(whole.token_s)
    if again is not None and again.reprefill is not None:
        found["reprefill_s"] = again.reprefill.seconds
        found["reprefill_tokens"] = length + decode // 2
        found["route_change_to_next_token_s"] = again.reprefill.to_next_token_s
    return found


def _row_bytes(raw: Raw, layers: str) -> dict[str, int]:
    """Bytes of one row of every component, in all layers that hold it; a ring row is a kv and a score row."""
    owned = state_map(raw.hp, LayerRange.parse(layers), raw.shape()).owned
    return {state.component.value: state.n_bytes // state.rows for state in owned}


def _in_use(raw: Raw, layers: str, components: Sequence[Any]) -> int:
    sizes = _row_bytes(raw, layers)
    return sum(sizes[part.name] * part.rows_max for part in components)


def _formula(raw: Raw, layers: LayerRange, n_tokens: int) -> int:
    sizes = _row_bytes(raw, str(layers))
    expected = expected_state(raw.hp, layers, raw.shape(), n_tokens)
    return sum(sizes[part.component.value] * part.rows for part in expected)


def _slopes(raw: Raw) -> dict[str, float | None]:
    """Seconds per token that each thousand tokens of context add to a decode step."""
    found: dict[str, float | None] = {}
    for variant in ("split", "whole"):
        line = line_over({run.length: run.token_s for run in raw.of(variant) if run.length >= _SLOPE_FROM})
        found[f"{variant}_s_per_1000"] = None if math.isnan(line.slope_ms) else line.slope_ms / 1e3
    return found


def _memory(raw: Raw) -> list[dict[str, Any]]:
    return [
        {
            "n_ctx": one.n_ctx,
            "state_bytes": sum(sum(parts.values()) for parts in one.state.values()),
            "formula_bytes": sum(state_map(raw.hp, layers, raw.shape(one.n_ctx)).total_bytes for layers in raw.ranges),
            "weights_bytes": one.weights_bytes,
            "compute_bytes": one.compute_bytes,
            "resident_growth_bytes": one.resident_loaded - one.resident_before,
        }
        for one in raw.memory()
    ]


def _latency(raw: Raw, during: str) -> dict[str, Any]:
    found = raw.cancellations(during)
    caller, usable = [one.caller_s for one in found], [one.usable_s for one in found]
    return {
        "cases": len(found),
        "caller_p50_s": percentile(caller, 0.5),
        "caller_p99_s": percentile(caller, 0.99),
        "usable_p50_s": percentile(usable, 0.5),
        "usable_p99_s": percentile(usable, 0.99),
    }


def _distances(raw: Raw, folder: Path) -> list[dict[str, Any]]:
    """How far native numerics are apart where they promise nothing: against the same length, undisturbed."""
    found = []
    for (variant, length), run in raw.runs.items():
        reference = "whole" if variant.startswith("threads-") else "split"
        other = raw.runs.get((reference, length))
        if variant in ("whole", "split") or other is None or run.error or other.error:
            continue
        found.append(
            {
                "variant": variant,
                "length": length,
                "against": reference,
                "tokens_alike": n_alike(run.tokens, other.tokens),
                "tokens": len(run.tokens),
                "logits_max_difference": _apart(
                    rows_file(folder, variant, length), rows_file(folder, reference, length)
                ),
            }
        )
    return found


def _apart(one: Path, other: Path) -> float | None:
    """Largest difference of two files of float32; None when one is not there."""
    if not (one.exists() and other.exists()):
        return None
    ours, theirs = array("f", one.read_bytes()), array("f", other.read_bytes())
    return max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0.0)
