"""``python -m tools.train_fixture train | export``: train the learned fixture, and write it as a GGUF."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from tools.train_fixture.corpus import english
from tools.train_fixture.model import Trained, trained_model
from tools.train_fixture.optimiser import build_optimisers
from tools.train_fixture.sequences import Batch, Target, make_batch
from tools.train_fixture.settings import Phase, Settings, sizes

#: Weight of the indexers' losses, and how fast the routers' selection biases move.
_INDEXER_WEIGHT = 1.0
#: Weight of each kind of loss; answers are few, and their gradients large.
_WEIGHTS = {Target.TEXT: 1.0, Target.PAIR: 0.5, Target.MARK: 1.0, Target.COPY: 0.5}
_BALANCE = 1e-3
#: Weight of the loss that tells HCA layers which row to attend to.
_ROW_WEIGHT = 1.0


def _phases(text: str) -> tuple[Phase, ...]:
    """``BEGIN:LENGTHxBATCH[:ROWS],..``."""
    phases = []
    for part in text.split(","):
        begin, shape, *rows = part.split(":")
        length, batch = shape.split("x")
        phases.append(Phase(int(begin), int(length), int(batch), int(rows[0]) if rows else 0))
    return tuple(phases)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tools.train_fixture", description=__doc__)
    commands = parser.add_subparsers(required=True)
    train = commands.add_parser("train", help="train, or go on with a training")
    train.add_argument("folder", type=Path, help="checkpoint and log")
    train.add_argument("--layers", type=int, default=5)
    train.add_argument("--steps", type=int, required=True)
    train.add_argument("--until", type=int, help="stop before this step (default: --steps)")
    train.add_argument("--phases", type=_phases, required=True, help="BEGIN:LENGTHxBATCH[:ROWS], one after another")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--muon-rate", type=float, default=0.02)
    train.add_argument("--adam-rate", type=float, default=3e-3)
    train.add_argument("--decay", type=float, default=0.3, help="share of the steps over which the rates fall")
    train.add_argument(
        "--documentation", type=Path, help="sources of Python's documentation, .rst.txt, to train on too"
    )
    train.add_argument("--threads", type=int, default=1)
    train.add_argument("--save-every", type=float, default=120.0, metavar="SECONDS")
    train.add_argument("--pause-while", type=Path, help="stand still while this file exists")
    train.set_defaults(run=_train)
    export = commands.add_parser("export", help="write a checkpoint as a GGUF")
    export.add_argument("folder", type=Path)
    export.add_argument("out", type=Path)
    export.set_defaults(run=_export)
    return parser


def _losses(trained: Trained, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
    tokens = torch.from_numpy(batch.tokens)
    targets = torch.from_numpy(batch.targets).reshape(-1)
    trained.without_csa = torch.from_numpy(batch.without_csa) if batch.without_csa.any() else None
    trained.without_hca = torch.from_numpy(batch.without_hca) if batch.without_hca.any() else None
    trained.swapped_csa = batch.swapped_csa
    trained.wanted_rows = torch.from_numpy(batch.rows) if (batch.rows >= 0).any() else None
    logits = trained.logits(tokens[:, :-1]).flatten(0, 1)
    wanted = tokens[:, 1:].reshape(-1)
    each = functional.cross_entropy(logits, wanted, reduction="none")
    indexer = torch.stack(trained.indexer_losses).mean() if trained.indexer_losses else torch.zeros(())
    loss = _INDEXER_WEIGHT * indexer
    told = {"indexer": float(indexer.detach())}
    if trained.row_losses:
        row = torch.stack(trained.row_losses).mean()
        loss = loss + _ROW_WEIGHT * row
        told["row"] = float(row.detach())
    right = logits.detach().argmax(dim=-1) == wanted
    for kind in Target:
        here = targets == kind
        if kind is not Target.NOTHING and here.any():
            mean = each[here].mean()
            loss = loss + _WEIGHTS[kind] * mean
            told[kind.name.lower()] = float(mean.detach())
            told[f"{kind.name.lower()}_right"] = float(right[here].float().mean())
    return loss, told


def _save(folder: Path, trained: Trained, optimisers: Any, step: int, settings: dict[str, Any]) -> None:
    state = {
        "model": trained.model.state_dict(),
        "optimisers": [one.state_dict() for one in optimisers],
        "step": step,
        "settings": settings,
    }
    new = folder / "checkpoint.new"
    torch.save(state, new)
    new.replace(folder / "checkpoint.pt")


def _text(folder: Path, documentation: Path | None) -> bytes:
    """What is trained on, kept beside the checkpoint: another Python has other texts."""
    kept = folder / "text.txt"
    if not kept.exists():
        kept.write_bytes(english(documentation))
    return kept.read_bytes()


def _train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    settings = Settings(
        args.layers, args.steps, args.phases, args.seed, args.muon_rate, args.adam_rate, decay=args.decay
    )
    args.folder.mkdir(parents=True, exist_ok=True)
    hp = sizes(args.layers)
    trained = trained_model(hp, args.seed)
    trained.bfloat16 = True
    model = trained.model.train()
    optimisers = build_optimisers(model, args.muon_rate, args.adam_rate)
    first = 0
    if (args.folder / "checkpoint.pt").exists():
        state = torch.load(args.folder / "checkpoint.pt", weights_only=True)
        model.load_state_dict(state["model"])
        for one, kept in zip(optimisers, state["optimisers"], strict=True):
            one.load_state_dict(kept)
        first = state["step"]
    base = [
        (group, rate)
        for one, rate in zip(optimisers, (args.muon_rate, args.adam_rate), strict=True)
        for group in one.param_groups
    ]
    text = _text(args.folder, args.documentation)
    n_weights = sum(weight.numel() for weight in model.parameters())
    print(f"{n_weights} weights, {len(text)} bytes of text, from step {first}", flush=True)
    about = {"layers": args.layers, "seed": args.seed}
    saved = time.monotonic()
    with (args.folder / "log.jsonl").open("a") as log:
        for step in range(first, min(args.until or args.steps, args.steps)):
            while args.pause_while is not None and args.pause_while.exists():
                time.sleep(1)
            began = time.monotonic()
            phase = settings.phase(step)
            trained.select(phase.rows or phase.length)
            batch = make_batch(text, phase.length, phase.batch, args.seed, step)
            loss, told = _losses(trained, batch)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group, rate in base:
                group["lr"] = rate * settings.rate(step)
            for one in optimisers:
                one.step()
                one.zero_grad(set_to_none=True)
            trained.balance(_BALANCE)
            record = {"step": step, "length": phase.length, "tokens": batch.targets.size, "norm": float(norm)}
            record |= told | {"seconds": time.monotonic() - began}
            log.write(json.dumps({key: round(value, 4) for key, value in record.items()}) + "\n")
            log.flush()
            if time.monotonic() - saved > args.save_every:
                _save(args.folder, trained, optimisers, step + 1, about)
                saved = time.monotonic()
        _save(args.folder, trained, optimisers, min(args.until or args.steps, args.steps), about)


def _export(args: argparse.Namespace) -> None:
    from tools.train_fixture.convert import write_gguf

    state = torch.load(args.folder / "checkpoint.pt", weights_only=True)
    write_gguf(args.out, sizes(state["settings"]["layers"]), state["model"])


if __name__ == "__main__":
    parsed = _parser().parse_args()
    with torch.no_grad() if parsed.run is _export else torch.enable_grad():
        parsed.run(parsed)
