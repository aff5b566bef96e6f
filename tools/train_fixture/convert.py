"""A checkpoint as the GGUF that is kept: bfloat16 matrices, all else float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from dgr.selftest.learned.model import write_model
from dgr.v4.hyper_parameters import HyperParameters
from tools.v4_transformers import from_state

__all__ = ["write_gguf"]


def write_gguf(out: Path, hp: HyperParameters, state: Mapping[str, torch.Tensor], weights: str = "bf16") -> Path:
    """Write a ``state_dict`` of ``transformers``' V4 in some weights."""
    tensors = from_state(hp, state)
    return write_model(out, hp, tensors.__getitem__, weights, "dgr learned fixture")
