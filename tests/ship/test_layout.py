"""Frames cover every held token of every layer exactly once, whatever their size."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.ship.layout import Layout
from kvferry.snapshot import FULL, LayerKind
from tests.snapshot.builders import SLIDING, make_identity

KINDS = [FULL, SLIDING, LayerKind("shared", 0), LayerKind("sliding", 2)]


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=0, max_size=5),
    seq_len=st.integers(1, 60),
    frame_tokens=st.integers(0, 70),
)
def test_frames_cover_the_cache(kinds, seq_len, frame_tokens):
    kinds = [FULL, *kinds]
    layout = Layout.of(make_identity(kinds), seq_len, frame_tokens)
    slots = list(layout)
    assert len(slots) == layout.count
    assert [slot.index for slot in slots] == list(range(layout.count))
    for layer, kind in enumerate(kinds):
        covered = [t for slot in slots if slot.first_layer == layer for t in range(slot.start, slot.stop)]
        assert covered == list(range(seq_len - kind.held(seq_len), seq_len))
    for slot in slots:
        assert slot.last_layer == slot.first_layer + 1
        assert slot.start < slot.stop
        if frame_tokens:
            assert slot.start // frame_tokens == (slot.stop - 1) // frame_tokens
            assert slot.tokens <= frame_tokens
    starts = [slot.start for slot in slots]
    assert len({(slot.first_layer, start) for slot, start in zip(slots, starts, strict=True)}) == layout.count


def test_it_costs_nothing_to_describe_a_great_many_frames():
    layout = Layout.of(make_identity([FULL] * 100), 10**9, 1)
    assert layout.count == 10**11
    assert (layout.slot(10**11 - 1).first_layer, layout.slot(10**11 - 1).stop) == (99, 10**9)
