"""``transformers``' V4, made fast enough to be trained on one core, and its indexer able to learn.

The same mathematics in fewer operations: the window is attended to in bands instead of through a mask over all positions,
and the Sinkhorn iterations keep what their gradient needs and no more. The choice of rows by the indexer has no gradient; it
learns from a loss of its own, the divergence of its scores from the attention that the rows got, as V3.2's did.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from dgr.v4.hyper_parameters import HyperParameters
from tools.v4_transformers import build_model

__all__ = ["Trained", "trained_model"]

#: Positions a query sees of what is near, and queries of a band, whose keys are its own and those of the window before it.
_WINDOW = 128
_BAND = 32
#: Weight of a position whose rows got no attention, in the loss of the indexer.
_LEAST_WEIGHT = 0.02
#: Attention to a row below which its loss grows no more.
_LEAST_ATTENTION = 1e-3


@define
class Trained:
    """A model in training, and what its layers leave behind at each step."""

    model: v4.DeepseekV4ForCausalLM
    hp: HyperParameters
    #: Sequences whose queries see no row of a CSA layer, of an HCA layer: [batch]; None, when all see them.
    without_csa: Tensor | None = None
    without_hca: Tensor | None = None
    #: Whether each of two sequences attends to the CSA rows of the other one.
    swapped_csa: bool = False
    #: HCA row that holds the answer at each position: [batch, length]; -1 where none does. None, when there is none at all.
    wanted_rows: Tensor | None = None
    #: By HCA layer, how little the row that holds an answer is attended to.
    row_losses: list[Tensor] = field(factory=list)
    #: Losses of the indexers, one a CSA layer.
    indexer_losses: list[Tensor] = field(factory=list)
    #: Whether matrices are multiplied in bfloat16, the sums in float32.
    bfloat16: bool = False
    #: Experts chosen, by layer: [tokens, used].
    chosen: dict[int, Tensor] = field(factory=dict)

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, length, n_vocab]; ``length`` must be a multiple of the window."""
        self.indexer_losses.clear()
        self.row_losses.clear()
        # A mask of no columns: bands know their window, and the rows' own mask is appended to it.
        none = torch.zeros(tokens.shape[0], 1, tokens.shape[1], 0)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            hidden = self.model.model(input_ids=tokens, attention_mask={"all": none}, use_cache=False).last_hidden_state
            return self.model.lm_head(hidden).float()

    def select(self, rows: int) -> None:
        """How many rows of a CSA layer a query attends to."""
        for module in self.model.modules():
            if isinstance(module, v4.DeepseekV4Indexer):
                module.index_topk = rows

    def balance(self, rate: float) -> None:
        """Move the selection bias of each router towards equal use of its experts."""
        for layer, chosen in self.chosen.items():
            gate = self.model.model.layers[layer].mlp.gate
            counts = torch.bincount(chosen.reshape(-1), minlength=self.hp.n_expert).float()
            gate.e_score_correction_bias += rate * torch.sign(counts.mean() - counts)
        self.chosen.clear()


class _Sinkhorn(torch.autograd.Function):
    """Columns and rows of [streams, streams, tokens] scaled in turn until both sum to one, columns first and last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, iterations: int, epsilon: float) -> Tensor:
        kept = []
        for step in range(2 * iterations - 1):
            total = x.sum(dim=step % 2, keepdim=True) + epsilon
            x = x / total
            kept += [x, total]
        ctx.save_for_backward(*kept)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad, kept = grads[0], ctx.saved_tensors
        for step in reversed(range(len(kept) // 2)):
            x, total = kept[2 * step], kept[2 * step + 1]
            grad = (grad - (grad * x).sum(dim=step % 2, keepdim=True)) / total
        return grad, None, None


@torch.compile(dynamic=False)
def _sizes(tokens: Tensor, epsilon: float) -> Tensor:
    return torch.rsqrt(tokens.square().mean(dim=(1, 2)) + epsilon).unsqueeze(1)


@torch.compile(dynamic=False)
def _coefficients(mixes: Tensor, base: Tensor, scale: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    hc = scale.shape[0] + 1
    mixes = mixes.t()  # tokens last: sums over streams are then sums of whole rows
    pre_w, post_w, comb_w = mixes.split([hc, hc, hc * hc])
    pre_b, post_b, comb_b = base.unsqueeze(1).split([hc, hc, hc * hc])
    pre = torch.sigmoid(pre_w * scale[0] + pre_b) + epsilon
    post = 2 * torch.sigmoid(post_w * scale[1] + post_b)
    comb = torch.softmax((comb_w * scale[2] + comb_b).view(hc, hc, -1), dim=1) + epsilon
    return pre.t().contiguous(), post.t().contiguous(), comb


@torch.compile(dynamic=False)
def _collapsed(streams: Tensor, pre: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * streams).sum(dim=1)


@torch.compile(dynamic=False)
def _mixed(streams: Tensor, comb: Tensor, post: Tensor, out: Tensor) -> Tensor:
    """A block's output into the streams, and the streams into one another; all by token first."""
    return post.unsqueeze(-1) * out.unsqueeze(1) + (comb.unsqueeze(-1) * streams.unsqueeze(2)).sum(dim=1)


