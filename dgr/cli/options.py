"""Flags that several commands share, and what they make of them."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dgr.client.generation import AHEAD
from dgr.client.pace import CHUNK_SECONDS
from dgr.cluster.connect import LinkPolicy
from dgr.core.mtp import CONTRACT, not_executable
from dgr.core.values import ContextParams, Numerics, Wire
from dgr.engine.devices import Placement
from dgr.errors import InputError
from dgr.wire.credentials import Credentials

__all__ = [
    "add_ahead_argument",
    "add_context_arguments",
    "add_link_arguments",
    "add_model_arguments",
    "add_reserved_arguments",
    "context_of",
    "link_policy_of",
    "placement_of",
    "require_extra",
    "stage_flags",
]

_DEFAULTS = ContextParams()


class _Reserved(argparse.Action):
    """A flag that is refused as it is read: it sets nothing, so nothing can look at it."""

    def __call__(
        self, _parser: argparse.ArgumentParser, _namespace: argparse.Namespace, _values: Any, flag: str | None = None
    ) -> NoReturn:
        raise not_executable(f"the flag {flag}")


class _StageFlag(argparse.Action):
    """A flag that says how stages of this process are; which ones were given is kept in ``stage_flags``."""

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _flag: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        given: dict[str, str] = getattr(namespace, "stage_flags", {})
        namespace.stage_flags = {**given, self.dest: self.option_strings[0]}


class _StageSwitch(_StageFlag):
    """The same without a value: it turns something on."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, **more)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, _values: Any, flag: str | None = None
    ) -> None:
        super().__call__(parser, namespace, True, flag)


def stage_flags(args: argparse.Namespace) -> dict[str, str]:
    """The flags of :func:`add_context_arguments` that were given, whatever their value: name in ``args`` -> flag."""
    return dict(getattr(args, "stage_flags", {}))


