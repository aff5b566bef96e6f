"""Certificates for stages, and the ways in which a link may be protected."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.remote_stages import HANDSHAKE, Authority

from dgr.cluster.connect import LinkPolicy


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture(params=["plain", "tls"])
def policy(request: pytest.FixtureRequest, authority: Authority) -> LinkPolicy:
    """How stages and clients on loopback speak: in the clear, or over TLS with certificates of one CA."""
    if request.param == "tls":
        return authority.policy("127.0.0.1")
    return LinkPolicy(handshake=HANDSHAKE)
