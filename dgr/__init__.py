"""dgr: the distributed GGUF runtime. DeepSeek V4 Flash as a pipeline of layer-range stages, on trio."""

# General layout. Each package is one floor; a module imports from its own package and from the floors below.
#
#   cli       how people come in: one module per command group
#   serving   optional ways in for programs: asyncio today
#   selftest  tests of this machine, and the small models they run on
#   runtime   trio actors: shard, session, supervisor, ledger, pipeline; every state table is in protocol/states
#   wire      bytes on a link: the closed message union, the sans-I/O framer, links
#   engine    the ShardEngine seam, and llama.cpp behind it; the only code that touches a pointer
#   model     facts about the model and about routes: pure values
#   errors    one tree
#
# `dgr.testing` stands beside the house: a fake engine, a bad network, the engine contract suite, the MTP contract.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dgr.artifact.artifact import Artifact
    from dgr.client.generation import GeneratedToken, Generation
    from dgr.client.pipeline import Pipeline, Timeouts, open_pipeline_on
    from dgr.client.session import ClientSession
    from dgr.cluster.connect import LinkPolicy, open_route
    from dgr.cluster.local import LocalCluster, ShardPolicy, open_cluster, open_pipeline
    from dgr.core.route import LayerRange, Route, StageRef
    from dgr.core.values import ContextParams, Numerics, SamplingParams
    from dgr.engine.base import ShardEngine
    from dgr.engine.llama import LlamaEngine
    from dgr.engine.vocab import LlamaVocabulary
    from dgr.errors import DgrError

__all__ = [
    "Artifact",
    "ClientSession",
    "ContextParams",
    "DgrError",
    "GeneratedToken",
    "Generation",
    "LayerRange",
    "LinkPolicy",
    "LlamaEngine",
    "LlamaVocabulary",
    "LocalCluster",
    "Numerics",
    "Pipeline",
    "Route",
    "SamplingParams",
    "ShardEngine",
    "ShardPolicy",
    "StageRef",
    "Timeouts",
    "open_cluster",
    "open_pipeline",
    "open_pipeline_on",
    "open_route",
]


def __getattr__(name: str) -> object:
    """Import what is asked for when it is asked for: a command that only shows its help needs none of it."""
    module = _HOMES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


#: Public name -> the module that has it.
_HOMES = {
    "Artifact": "dgr.artifact.artifact",
    "ClientSession": "dgr.client.session",
    "ContextParams": "dgr.core.values",
    "DgrError": "dgr.errors",
    "GeneratedToken": "dgr.client.generation",
    "Generation": "dgr.client.generation",
    "LayerRange": "dgr.core.route",
    "LinkPolicy": "dgr.cluster.connect",
    "LlamaEngine": "dgr.engine.llama",
    "LlamaVocabulary": "dgr.engine.vocab",
    "LocalCluster": "dgr.cluster.local",
    "Numerics": "dgr.core.values",
    "Pipeline": "dgr.client.pipeline",
    "Route": "dgr.core.route",
    "SamplingParams": "dgr.core.values",
    "ShardEngine": "dgr.engine.base",
    "ShardPolicy": "dgr.cluster.local",
    "StageRef": "dgr.core.route",
    "Timeouts": "dgr.client.pipeline",
    "open_cluster": "dgr.cluster.local",
    "open_pipeline": "dgr.cluster.local",
    "open_pipeline_on": "dgr.client.pipeline",
    "open_route": "dgr.cluster.connect",
}
