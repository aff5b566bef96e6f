"""What the MTP contract sends: six messages that cross seams, and two values that never leave the tail.

Encoded as the frames of :mod:`dgr.wire.frames` are: msgpack arrays, an integer tag first, unknown tags and fields refused.
The tags are a range of their own that no frame uses, so a stage of this version refuses each of them as no frame at all.
An implementation would give ``Tokens`` and ``Boundary`` the fields ``candidates`` and ``draft`` instead of adding
:class:`Work`; field by field they are the same.

Whatever the context, a message is at most 256 bytes and 5 for every token id; only :class:`Work` between two stages has a
payload, the residual of its own tokens. There is no field for a cache row, a ring row or a hidden row.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

import msgspec
from attrs import frozen
from msgspec import Meta, Struct

from dgr.core.scalars import U32, U63, TokenId
from dgr.core.values import Expectation, Key, SamplingParams
from dgr.errors import InputError
from dgr.v4.hyper_parameters import HyperParameters

__all__ = [
    "HEADER_BYTES",
    "ID_BYTES",
    "TAGS",
    "TO_PIPELINE",
    "TO_STAGE",
    "DraftInput",
    "DraftOutput",
    "Expectation",
    "Key",
    "Message",
    "MtpAdvanced",
    "MtpRefused",
    "MtpWork",
    "Proposal",
    "Reason",
    "Rollback",
    "RolledBack",
    "RowShape",
    "Want",
    "decode_message",
    "encode_message",
    "message_name",
]

#: Bounds of an encoded message: bytes without token ids, and bytes for each id.
HEADER_BYTES, ID_BYTES = 256, 5
#: Tags of the contract; ``dgr.wire.frames`` uses none of them.
TAGS = range(64, 80)


class Want(enum.IntEnum):
    """What the pipeline wants of the tail for a :class:`Work`."""

    #: Nothing but to have it committed: a prefill chunk that is not the last.
    NOTHING = 0
    #: Verify the candidates, draw the next token, and draft.
    TOKEN = 1


class Reason(enum.IntEnum):
    """Why a stage refuses a message, in the order in which it looks. A stage that refuses has changed nothing."""

    #: The epoch is not the route session's own; no state was looked at.
    STALE_EPOCH = 0
    #: No such session here: never opened, or dropped with an older epoch.
    UNKNOWN = 1
    #: An idle session made room for another one.
    EVICTED = 2
    #: The session stands at another position.
    POSITION = 3
    #: The session holds other tokens.
    DIGEST = 4
    #: Work: more candidates than there are rollback planes, or no token before them.
    CANDIDATES = 5
    #: Work: the tokens do not fit the context.
    CONTEXT = 6
    #: Rollback: not back, or to the very beginning, which is not a rollback but the end of the session's state.
    RANGE = 7
    #: Rollback: further back than there are planes.
    PLANES = 8
    #: Rollback: one is pending already; two without a decode between them do not add up.
    PENDING = 9
    #: Rollback: further back than the last ubatch, or no decode since the state was cleared, restored or copied.
    BUDGET = 10
    #: Work that a cancel reached before the head had started it.
    CANCELLED = 11


class _ContractMessage(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member of the union."""


def message_name(kind: type[Struct]) -> str:
    """Return a message's name in the contract, where no frame of today bears the same."""
    return kind.__name__.removeprefix("Mtp")


class MtpWork(_ContractMessage, frozen=True, tag=64):
    """Pipeline to head, and with a residual from stage to stage: run these tokens.

    The last ``candidates`` of ``tokens`` are drafts to be verified; the others are certain. ``draft``: how many tokens the
    tail shall draft behind the one it draws. ``payload``: bytes of residual that follow, ``len(tokens) * 4 * n_embd`` float32
    between stages and 0 from the pipeline.
    """

    key: Key
    seq: U63
    expect: Expectation
    tokens: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=2**20)]
    want: Want
    candidates: U32
    draft: U32
    sampling: SamplingParams | None
    payload: U63


