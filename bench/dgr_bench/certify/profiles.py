"""What a certificate locks before the run. A changed profile has another digest: it is another profile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from dgr.core.files.inputs import NOT_JSON, read_whole
from dgr.core.values import ContextParams, Numerics
from dgr.errors import InputError
from dgr_bench.distance.measurements import DistancePlan
from dgr_bench.results import digest_of

#: A thousand times what a profile takes.
_MOST_BYTES = 1 << 20

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class Chunking(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill chunk size that is compared with the profile's own, at lengths up to a limit (small chunks are slow)."""

    chunk: _Positive
    up_to: _Positive


class Several(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions beside each other on the same stages: copies of one another, and many stepped together."""

    #: Lengths up to which they are run.
    up_to: _Positive
    #: Numbers of sessions that are stepped together; their prompts have the profile's lengths, in turn.
    together: tuple[Annotated[int, msgspec.Meta(ge=2)], ...] = ()


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Context lengths, and how each of them is run."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    #: Tokens of the prompt, ascending.
    lengths: tuple[_Positive, ...]
    #: Tokens drawn greedily after each prompt (end-of-text is a token like any other).
    decode: Annotated[int, msgspec.Meta(ge=2)]
    #: Given tokens that follow the drawn ones; all their rows of logits are compared.
    continuation: _Positive
    #: Tokens of a prefill chunk.
    chunk: _Positive
    chunkings: tuple[Chunking, ...] = ()
    #: Lengths up to which a session is lost in mid-answer and re-prefilled.
    reprefill_up_to: _Count
    #: Thread counts that are compared with one thread, on the whole model.
    threads: tuple[Annotated[int, msgspec.Meta(ge=2)], ...] = ()
    #: Whether the whole model runs beside the stages. Only where it does is "split equals whole" certified.
    whole: bool = True
    n_batch: _Positive = 512
    n_ubatch: _Positive = 512
    type_k: str = "f16"
    flash_attn: bool = True
    numerics: Numerics = Numerics.EXACT
    #: Seed of the prompt's token ids (:func:`dgr.selftest.chain.some_tokens`).
    seed: _Count = 0
    #: Cancellations at random moments of prefill, and as many of decode.
    cancels: _Count
    #: Tokens of the prompt that is cancelled, and of its chunks.
    cancel_length: _Positive
    cancel_chunk: _Positive
    #: Times that everything that must fail is tried.
    refusals: _Count = 10
    #: Lengths that `dgr-bench verify` runs again.
    rerun: tuple[_Positive, ...] = ()
    #: Tokens that the context holds at least.
    reserve: _Count = 0
    #: Not there in the profiles that have a successor: their digests are those of certificates made before.
    several: Several | UnsetType = UNSET
    #: How far other numerics are from exact ones; :meth:`in_native` asks for it.
    distance: DistancePlan | UnsetType = UNSET

    def in_native(self, fixtures: Sequence[str]) -> Profile:
        """The same in native numerics, with their distance from exact ones, on fixtures of these weights too."""
        plan = DistancePlan(tokens=self.distance_tokens, fixtures=tuple(fixtures), threads=self.threads, seed=self.seed)
        return msgspec.structs.replace(self, name=f"{self.name}-native", numerics=Numerics.NATIVE, distance=plan)

    @property
    def distance_tokens(self) -> int:
        """Tokens of a distance: past the window and the first borders of the state, where the profile is that long."""
        return max(32, min(256, max(self.lengths)))

    @property
    def digest(self) -> str:
        return digest_of(self)

    @property
    def n_ctx(self) -> int:
        """Tokens that the context must hold."""
        longest = max(self.lengths) + self.decode + self.continuation
        return max(longest, self.cancel_length + self.decode, self.reserve)

    @property
    def forked(self) -> tuple[int, ...]:
        """Lengths at which a copy of a session is run: what it can be copied at, one token before the prompt's end."""
        up_to = 0 if self.several is UNSET else self.several.up_to
        return tuple(length for length in self.lengths if 1 < length <= up_to)

    @property
    def together(self) -> tuple[int, ...]:
        """Numbers of sessions that are stepped together."""
        return () if self.several is UNSET else self.several.together

    def lengths_together(self, sessions: int) -> tuple[int, ...]:
        """The prompt's length of each of so many sessions."""
        assert self.several is not UNSET
        up_to = self.several.up_to
        return tuple(islice(cycle([length for length in self.lengths if length <= up_to]), sessions))

    @property
    def slots(self) -> int:
        """Sequence slots that :attr:`several` takes; 0 where there is none of it."""
        return 0 if self.several is UNSET else max(2, *self.together, 0)

    @property
    def context(self) -> ContextParams:
        """The context parameters of every stage."""
        return ContextParams(
            n_ctx=self.n_ctx,
            n_batch=self.n_batch,
            n_ubatch=self.n_ubatch,
            type_k=self.type_k,
            flash_attn=self.flash_attn,
            numerics=self.numerics,
        )


#: One token; both sides of every border of the state: CSA blocks (4), HCA blocks and window (128), chunks (512), the ring
#: of raw K (640 positions are kept at n_ubatch 512, padded to 768), a second chunk; then several chunks.
_BORDERS = (1, 3, 4, 5, 127, 128, 129, 511, 512, 513, 639, 640, 641, 767, 768, 769, 1023, 1024, 1025)

_FIRST = (
    # Two cores and a model of `dgr fixture`: about twenty minutes.
    Profile(
        name="fixture",
        lengths=(*_BORDERS, 4096, 16384),
        decode=16,
        continuation=8,
        chunk=512,
        chunkings=(Chunking(chunk=1, up_to=129), Chunking(chunk=67, up_to=1025), Chunking(chunk=384, up_to=16384)),
        reprefill_up_to=16384,
        threads=(2,),
        cancels=20,
        cancel_length=768,
        cancel_chunk=64,
        rerun=(1, 129, 641),
    ),
    # A smoke test of everything above, in under a minute.
    Profile(
        name="quick",
        lengths=(1, 5, 128, 257),
        decode=6,
        continuation=4,
        chunk=128,
        chunkings=(Chunking(chunk=1, up_to=5), Chunking(chunk=67, up_to=257)),
        reprefill_up_to=257,
        n_batch=128,
        n_ubatch=128,
        cancels=2,
        cancel_length=192,
        cancel_chunk=32,
        refusals=3,
        rerun=(5,),
    ),
    # The real model on the machines that hold it. Native numerics, the only ones that GPUs have; the whole model fits
    # no machine of most clusters.
    Profile(
        name="v4-flash",
        lengths=(4096, 32768, 122880, 262144, 1048448),
        decode=64,
        continuation=8,
        chunk=512,
        chunkings=(Chunking(chunk=384, up_to=32768),),
        reprefill_up_to=32768,
        whole=False,
        numerics=Numerics.NATIVE,
        cancels=20,
        cancel_length=8192,
        cancel_chunk=512,
        rerun=(4096,),
    ),
)

#: The same, and sessions beside each other; what certificates are made with from now on.
_SECOND = tuple(
    msgspec.structs.replace(profile, name=f"{profile.name}-2", several=several)
    for profile, several in zip(
        _FIRST, (Several(up_to=4096, together=(2, 5, 8)), Several(up_to=257, together=(2, 8))), strict=False
    )
)

#: What ``--quick`` asks for.
QUICK = "quick-2"

PROFILES = {profile.name: profile for profile in (*_FIRST, *_SECOND)}


def profile_of(name: str) -> Profile:
    """A profile by name, or from a JSON file. Raises :class:`~dgr.errors.InputError`."""
    if name in PROFILES:
        return PROFILES[name]
    if not name.endswith(".json"):
        raise InputError(f"unknown profile {name!r}; choose {', '.join(PROFILES)}, or give a file NAME.json")
    try:
        profile = msgspec.json.decode(read_whole(name, _MOST_BYTES, "a profile"), type=Profile)
    except OSError as error:
        raise InputError(f"cannot read the profile {name}: {error.strerror or error}") from error
    except NOT_JSON as error:
        raise InputError(
            f"{name} is not a profile: {error}; `dgr-bench profile fixture` prints one to start from"
        ) from error
    if profile.name in PROFILES and profile != PROFILES[profile.name]:
        raise InputError(f"{name} is called {profile.name!r}, as a profile of dgr-bench is; give it a name of its own")
    if list(profile.lengths) != sorted(set(profile.lengths)) or not profile.lengths:
        raise InputError(f"{name}: lengths must ascend and must not be empty")
    sizes = (profile.chunk, profile.cancel_chunk, *(one.chunk for one in profile.chunkings))
    if max(sizes) > profile.n_batch:
        raise InputError(f"{name}: a chunk of {max(sizes)} tokens is more than n_batch, {profile.n_batch}")
    if unknown := set(profile.rerun) - set(profile.lengths):
        raise InputError(f"{name}: rerun names lengths that are not run: {sorted(unknown)}")
    return profile