def _hyper_connection(self: v4.DeepseekV4HyperConnection, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What mixes the output and the streams, and the streams collapsed; of [tokens, streams, channels]."""
    with torch.autocast("cpu", enabled=False):
        mixes = functional.linear(streams.flatten(1), self.fn) * _sizes(streams, self.input_norm.eps)
        pre, post, comb = _coefficients(mixes, self.base, self.scale, self.hc_eps)
        comb = _Sinkhorn.apply(comb, self.hc_sinkhorn_iters, self.hc_eps).permute(2, 0, 1).contiguous()
        return post, comb, _collapsed(streams, pre)


def _block(self: v4.DeepseekV4DecoderLayer, streams: Tensor, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
    batch, length, hc, dim = streams.shape
    flat = streams.reshape(batch * length, hc, dim)
    post, comb, collapsed = _hyper_connection(self.attn_hc, flat)
    out, _ = self.self_attn(self.input_layernorm(collapsed.view(batch, length, dim)), **kwargs)
    flat = _mixed(flat, comb, post, out.float().view(-1, dim))
    post, comb, collapsed = _hyper_connection(self.ffn_hc, flat)
    out = self.mlp(self.post_attention_layernorm(collapsed.view(batch, length, dim)), input_ids=input_ids)
    return _mixed(flat, comb, post, out.float().view(-1, dim)).view(batch, length, hc, dim)


@torch.compile(dynamic=False)
def _activated(gate_up: Tensor, weights: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return functional.silu(gate) * up * weights.unsqueeze(-1)


def _experts(self: v4.DeepseekV4Experts, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """All experts for all tokens, weighted by nothing where they were not chosen: two products of a known shape."""
    tokens = hidden.shape[0]
    weights = weights.new_zeros(tokens, self.num_experts).scatter(1, chosen, weights)
    gate_up = functional.linear(hidden, self.gate_up_proj.flatten(0, 1)).view(tokens, self.num_experts, -1)
    active = _activated(gate_up, weights.to(gate_up.dtype), self.limit)
    return functional.linear(active.flatten(1), self.down_proj.transpose(0, 1).flatten(1))


def _banded(trained: Trained) -> Any:
    """An attention function: a window in bands, and the compressed rows behind it."""

    def attend(
        module: Any, query: Tensor, key: Tensor, _value: Tensor, mask: Tensor, scaling: float, **_kwargs: Any
    ) -> tuple[Tensor, None]:
        batch, heads, length, dim = query.shape
        bands = length // _BAND
        n_rows = key.shape[2] - length
        q = (
            query.reshape(batch, heads, bands, _BAND, dim)
            .permute(0, 2, 1, 3, 4)
            .reshape(batch, bands, heads * _BAND, dim)
        )
        near = _Near.apply(key[:, 0, :length])
        shape = (batch, bands, heads, _BAND)
        logits = (torch.matmul(q, near.transpose(2, 3)) * scaling).view(*shape, _WINDOW + _BAND)
        logits = logits + _window(bands)
        parts = [logits]
        rows = key[:, 0, length:]
        is_csa = hasattr(module.compressor, "indexer")
        if is_csa and trained.swapped_csa:
            rows = rows.flip(0)
        if n_rows:
            far = torch.matmul(q.view(batch, -1, dim), rows.transpose(1, 2)) * scaling
            far = far.view(*shape, n_rows)
            if is_csa:
                _score(trained, module, far, logits)
            bias = mask.view(batch if mask.shape[0] > 1 else 1, bands, 1, _BAND, n_rows)
            without = trained.without_csa if is_csa else trained.without_hca
            if without is not None:
                bias = bias.masked_fill(without.view(-1, 1, 1, 1, 1), float("-inf"))
            parts.append(far + bias)
        sinks = module.sinks.view(1, 1, heads, 1, 1).expand(*shape, 1)
        weights = functional.softmax(torch.cat([*parts, sinks], dim=-1), dim=-1)
        near_weights, far_weights, _ = weights.split([_WINDOW + _BAND, n_rows, 1], dim=-1)
        out = torch.matmul(near_weights.reshape(batch, bands, heads * _BAND, -1), near)
        if n_rows:
            if not is_csa and trained.wanted_rows is not None:
                trained.row_losses.append(_row_loss(far_weights, trained.wanted_rows.flatten()))
            far_weights = far_weights.reshape(batch, bands * heads * _BAND, n_rows)
            out = out + torch.matmul(far_weights, rows).view(batch, bands, heads * _BAND, dim)
        out = out.view(*shape, dim).permute(0, 1, 3, 2, 4).reshape(batch, length, heads, dim)
        return out, None

    return attend


class _Near(torch.autograd.Function):
    """Keys of each band, [batch, bands, window + band, dim], zeroes before the first; of [batch, length, dim]."""

    @staticmethod
    def forward(_ctx: Any, keys: Tensor) -> Tensor:
        batch, length, dim = keys.shape
        blocks = functional.pad(keys, (0, 0, _WINDOW, 0)).view(batch, -1, _BAND, dim)
        bands = length // _BAND
        near = [blocks[:, shift : shift + bands] for shift in range(_WINDOW // _BAND + 1)]
        return torch.stack(near, dim=2).view(batch, bands, -1, dim)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        batch, bands, _, dim = grads[0].shape
        parts = grads[0].view(batch, bands, -1, _BAND, dim)
        before = _WINDOW // _BAND
        total = parts.new_zeros(batch, bands + before, _BAND, dim)
        for shift in range(before + 1):
            total[:, shift : shift + bands] += parts[:, :, shift]
        return total[:, before:].reshape(batch, -1, dim)


@cache
def _window(bands: int) -> Tensor:
    """What a band's queries may not see: [1, bands, 1, queries, keys of the window before the band and of the band]."""
    query = torch.arange(_BAND).view(-1, 1) + _WINDOW
    key = torch.arange(_WINDOW + _BAND)
    hidden = (key > query) | (key <= query - _WINDOW)
    begin = torch.arange(bands).view(1, -1, 1, 1, 1) * _BAND - _WINDOW
    hidden = hidden | (begin + key < 0)
    return torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))


