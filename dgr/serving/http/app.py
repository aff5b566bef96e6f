"""The server's routes."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dgr.core.load import StageLoad
from dgr.serving.api.errors import ApiError, ErrorShape
from dgr.serving.api.openapi import openapi_json
from dgr.serving.http.completions import ChatCompletions, Completions
from dgr.serving.http.keys import ApiKeys, App, Gate
from dgr.serving.http.messages import CountTokens, Messages
from dgr.serving.http.page import PAGE_HEADERS, page
from dgr.serving.http.responses import Responses
from dgr.serving.http.service import Service

__all__ = ["make_app"]

#: Asked by load balancers, which have no key; they tell nothing but that.
_OPEN = frozenset({"/", "/health", "/ready"})


def make_app(
    service: Service, keys: ApiKeys | None = None, *, open_metrics: bool = False, local_only: bool = False
) -> App:
    """The ASGI application. ``keys``: None answers anyone; with ``local_only`` no page of another site among them."""
    engine, options = service.engine, service.options
    pipeline, description = engine.pipeline, openapi_json(options.model)

    async def health(_: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(_: Request) -> Response:
        told = {"status": "ready" if engine.is_ready else "not ready", "route": pipeline.state.value}
        if (why := pipeline.refuses_sessions) is not None:
            told["reason"] = why
        return _json(told, 200 if engine.is_ready else 503)

    async def status(_: Request) -> Response:
        load = {
            "slots": engine.line.slots,
            "running": engine.line.running,
            "waiting": engine.line.waiting,
            "waiting_tokens": engine.line.waiting_tokens,
            "in_flight": pipeline.statistics().in_flight,
            "tokens": engine.counters.completion_tokens,
        }
        loads = await service.loads()
        stages = [
            {
                "address": one.address,
                "layers": str(one.layers),
                "devices": one.devices,
                "lost": one.lost,
                "load": None if (told_by := loads.get(one.address)) is None else _load(told_by),
            }
            for one in pipeline.stages
        ]
        told = {"route": pipeline.state.value, "epoch": pipeline.epoch, "ready": engine.is_ready}
        return _json({**told, "load": load, "stages": stages})

    async def models(_: Request) -> Response:
        return _json({"object": "list", "data": [about()]})

    async def model(request: Request) -> Response:
        if request.path_params["name"] != options.model:
            message = f"this server has {options.model!r} alone"
            return _error(request, ApiError(404, message, param="model", code="model_not_found"))
        return _json(about())

    def about() -> dict[str, Any]:
        return {
            "id": options.model,
            "object": "model",
            "created": service.created,
            "owned_by": "dgr",
            "context_length": service.n_ctx,
            "max_model_len": service.n_ctx,
            "thinking": {"default": options.thinking.value, "ladder": options.ladder.value},
            "numerics": pipeline.context.numerics.value,
            "artifact": pipeline.descriptions[0].artifact,
        }

    async def metrics(_: Request) -> Response:
        return Response(
            service.metrics.text(await service.seen_stages()), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def described(_: Request) -> Response:
        return Response(description, media_type="application/json")

    async def index(_: Request) -> Response:
        return Response(page(service), media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", ChatCompletions(service), methods=["POST"]),
            Route("/v1/completions", Completions(service), methods=["POST"]),
            Route("/v1/responses", Responses(service), methods=["POST"]),
            Route("/v1/messages", Messages(service), methods=["POST"]),
            Route("/v1/messages/count_tokens", CountTokens(service), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/ready", ready),
            Route("/status", status),
            Route("/metrics", metrics),
            Route("/openapi.json", described),
            Route("/", index),
        ],
        exception_handlers={404: _not_found, 405: _not_allowed, 500: _failed},
    )
    return Gate(app, keys, _OPEN | ({"/metrics"} if open_metrics else frozenset()), local_only=local_only)


def _load(load: StageLoad) -> dict[str, Any]:
    """What the page and other programs show of a stage. Counters grow; ``seconds`` is the time that they are of."""
    return {
        "seconds": load.seconds,
        "ready": load.ready,
        "computed_seconds": load.computed,
        "waited_seconds": load.decode.waits.total + load.prefill.waits.total,
        "running_seconds": load.running_seconds,
        "sessions": load.sessions,
        "slots": load.slots,
        "slots_leased": load.slots_leased,
        "decode_batches": load.decode.tokens.count,
        "decode_tokens": int(load.decode.tokens.total),
        "prefill_tokens": int(load.prefill.tokens.total),
        "bytes_sent": sum(link.bytes_sent for link in load.links),
        "bytes_received": sum(link.bytes_received for link in load.links),
        "weights_bytes": load.weights,
        "state_bytes": sum(load.state.values()),
        "state_leased_bytes": sum(load.state_leased.values()),
        "resident_bytes": load.resident,
    }


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _error(request: Request, error: ApiError) -> Response:
    return Response(error.body(ErrorShape.of(request.scope["path"])), error.status, headers=error.headers)


async def _not_found(request: Request, _: Exception) -> Response:
    return _error(request, ApiError(404, f"there is nothing at {request.scope['path']}", code="not_found"))


async def _not_allowed(request: Request, error: Exception) -> Response:
    message = f"{request.scope['path']} does not take {request.method}"
    response = _error(request, ApiError(405, message, code="method_not_allowed"))
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    """A fault of our own; the server's log has the rest."""
    message = f"the server failed on this request ({type(error).__name__}); its log says more"
    return _error(request, ApiError(500, message, kind="server_error", code="internal_error"))
