"""``route.toml``: the stages of a route, where they are, and what they must agree on."""

from __future__ import annotations

import codecs
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from dgr.core.files.inputs import read_whole
from dgr.core.mtp import refuse_names
from dgr.core.route import LayerRange, Route, StageRef
from dgr.engine.devices import Placement
from dgr.errors import InputError, InvalidLayerRange, InvalidRoute
from dgr.text import utf8
from dgr.wire.samehost.addresses import socket_path
from dgr.wire.tcp import parse_address

__all__ = ["RouteFile", "format_route_file", "read_route_file"]

_CONTEXT = {
    "n_ctx": int, "n_batch": int, "n_ubatch": int, "n_seq_max": int, "type_k": str, "flash_attn": bool, "numerics": str,
    "wire": str,
}  # fmt: skip
_STAGE = {"address": str, "layers": str, "model": str, "metrics": str, "device": str, "gpu_layers": int}
#: A thousand times what a long route takes; a file of this size is something else, or a device without end.
_MOST_BYTES = 1 << 20
_TLS = ("ca", "certificate", "key")


@frozen
class RouteFile:
    """A route and what its stages agree on.

        artifact = "b5c9..."          # optional: identity of the model, from dgr inspect
        model = "model.gguf"          # optional: file for the vocabulary, and for dgr up

        [context]                     # optional: any of n_ctx, n_batch, n_ubatch, n_seq_max, type_k, flash_attn, numerics,
                                      # wire
        n_ctx = 8192

        [tls]                         # optional on loopback: credentials of this host
        ca = "keys/ca.pem"
        certificate = "keys/client.pem"
        key = "keys/client.key"

        [[stage]]                     # head first; another one of the same layers is a spare of the first
        address = "10.0.0.1:7701"     # or unix:/PATH, where all stages and clients are on one host
        layers = "0:22"
        model = "slice-0-22.gguf"     # optional, for dgr up: the file of this stage, where it is not the model above
        metrics = "10.0.0.1:9701"     # optional, for dgr up: where this stage answers /metrics, /health and /ready
        device = "CUDA0,CUDA1"        # optional, for dgr up: the devices of this stage, as --device names them
        gpu_layers = 20               # optional, for dgr up: so many of its layers lie on them

    Relative paths are relative to the file.
    """

    path: Path
    route: Route
    context: Mapping[str, Any]
    artifact: str | None = None
    model: Path | None = None
    #: ca, certificate, key.
    tls: tuple[Path, Path, Path] | None = None
    #: Files of the stages that have their own, by address.
    stage_models: Mapping[str, Path] = field(factory=dict)
    #: Addresses of the stages' metrics, by the stage's address.
    stage_metrics: Mapping[str, str] = field(factory=dict)
    #: Devices of the stages that name some, by the stage's address.
    stage_devices: Mapping[str, Placement] = field(factory=dict)
    #: Stages that own the same layers as one of the route, which was named before: they take over when that one is lost.
    spares: tuple[StageRef, ...] = ()

    @property
    def stages(self) -> tuple[StageRef, ...]:
        """All of them: those of the route, each followed by its spares."""
        return tuple(
            ref for one in self.route.stages for ref in (one, *(two for two in self.spares if two.layers == one.layers))
        )


def read_route_file(path: str | Path) -> RouteFile:
    """Read and check a route file. Raises :class:`InvalidRoute` naming the key and what it should hold."""
    path = Path(path)
    data = _parsed(path)
    _only(data, {"artifact": str, "model": str, "context": dict, "tls": dict, "stage": list}, str(path))
    stages = data.get("stage", [])
    if not stages:
        raise InvalidRoute(f"{path} names no [[stage]]; give every stage an address and layers, head first")
    refs: list[StageRef] = []
    spares: list[StageRef] = []
    stage_models: dict[str, Path] = {}
    stage_metrics: dict[str, str] = {}
    stage_devices: dict[str, Placement] = {}
    for index, stage in enumerate(stages):
        where = f"{path}: [[stage]] {index}"
        if not isinstance(stage, dict):
            raise InvalidRoute(f"{where} must be a table with address and layers")
        _only(stage, _STAGE, where)
        for key in ("address", "layers"):
            if key not in stage:
                raise InvalidRoute(f"{where} has no {key!r}")
        try:
            layers = LayerRange.parse(stage["layers"])
        except InvalidLayerRange as error:
            raise InvalidRoute(f"{where}: {error}") from error
        if any(ref.address == stage["address"] for ref in (*refs, *spares)):
            raise InvalidRoute(f"{where}: address {stage['address']!r} is named twice; a stage has one place")
        try:
            is_local = socket_path(stage["address"]) is not None
        except InputError as error:
            raise InvalidRoute(f"{where}: {error}") from error
        if refs and is_local is not refs[0].address.startswith("unix:"):
            raise InvalidRoute(
                f"{where}: {stage['address']!r} and {refs[0].address!r} in one route; unix: addresses reach stages of one host:"
                " give one to every stage, or to none"
            )
        among = spares if any(ref.layers == layers for ref in refs) else refs
        among.append(StageRef(stage["address"], layers))
        if "model" in stage:
            stage_models[stage["address"]] = path.parent / stage["model"]
        if "metrics" in stage:
            stage_metrics[stage["address"]] = _metrics_address(stage["metrics"], where)
        if "device" in stage or "gpu_layers" in stage:
            try:
                stage_devices[stage["address"]] = Placement.parse(stage.get("device"), stage.get("gpu_layers"))
            except InputError as error:
                raise InvalidRoute(f"{where}: {error}") from error
    context = data.get("context", {})
    _only(context, _CONTEXT, f"{path}: [context]")
    tls = data.get("tls")
    if tls is not None:
        _only(tls, dict.fromkeys(_TLS, str), f"{path}: [tls]")
        if missing := [key for key in _TLS if key not in tls]:
            raise InvalidRoute(f"{path}: [tls] has no {missing[0]!r}; give ca, certificate and key")
    base = path.parent
    model = data.get("model")
    return RouteFile(
        path=path,
        route=Route(tuple(refs)),
        context=context,
        artifact=data.get("artifact"),
        model=None if model is None else base / model,
        tls=None if tls is None else (base / tls["ca"], base / tls["certificate"], base / tls["key"]),
        stage_models=stage_models,
        stage_metrics=stage_metrics,
        stage_devices=stage_devices,
        spares=tuple(spares),
    )


