"""The transfer engines behind channels, where they are installed."""

from __future__ import annotations

import pytest

WHY = {
    "mooncake": "Mooncake is not installed: make mooncake",
    "nixl": "NIXL is not installed: make nixl",
}
MODULES = {"mooncake": "mooncake.engine", "nixl": "nixl._api"}


def need(channel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where what ``channel`` needs is not installed; keep it on the loopback interface."""
    if channel in MODULES:
        pytest.importorskip(MODULES[channel], reason=WHY[channel], exc_type=ImportError)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