def _row_loss(weights: Tensor, wanted: Tensor) -> Tensor:
    """Surprise at the row that holds an answer, as its heads' mean attention tells it; -1 is no row."""
    batch, bands, _, band, n_rows = weights.shape
    mean = weights.float().mean(dim=2).reshape(batch * bands * band, n_rows)
    asked = wanted >= 0
    return -torch.log(mean[asked].gather(1, wanted[asked].unsqueeze(1)) + _LEAST_ATTENTION).mean()


def _score(trained: Trained, module: Any, far: Tensor, near: Tensor) -> None:
    """Add the loss of a layer's indexer: its scores against the attention that all rows would get."""
    indexer = module.compressor.indexer
    scores = indexer.scores  # [batch, length, rows], -inf for rows of the future
    batch, bands, heads, band, n_rows = far.shape
    with torch.no_grad():
        future = torch.isinf(scores).view(batch, bands, 1, band, n_rows)
        sinks = module.sinks.view(1, 1, heads, 1, 1).expand(batch, bands, heads, band, 1)
        hidden = far.masked_fill(future, float("-inf"))
        target = functional.softmax(torch.cat([near, hidden, sinks], dim=-1), dim=-1)[..., near.shape[-1] : -1].sum(
            dim=2
        )
        if trained.without_csa is not None:
            target = target.masked_fill(trained.without_csa.view(-1, 1, 1, 1), 0.0)
        target = target.reshape(batch, -1, n_rows)
        mass = target.sum(dim=-1, keepdim=True)
        target = target / (mass + 1e-9)
        weight = (mass.squeeze(-1) + _LEAST_WEIGHT) * ~future.view(batch, -1, n_rows).all(dim=-1)
        entropy = torch.xlogy(target, target).sum(dim=-1)
    log = functional.log_softmax(scores.masked_fill(scores.isinf(), -1e4), dim=-1)
    divergence = entropy - (target * log).sum(dim=-1)
    trained.indexer_losses.append((divergence * weight).sum() / (weight.sum() + 1e-9))
    indexer.scores = None