def add_reserved_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags under which people look for speculative decoding, here and in llama.cpp's programs."""
    flags: Sequence[str] = ("--mtp", "--draft", "--draft-max", "--spec-type", "-md", "--model-draft")
    help_text = f"reserved and refused: multi-token prediction is not executed ({CONTRACT})"
    first, *others = flags
    parser.add_argument(first, action=_Reserved, nargs="?", metavar="N", default=argparse.SUPPRESS, help=help_text)
    parser.add_argument(*others, action=_Reserved, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """``--model`` and ``--split``, and everything of :func:`add_context_arguments`."""
    parser.add_argument("--model", metavar="GGUF", help="the model file")
    parser.add_argument(
        "--split",
        metavar="A:B,...",
        help="layer ranges of the stages, for example 0:15,15:29,29:43 (default: one stage)",
    )
    parser.add_argument(
        "--chunk",
        type=int,
        metavar="N",
        help="tokens of a prefill chunk (default: --ubatch; in exact numerics fewer, if they take longer than --chunk-seconds)",
    )
    parser.add_argument(
        "--chunk-seconds",
        type=float,
        default=CHUNK_SECONDS,
        metavar="S",
        help=f"what a chunk may take on a stage, where --chunk does not say (default: {CHUNK_SECONDS:g})",
    )
    add_context_arguments(parser)


def add_ahead_argument(parser: argparse.ArgumentParser) -> None:
    """``--ahead``, for a command that reads answers to their ends."""
    parser.add_argument(
        "--ahead",
        type=int,
        default=AHEAD,
        metavar="N",
        help="tokens of an answer that the stages draw one after another before they are asked for each"
        f" (default: {AHEAD}; 0: none)",
    )


def add_context_arguments(parser: argparse.ArgumentParser) -> None:
    """Context parameters, threads, memory and devices of a stage."""
    parser.add_argument(
        "--ctx",
        action=_StageFlag,
        type=int,
        default=_DEFAULTS.n_ctx,
        metavar="N",
        help="tokens the context holds (n_ctx), rounded up to a multiple of 256",
    )
    parser.add_argument(
        "--batch",
        action=_StageFlag,
        type=int,
        default=_DEFAULTS.n_batch,
        metavar="N",
        help="most tokens in a native call",
    )
    parser.add_argument(
        "--ubatch",
        action=_StageFlag,
        type=int,
        default=_DEFAULTS.n_ubatch,
        metavar="N",
        help="tokens of a native sub-batch",
    )
    parser.add_argument(
        "--threads",
        action=_StageFlag,
        type=int,
        default=1,
        metavar="N",
        help="compute threads of each stage (default: 1)",
    )
    parser.add_argument(
        "--numerics",
        action=_StageFlag,
        choices=[one.value for one in Numerics],
        default=_DEFAULTS.numerics.value,
        help="exact: the same bits however the work is cut; same-cuts: the same bits over the same layer ranges;"
        " native: upstream's fastest kernels",
    )
    parser.add_argument(
        "--wire",
        action=_StageFlag,
        choices=[one.value for one in Wire],
        default=_DEFAULTS.wire.value,
        help="how residuals travel between stages: as they are (f32), packed without loss (f32+zstd, extra `zstd`), or rounded,"
        " which needs numerics same-cuts or native",
    )
    parser.add_argument(
        "--flash-attn", action=_StageFlag, choices=["on", "off"], default="on", help="flash attention (default: on)"
    )
    parser.add_argument(
        "--type-k", action=_StageFlag, default=_DEFAULTS.type_k, metavar="TYPE", help="K-cache type: f16, f32, q8_0"
    )
    parser.add_argument(
        "--memory",
        action=_StageFlag,
        metavar="SIZE",
        help="refuse what takes more of the host's memory: bytes, 24GiB, or 50%% of what is usable",
    )
    parser.add_argument(
        "--device",
        action=_StageFlag,
        metavar="NAME,...",
        help="with native numerics: the devices that hold the layers, as llama.cpp calls them, or CPU (default: all there"
        " are; a wrong name lists them)",
    )
    parser.add_argument(
        "--gpu-layers",
        action=_StageFlag,
        type=int,
        metavar="N",
        help="only the last N layers of a stage lie on its devices, and with them a tail's output; the CPU has the others"
        " (default: all)",
    )
    parser.add_argument("--mmap", action=_StageSwitch, help="map the model file instead of reading the owned tensors")
    parser.add_argument("--mlock", action=_StageSwitch, help="lock the owned tensors in memory")
    add_reserved_arguments(parser)


def add_link_arguments(parser: argparse.ArgumentParser) -> None:
    """TLS credentials and the behaviour of links."""
    parser.add_argument("--tls-ca", metavar="PEM", help="certificate of the private CA (dgr keys)")
    parser.add_argument("--tls-cert", metavar="PEM", help="certificate of this host")
    parser.add_argument("--tls-key", metavar="KEY", help="key of this host")
    parser.add_argument(
        "--allow-plain", action="store_true", help="plain TCP beyond loopback: anyone may read and write"
    )
    parser.add_argument(
        "--heartbeat",
        type=float,
        default=LinkPolicy().heartbeat,
        metavar="SECONDS",
        help=f"sign of life on idle links; a peer silent for three is given up (default: {LinkPolicy().heartbeat:g})",
    )


def link_policy_of(args: argparse.Namespace, tls: tuple[Path, Path, Path] | None = None) -> LinkPolicy:
    """The link policy that the flags name; ``tls`` are the files of a route file, which flags override."""
    given = (args.tls_ca, args.tls_cert, args.tls_key)
    if any(given) and not all(given):
        raise InputError("--tls-ca, --tls-cert and --tls-key go together; `dgr keys` makes all three")
    if not 0.05 <= args.heartbeat <= 3600:
        raise InputError(f"--heartbeat is {args.heartbeat:g} seconds; give 0.05 to 3600")
    files = tuple(Path(path) for path in given) if all(given) else tls
    credentials = None if files is None else Credentials(*files)
    return LinkPolicy(credentials=credentials, allow_plain=args.allow_plain, heartbeat=args.heartbeat)


def context_of(args: argparse.Namespace) -> ContextParams:
    """The context parameters that the flags name."""
    return ContextParams(
        n_ctx=args.ctx,
        n_batch=args.batch,
        n_ubatch=args.ubatch,
        n_seq_max=getattr(args, "sessions", 1),
        type_k=args.type_k,
        flash_attn=args.flash_attn == "on",
        numerics=Numerics(args.numerics),
        wire=Wire(args.wire),
    )


def placement_of(args: argparse.Namespace) -> Placement:
    """The devices that the flags name."""
    return Placement.parse(args.device, args.gpu_layers)


def require_extra(what: str, extra: str, modules: Sequence[str]) -> None:
    """Refuse what needs modules of an extra that is not installed. Raises :class:`~dgr.errors.InputError`."""
    if missing := [name for name in modules if _lacks(name)]:
        raise InputError(
            f"{what} needs {', '.join(missing)}: install dgr with its extra `{extra}`"
            f" (pip install '.[{extra}]' in its checkout)"
        )


def _lacks(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:  # nor is there a package that it could be in
        return True
