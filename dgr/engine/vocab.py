"""llama.cpp's tokenizer, loaded from a GGUF without its weights."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

from dgr.artifact.artifact import Artifact
from dgr.engine.files import open_vocabulary
from dgr.engine.native import NativeHandle, default_native
from dgr.errors import EngineError, InputError, InvalidToken

__all__ = ["LlamaVocabulary"]

#: Bytes of one text: four times what the largest context (1048576 tokens) holds of ordinary text. llama.cpp takes up to 130
#: bytes of memory for each, which no budget counts.
_MAX_TEXT_BYTES = 16 << 20


def _utf8(text: str) -> bytes:
    if not isinstance(text, str):
        raise InputError(f"the text is a {type(text).__name__}; give a str")
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as wrong:
        raise InputError(
            f"the text has a lone surrogate, U+{ord(text[wrong.start]):04X}, at character {wrong.start}, so it is not"
            " Unicode text; decode its bytes as what they are, or with errors='replace'"
        ) from None
    if len(data) > _MAX_TEXT_BYTES:
        raise InputError(f"the text has {len(data)} bytes; one text may have {_MAX_TEXT_BYTES}, encode it in parts")
    return data


class LlamaVocabulary(NativeHandle):
    """Text to token ids and back, from any thread; close it or use it as a context manager, when no thread uses it."""

    def __init__(self, model: str | Path | Artifact) -> None:
        artifact = model if isinstance(model, Artifact) else Artifact.open(model)
        path = artifact.file.path
        self._native = default_native()
        self._vocab = open_vocabulary(self._native, artifact)
        #: Bytes of the tokens that were asked for, by id and whether specials have any.
        self._pieces: dict[tuple[int, bool], bytes] = {}
        specials = self._native.ffi.new("int32_t[3]")
        self._native.check(
            self._native.lib.dgr_vocab_specials(self._vocab, specials, specials + 1, specials + 2),
            f"vocabulary of {path}",
        )
        self.n_vocab: int = specials[0]
        self.bos: int | None = specials[1] if specials[1] >= 0 else None
        self.eos: int | None = specials[2] if specials[2] >= 0 else None

    @property
    def _handle(self) -> Any:
        if self._vocab is None:
            raise EngineError("the vocabulary was closed; open it again")
        return self._vocab

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text. ``add_special``: behind the begin-of-text token, where the model has one.

        Whatever the file's ``add_bos_token`` and ``add_eos_token`` say: files of one model differ in them.
        Takes a microsecond or so a character, without the GIL. Raises :class:`~dgr.errors.InputError` for what is not text
        (a lone surrogate), and for more than 16 MiB of it.
        """
        data = _utf8(text)
        ffi, lib = self._native.ffi, self._native.lib
        # A byte is at least a token's worth; two more for specials. Asked again if that was too small.
        room = len(data) + 2
        first = [self.bos] if add_special and self.bos is not None else []
        while True:
            tokens, n = ffi.new("int32_t[]", room), ffi.new("int32_t *")
            self._native.check(
                lib.dgr_vocab_tokenize(self._handle, data, len(data), False, parse_special, tokens, room, n),
                "tokenize",
            )
            if n[0] <= room:
                return first + (list(ffi.unpack(tokens, n[0])) if n[0] else [])
            room = n[0]

    def piece(self, token: int, *, special: bool = True) -> bytes:
        """The bytes of one token; several tokens may make one UTF-8 character. Raises :class:`InvalidToken`."""
        try:
            token = operator.index(token)
        except TypeError:
            raise InvalidToken(f"token id {token!r} is a {type(token).__name__}; give an integer") from None
        if not 0 <= token < self.n_vocab:
            raise InvalidToken(f"token id {token} is outside the vocabulary of {self.n_vocab}")
        handle = self._handle
        if (known := self._pieces.get((token, special))) is None:
            known = self._pieces[token, special] = self._read_piece(handle, token, special)
        return known

    def _read_piece(self, handle: Any, token: int, special: bool) -> bytes:
        ffi, lib = self._native.ffi, self._native.lib
        room = 64
        while True:
            out, n = ffi.new("char[]", room), ffi.new("int32_t *")
            self._native.check(lib.dgr_vocab_piece(handle, token, special, out, room, n), "detokenize")
            if n[0] <= room:
                return bytes(ffi.buffer(out, n[0]))
            room = n[0]

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.piece(token) for token in tokens).decode("utf-8", "replace")

    def close(self) -> None:
        """Free the tokenizer; idempotent."""
        if self._vocab is not None:
            self._native.lib.dgr_vocab_close(self._vocab)
            self._vocab = None

    def __enter__(self) -> LlamaVocabulary:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