def _hooks(trained: Trained) -> None:
    for layer, block in enumerate(trained.model.model.layers):
        if isinstance(block.mlp.gate, v4.DeepseekV4TopKRouter):

            def on_gate(_: Any, __: Any, out: Any, layer: int = layer) -> None:
                if trained.model.training:
                    trained.chosen[layer] = out[2].detach()

            block.mlp.gate.register_forward_hook(on_gate)
    for module in trained.model.modules():
        if isinstance(module, v4.DeepseekV4DecoderLayer):
            module.forward = _block.__get__(module)
        if isinstance(module, v4.DeepseekV4Experts):
            module.forward = _experts.__get__(module)
        if isinstance(module, v4.DeepseekV4Indexer):
            _hook_indexer(module)


def _scores(self: v4.DeepseekV4IndexerScorer, q: Tensor, compressed_kv: Tensor, hidden_states: Tensor) -> Tensor:
    """As one product for each sequence, not one for each position."""
    batch, length, heads, dim = q.shape
    scores = torch.matmul(q.reshape(batch, length * heads, dim), compressed_kv.transpose(1, 2))
    scores = functional.relu(scores.view(batch, length, heads, -1)) * self.softmax_scale
    weights = self.weights_proj(hidden_states) * self.weights_scaling
    return torch.matmul(weights.unsqueeze(2), scores.float()).squeeze(2).float()


def _hook_indexer(indexer: Any) -> None:
    indexer.scorer.forward = _scores.__get__(indexer.scorer)

    def detach(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, q_residual, *rest = args
        return (hidden.detach(), q_residual.detach(), *rest)

    def keep(_: Any, __: Any, scores: Tensor) -> None:
        length, n_rows = scores.shape[1:]
        ready = (torch.arange(length) + 1) // indexer.compress_rate
        future = torch.arange(n_rows).view(1, -1) >= ready.view(-1, 1)
        indexer.scores = scores.masked_fill(future, float("-inf"))

    indexer.register_forward_pre_hook(detach)
    indexer.scorer.register_forward_hook(keep)


def _tie(attention: Any) -> None:
    """Let a compressed layer begin as one that finds what is alike, and says what stands there.

    Queries of the first head and compressed rows are the same projection, which the output undoes: a mimetic initialisation
    (Trockman and Kolter, 2023). From weights without that, recall takes thousands of steps to come by.
    """
    dim, rank = attention.head_dim, attention.q_a_proj.weight.shape[0]
    down, up = attention.q_a_proj.weight, attention.q_b_proj.weight[:dim]
    attention.compressor.kv_proj.weight.copy_(
        (up @ down).repeat(attention.compressor.kv_proj.weight.shape[0] // dim, 1)
    )
    attention.o_a_proj.weight[:rank, :dim].copy_(up.t())
    attention.o_b_proj.weight[:, :rank].copy_(down.t() * 0.5)
    if hasattr(attention.compressor, "indexer"):
        indexer = attention.compressor.indexer
        up = indexer.q_b_proj.weight[: indexer.head_dim]
        indexer.kv_proj.weight.copy_((up @ down).repeat(2, 1))


def trained_model(hp: HyperParameters, seed: int, spread: float = 0.05) -> Trained:
    """A new model with random weights; each token's experts in hash-routed layers are drawn once.

    ``spread``: of what a block adds to the residual streams, beside what a matrix would that keeps the size of its input.
    """
    torch.manual_seed(seed)
    model = build_model(hp)
    trained = Trained(model, hp)
    ALL_ATTENTION_FUNCTIONS.register("banded", _banded(trained))
    model.config._attn_implementation = "banded"
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "position_bias" not in name and not name.endswith("fn"):
                fan_in = weight.shape[-1]
                nn.init.normal_(weight, std=0.3 if "embed_tokens" in name else fan_in**-0.5)
            if name.endswith(("o_b_proj.weight", "down_proj", "down_proj.weight")):
                weight.mul_(spread)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight * 0.3)
        for block in model.model.layers:
            if block.self_attn.compressor is not None:
                _tie(block.self_attn)
        for gate in _hash_gates(model):
            for token in range(hp.n_vocab):
                gate.tid2eid[token] = torch.randperm(hp.n_expert)[: hp.n_expert_used]
    _hooks(trained)
    return trained


def _hash_gates(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, v4.DeepseekV4HashRouter))
