"""Names of quantisers, short."""

from __future__ import annotations

import pytest

from kvferry.report.tables import brief_quantizers


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("raw+cen8g64+cen6g64+cen4g64 / raw+had8g64+had2g64", "raw+cen8,6,4g64 / raw+had8,2g64"),
        ("sym8+chan4b128 / sym8+sym4", "sym8+chan4b128 / sym8,4"),
        ("asym8row+asym4g64 / raw", "asym8row+asym4g64 / raw"),
        ("klt / klt", "klt / klt"),
        ("", ""),
    ],
)
def test_what_differs_by_its_bits_alone_is_one(text: str, short: str) -> None:
    assert brief_quantizers(text) == short
