"""Bytes on a link: the closed message union, the sans-I/O framer, and the links that carry frames."""

from __future__ import annotations

from dgr.wire import frames
from dgr.wire.framing import Framer, Limits, Received, encode
from dgr.wire.links import Link, open_link
from dgr.wire.memory import memory_transports

__all__ = ["Framer", "Limits", "Link", "Received", "encode", "frames", "memory_transports", "open_link"]
