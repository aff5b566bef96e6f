"""A server on loopback over a model that says what it is told to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest
from serving.http.http_servers import Server, open_server


@pytest.fixture
def serve() -> Callable[..., AbstractAsyncContextManager[Server]]:
    """``async with serve(sessions=1) as server``: a server that ends with the block."""
    return open_server