def _metrics_address(address: str, where: str) -> str:
    try:
        _host, port = parse_address(address)
    except InputError as error:
        raise InvalidRoute(f"{where}: metrics: {error}") from error
    if port == 0:
        raise InvalidRoute(f"{where}: metrics is {address!r}; give a port that a scraper can be told of, not 0")
    return address


def _parsed(path: Path) -> dict[str, Any]:
    try:
        text = read_whole(path, _MOST_BYTES, "a route file")
    except InputError as error:
        raise InvalidRoute(str(error)) from error
    except OSError as error:
        raise InvalidRoute(f"cannot read {path}: {error.strerror or error}") from error
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InvalidRoute(f"{path} is UTF-16, TOML is UTF-8; convert it: iconv -f UTF-16 -t UTF-8")
    try:
        return tomllib.loads(text.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidRoute(f"{path} is not UTF-8, which TOML is: {error}; convert it with iconv") from error
    except (ValueError, RecursionError) as error:  # a TOMLDecodeError is a ValueError; so is a number of 5000 digits
        raise InvalidRoute(f"{path} is not TOML: {error}") from error


def format_route_file(file: RouteFile) -> str:
    """The text of a route file; what :func:`read_route_file` reads back as the same, paths relative to its folder.

    Raises :class:`InvalidRoute` for a path or name that is not UTF-8: TOML cannot hold it.
    """
    base = file.path.absolute().parent

    def relative(path: Path) -> str:
        return _quoted(os.path.relpath(path.absolute(), base))

    lines = [f"artifact = {_quoted(file.artifact)}"] if file.artifact is not None else []
    if file.model is not None:
        lines.append(f"model = {relative(file.model)}")
    if file.context:
        lines += ["", "[context]"]
        lines += [f"{key} = {_toml(value)}" for key, value in file.context.items()]
    if file.tls is not None:
        lines += ["", "[tls]"]
        lines += [f"{key} = {relative(path)}" for key, path in zip(_TLS, file.tls, strict=True)]
    for ref in file.stages:
        lines += ["", "[[stage]]", f"address = {_quoted(ref.address)}", f"layers = {_quoted(str(ref.layers))}"]
        if ref.address in file.stage_models:
            lines.append(f"model = {relative(file.stage_models[ref.address])}")
        if ref.address in file.stage_metrics:
            lines.append(f"metrics = {_quoted(file.stage_metrics[ref.address])}")
        if (placed := file.stage_devices.get(ref.address)) is not None:
            lines += [] if placed.devices is None else [f"device = {_quoted(','.join(placed.devices))}"]
            lines += [] if placed.gpu_layers is None else [f"gpu_layers = {placed.gpu_layers}"]
    return "\n".join(lines).lstrip("\n") + "\n"


def _quoted(text: str) -> str:
    if utf8(text) != text:
        raise InvalidRoute(f"a route file is UTF-8 and cannot name {text}; give the file a name that is UTF-8")
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # a JSON string is a TOML one but for DEL


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else _quoted(str(value))


def _only(table: Mapping[str, Any], allowed: Mapping[str, type], where: str) -> None:
    refuse_names(table, where)
    for key, value in table.items():
        kind = allowed.get(key)
        if kind is None:
            raise InvalidRoute(f"{where}: unknown key {key!r}; known are {', '.join(allowed)}")
        if isinstance(value, str) and "\0" in value:
            raise InvalidRoute(f"{where}: {key} is {value!r}; no name has a NUL character")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InvalidRoute(f"{where}: {key} is {value!r}, but must be a {kind.__name__}")
