"""dgr: the distributed GGUF runtime. DeepSeek V4 Flash as a pipeline of layer-range stages, on trio."""

# General layout. Each package is one floor; a module imports from its own package and from the floors below.
#
#   cli               how people come in: one module per command group
#   serving           ways in for programs: asyncio, many requests over one pipeline, HTTP in front of that (an extra)
#   cluster           stages and pipelines put together: in one process, or over hosts by a route file
#   selftest          tests of this machine, and the small models they run on
#   client | stage    the two programs: a pipeline with its sessions; a shard with its scheduler and engine thread
#   protocol          what both agree on above bytes; every state table is in protocol/states
#   wire | engine     bytes on a link; the ShardEngine seam and llama.cpp behind it, the only code that touches a pointer
#   artifact          models on disk: parts, slices, manifests, plans
#   v4                facts about DeepSeek V4: pure values
#   gguf              the container format
#   core              routes, prefixes, shared values, files, this host
#   errors, text      one tree of errors; text as people may see it
#
# `dgr.testing` stands beside the house: a fake engine, a bad network, the engine contract suite, the MTP contract.

from __future__ import annotations

import importlib
import importlib.metadata
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
    from dgr.engine.devices import Placement
    from dgr.engine.llama import LlamaEngine
    from dgr.engine.vocab import LlamaVocabulary
    from dgr.errors import DgrError

    #: The version of the installed package.
    __version__: str

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
    "Placement",
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
    if name == "__version__":
        return importlib.metadata.version("dgr")
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
    "Placement": "dgr.engine.devices",
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