class Rollback(_ContractMessage, frozen=True, tag=65):
    """Pipeline to head, forwarded from stage to stage in the order of the work: forget what is behind ``to``."""

    key: Key
    seq: U63
    #: Where every stage stands, rejected candidates included.
    at: Expectation
    #: Where it shall stand.
    to: Expectation


class MtpAdvanced(_ContractMessage, frozen=True, tag=66):
    """Tail to pipeline: work that wanted nothing is committed on every stage."""

    key: Key
    seq: U63
    position: U32


class Proposal(_ContractMessage, frozen=True, tag=67):
    """Tail to pipeline: ``accepted`` candidates are the trunk's own draws; ``token`` is drawn for ``position``.

    ``drafts`` are the MTP block's guesses for the positions behind it. Every stage has committed the rejected candidates as
    well until it gets the :class:`Rollback`; the tail's MTP state stands at ``position`` already.
    """

    key: Key
    seq: U63
    position: U32
    accepted: U32
    token: TokenId
    drafts: Annotated[tuple[TokenId, ...], Meta(max_length=2**10)]


class RolledBack(_ContractMessage, frozen=True, tag=68):
    """Tail to pipeline: every stage stands at ``position``."""

    key: Key
    seq: U63
    position: U32


class MtpRefused(_ContractMessage, frozen=True, tag=69):
    """Any stage to the pipeline: nothing was changed here, and nothing went on to the next stage."""

    key: Key
    seq: U63
    reason: Reason
    #: Where the session stands on this stage, and how far it could be rolled back.
    position: U32
    budget: U32


Message: TypeAlias = MtpWork | Rollback | MtpAdvanced | Proposal | RolledBack | MtpRefused
#: What a stage takes, from the pipeline or from the stage before it.
TO_STAGE = (MtpWork, Rollback)
#: What the pipeline takes.
TO_PIPELINE = (MtpAdvanced, Proposal, RolledBack, MtpRefused)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """The msgpack bytes of a message, without its payload."""
    return _encoder.encode(message)


def decode_message(data: bytes) -> Message:
    """Read one message. Raises :class:`msgspec.ValidationError` or :class:`msgspec.DecodeError`."""
    return _decoder.decode(data)


# --- values that never leave the tail -------------------------------------------------------------------------------


class DraftInput(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the MTP block takes for one position: the token there, and the hidden row of the position before it.

    ``residual``: the final hyper-connection state *before* the head, ``4 * n_embd`` little-endian float32; zeros at position
    0. While drafting it is the block's own output, else the trunk's.
    """

    token: TokenId
    position: U32
    residual: bytes


class DraftOutput(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the MTP block returns for one position: logits of the token behind it (``n_vocab`` float32), and its next row."""

    position: U32
    logits: bytes
    residual: bytes


@frozen
class RowShape:
    """Shapes of the tail's rows."""

    n_embd: int
    streams: int
    n_vocab: int

    @classmethod
    def of(cls, hp: HyperParameters) -> RowShape:
        return cls(hp.n_embd, hp.hc_streams, hp.n_vocab)

    @property
    def row_bytes(self) -> int:
        """Bytes of one hidden row; a seam's residual has as many for each token."""
        return 4 * self.streams * self.n_embd

    @property
    def logits_bytes(self) -> int:
        return 4 * self.n_vocab

    def check_input(self, given: DraftInput) -> None:
        """Refuse a row of another width, or a token outside the vocabulary."""
        self._check("residual", given.residual, self.row_bytes)
        if given.token >= self.n_vocab:
            raise InputError(f"token id {given.token} is outside the vocabulary of {self.n_vocab}")

    def check_output(self, given: DraftOutput) -> None:
        """Refuse logits or a row of another width."""
        self._check("logits", given.logits, self.logits_bytes)
        self._check("residual", given.residual, self.row_bytes)

    def payload_bytes(self, message: Message) -> int:
        """Bytes that follow a message between two stages."""
        return len(message.tokens) * self.row_bytes if isinstance(message, MtpWork) else 0

    def _check(self, name: str, data: bytes, n_bytes: int) -> None:
        if len(data) != n_bytes:
            raise InputError(f"{name} has {len(data)} bytes, but must have {n_bytes}")
