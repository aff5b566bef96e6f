"""Every public call that waits, found by looking at what is public: a new one is in the list by itself."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import FunctionType

__all__ = ["MODULES", "waiting_calls"]

#: Where what is public is named: each in its ``__all__``.
MODULES = ("dgr", "dgr.client.tracing", "dgr.serving.engine", "dgr.serving.embed")
#: What a call returns that is waited for, by the first name of its annotation.
_AWAITED = {"AbstractAsyncContextManager", "AsyncIterator", "Awaitable", "Generation", "EmbeddedGeneration"}
#: Of an object that is iterated over or entered.
_DUNDERS = {"__anext__", "__aenter__"}


def waiting_calls(*modules: str) -> set[str]:
    """Public functions and methods whose caller may be cancelled in them: ``name`` or ``Class.name``, with their module."""
    return {call for module in modules or MODULES for call in _of(module)}


def _of(module: str) -> Iterator[str]:
    public = importlib.import_module(module)
    for name in public.__all__:
        thing = getattr(public, name)
        if inspect.isclass(thing):
            yield from (f"{module}.{name}.{method}" for method in _methods(thing))
        elif isinstance(thing, FunctionType) and _waits(thing):
            yield f"{module}.{name}"


def _methods(kind: type) -> Iterator[str]:
    if getattr(kind, "_is_protocol", False):  # an interface has no code
        return
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if (not name.startswith("_") or name in _DUNDERS) and _waits(method):
            yield name


def _waits(function: FunctionType) -> bool:
    inner = inspect.unwrap(function)
    if inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner):
        return True
    returned = str(inspect.signature(inner).return_annotation)
    return returned.partition("[")[0].rpartition(".")[2] in _AWAITED
