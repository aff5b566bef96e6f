"""What is trained: the sizes of the model, and the steps of its training."""

from __future__ import annotations

from attrs import evolve, field, frozen

from dgr.selftest.fixture.vocabulary import byte_vocabulary
from dgr.v4.hyper_parameters import V4_FLASH, HyperParameters, Yarn

__all__ = ["Phase", "Settings", "sizes"]


def sizes(n_layers: int) -> HyperParameters:
    """V4 Flash with other widths, the first ``n_layers`` of its schedule, and a token for each byte.

    Window, ratios, hash-routed layers, streams and norms are V4's own. A CSA query attends to 32 rows, so that beyond 128
    tokens the indexer has to choose.
    """
    return evolve(
        V4_FLASH,
        n_layers=n_layers,
        compress_ratios=V4_FLASH.compress_ratios[:n_layers],
        hash_layers=min(V4_FLASH.hash_layers, n_layers),
        swiglu_clamp_exp=V4_FLASH.swiglu_clamp_exp[:n_layers],
        swiglu_clamp_shexp=V4_FLASH.swiglu_clamp_shexp[:n_layers],
        n_vocab=len(byte_vocabulary().tokens),
        n_embd=96,
        context_length=32768,
        n_head=4,
        head_dim=96,
        rope_dim=16,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=64,
        indexer_heads=8,
        indexer_dim=64,
        indexer_top_k=32,
        n_expert=4,
        n_expert_used=2,
        expert_ff=96,
        yarn=Yarn(factor=16.0, original_context=2048),
    )


@frozen
class Phase:
    """Some steps on sequences of one length."""

    #: First step.
    begin: int
    #: Tokens of a sequence, a multiple of the window.
    length: int
    #: Sequences of a step.
    batch: int
    #: Rows a CSA query attends to; 0: all, while its indexer is still learning which.
    rows: int = 0


@frozen
class Settings:
    """One training."""

    layers: int
    steps: int
    phases: tuple[Phase, ...]
    seed: int = 0
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    #: Steps over which the rates rise, and share of all steps at the end over which they fall to zero.
    warm_up: int = 50
    decay: float = field(default=0.3)

    def phase(self, step: int) -> Phase:
        return [phase for phase in self.phases if phase.begin <= step][-1]

    def rate(self, step: int) -> float:
        """Factor of both rates at a step."""
        falling = (self.steps - step) / max(1.0, self.decay * self.steps)
        return max(0.0, min(1.0, (step + 1) / self.warm_up, falling))
