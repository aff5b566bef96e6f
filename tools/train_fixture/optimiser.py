"""Muon for the matrices, Adam for all else: on a budget of minutes it needs about half the steps that Adam alone does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Muon", "build_optimisers"]

#: Coefficients of the quintic Newton-Schulz iteration (Jordan et al., 2024), and how often it runs.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def _orthogonal(matrices: Tensor) -> Tensor:
    """The nearest matrices with equal singular values, about: [.., rows, columns]."""
    a, b, c = _QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; stacks of matrices (experts) as so many matrices."""

    def __init__(self, weights: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(weights, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    alike.setdefault(weight.shape, []).append(weight)
            for weights in alike.values():
                updates = _orthogonal(torch.stack([self._direction(weight, group["momentum"]) for weight in weights]))
                rows, columns = weights[0].shape[-2:]
                for weight, update in zip(weights, updates, strict=True):
                    weight.mul_(1 - group["lr"] * group["decay"])
                    weight.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)

    def _direction(self, weight: nn.Parameter, share: float) -> Tensor:
        assert weight.grad is not None
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        momentum: Tensor = state["momentum"]
        momentum.lerp_(weight.grad, 1 - share)
        return weight.grad.lerp(momentum, share)


#: Ends of the names of matrices that Adam trains: what is looked up, what decides, and the head.
_ADAM = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "position_bias", "fn", "weights_proj.weight")


def build_optimisers(model: nn.Module, muon_rate: float, adam_rate: float) -> tuple[torch.optim.Optimizer, ...]:
    """One optimiser for the matrices, one for all other weights."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        (matrices if weight.dim() >= 2 and not name.endswith(_ADAM) else others).append(weight)
    return (
        Muon(matrices, muon_rate),
        torch.optim.Adam(others, adam_rate, betas=(0.9, 0.98), eps=1e-10),
    )
