"""The test kit: an engine suite, a made-up model behind the real seam, a bad network, stage processes, small V4 models.

What is listed here is public (``docs/testing.md``); it needs nothing but what dgr itself needs.
"""

from dgr.selftest.chain import Chain, cut_at, pieces, some_tokens
from dgr.selftest.fixture import PRESETS, WEIGHTS, FixtureSummary, cached_fixture, edit_gguf, write_fixture
from dgr.selftest.invariance import run_suite
from dgr.selftest.learned.cached import cached_learned
from dgr.selftest.learned.model import write_learned
from dgr.selftest.learned.recall import make_recital
from dgr.selftest.llama_chain import open_chain
from dgr.testing.engines.case import ContractReport
from dgr.testing.engines.contract import EngineContract
from dgr.testing.engines.fake import FakeEngine, FakeModel, FakeVocabulary, Fault, FaultKind
from dgr.testing.engines.mutants import BadResidual, Mutant, OffByOne, StaleChunk, StaleRow, SwappedSideband
from dgr.testing.network.processes import Program, ProgramEnded, free_ports, is_gone, open_program, open_up, write_route
from dgr.testing.network.proxy import FaultyProxy, open_proxies, open_proxy
from dgr.testing.network.relay import Flow, Relay, open_relay
from dgr.testing.offline import Offline, open_fake_pipeline
from dgr.testing.pause import is_paused, pause
from dgr.testing.raw_client import open_raw_client
from dgr.testing.waits import until

__all__ = [
    "PRESETS",
    "WEIGHTS",
    "BadResidual",
    "Chain",
    "ContractReport",
    "EngineContract",
    "FakeEngine",
    "FakeModel",
    "FakeVocabulary",
    "Fault",
    "FaultKind",
    "FaultyProxy",
    "FixtureSummary",
    "Flow",
    "Mutant",
    "OffByOne",
    "Offline",
    "Program",
    "ProgramEnded",
    "Relay",
    "StaleChunk",
    "StaleRow",
    "SwappedSideband",
    "cached_fixture",
    "cached_learned",
    "cut_at",
    "edit_gguf",
    "free_ports",
    "is_gone",
    "is_paused",
    "make_recital",
    "open_chain",
    "open_fake_pipeline",
    "open_program",
    "open_proxies",
    "open_proxy",
    "open_raw_client",
    "open_relay",
    "open_up",
    "pause",
    "pieces",
    "run_suite",
    "some_tokens",
    "until",
    "write_fixture",
    "write_learned",
    "write_route",
]
