"""What NIXL alone does; what every engine does is in `test_tickets`."""

from __future__ import annotations

import pytest

from kvferry.channel.nixl import NixlSender
from kvferry.errors import InvalidInput
from tests.channel.engines import need


def test_a_backend_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    need("nixl", monkeypatch)
    with pytest.raises(InvalidInput, match="no backend 'TELEPATHY'"):
        NixlSender(backend="TELEPATHY")
