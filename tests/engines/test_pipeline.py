"""Pipelined hand-offs in real processes: the same cache as unpipelined, sessions that go on, failures in the middle."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from kvferry.channel import Outgoing
from kvferry.channel.socket import SocketReceiver, SocketSender
from kvferry.engines.handoff import HandoffJob, Session
from kvferry.engines.handoff.job import HandoffNames
from kvferry.engines.handoff.orders import LOOPBACK, Order, Setting, both_ends
from kvferry.engines.handoff.send import LayerSender
from kvferry.errors import InvalidInput, TransferFailed, UnsupportedCache
from kvferry.hf.identity import identity_of
from kvferry.hf.stream import stream_capture
from kvferry.hf.tokens import as_mask, positions_of
from kvferry.ship.reader import PacketReader
from kvferry.ship.stream import StreamPlan, stand_in_for, stream_plan
from tests.cli import models
from tests.cli.models import environment
from tests.hf import tiny

pytestmark = pytest.mark.usefixtures("source_on_path")


@pytest.fixture(scope="module")
def source_on_path() -> None:
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]


def job(model: str, **changes: object) -> HandoffJob:
    settings = {"budget": 1.0, "max_tokens": 300, "max_new": 8, "timeout": 60.0, "threads": 1, **changes}
    return HandoffJob(**{"producer_model": model, "consumer_model": model, **settings})  # type: ignore[arg-type]


def test_one_session_does_hand_off_after_hand_off(llama_folder: str) -> None:
    with Session() as session:
        exact = session.run(job(llama_folder))
        plain = session.run(job(llama_folder, pipeline=False))
        few = session.run(job(llama_folder, budget=0.6, max_tokens=200))
        again = session.run(job(llama_folder, budget=0.6, max_tokens=200))
        ahead = session.run(job(llama_folder, budget=0.6, max_tokens=200, pipeline=False, plan_ahead=True))
        pids = {child.process.pid for child in session._children.values()}
        assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert (exact.pipelined, exact.why_not_pipelined) == (True, None)
    assert (plain.pipelined, plain.why_not_pipelined) == (False, "not asked for")
    assert exact.packet_bytes == plain.packet_bytes
    assert exact.tokens_equal
    assert plain.tokens_equal
    assert exact.token_ids == plain.token_ids
    assert exact.kl_mean == plain.kl_mean == 0.0
    assert few.prompt_tokens == 200
    assert few.scorer == "observation_window of each layer"
    assert few.packet_bytes <= 0.6 * few.full_bytes
    assert (few.kl_mean, few.token_ids) == (again.kl_mean, again.token_ids)
    assert few.link is None
    assert (ahead.pipelined, ahead.packet_bytes, ahead.scorer) == (False, few.packet_bytes, few.scorer)
    assert (ahead.kl_mean, ahead.token_ids) == (few.kl_mean, few.token_ids)


def test_a_later_layer_that_is_not_finite_is_one_typed_error(tmp_path: Path) -> None:
    model = tiny.llama(dtype=torch.bfloat16, max_position_embeddings=2048)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("inf")
    folder = models.save(model, tmp_path)
    with Session() as session:
        with pytest.raises(UnsupportedCache, match=r"layer 1.*NaN or infinity.*--no-pipeline"):
            session.run(job(folder, budget=0.6))
        with pytest.raises(TransferFailed, match="an earlier hand-off"):
            session.run(job(folder))


class _Slow:
    """A plan that is slow to make frames, or fails at one of them."""

    def __init__(self, plan: StreamPlan, seconds: float = 0.0, fails_at: int | None = None):
        self.plan, self.seconds, self.fails_at = plan, seconds, fails_at

    def __getattr__(self, name: str) -> object:
        return getattr(self.plan, name)

    def layer_frames(self, index, layer):
        if index == self.fails_at:
            raise UnsupportedCache("this layer cannot be carried")
        for frame in self.plan.layer_frames(index, layer):
            time.sleep(self.seconds)
            yield frame


def prepared(**slow: object):
    model, ids = tiny.llama(dtype=torch.bfloat16), torch.arange(3, 60).unsqueeze(0)
    mask = as_mask(None, ids)
    plan = stream_plan(stand_in_for(identity_of(model), ids, positions_of(mask), mask), 1.0)
    return model, ids, _Slow(plan, **slow)  # type: ignore[arg-type]


def test_layers_are_at_the_consumer_before_the_prefill_is_over() -> None:
    """The prefill itself waits for the consumer to have the first layer: it would wait for ever if nothing was sent."""
    model, ids, plan = prepared()
    got = threading.Event()
    with SocketSender() as server, server.announce("x") as outgoing:
        reader: list[PacketReader] = []

        def fetch() -> None:
            with SocketReceiver(server.address, timeout=20.0).fetch("x") as incoming:
                reader.append(PacketReader(incoming.header, want=identity_of(model)))
                for arrival in incoming.frames():
                    reader[0].add(arrival.data)
                    got.set()
                incoming.confirm()

        consumer = threading.Thread(target=fetch)
        consumer.start()
        with LayerSender(lambda: plan, outgoing, b"") as sender:

            def take(index: int, layer) -> None:
                if index == 1:
                    assert got.wait(20.0)
                sender.take(index, layer)

            snapshot = stream_capture(model, ids, take)
        outgoing.finish(20.0)
        consumer.join()
    shipped = reader[0].snapshot()
    for source, back in zip(snapshot.layers, shipped.layers, strict=True):
        assert torch.equal(source.keys, back.keys)
        assert torch.equal(source.values, back.values)


def test_the_last_frame_is_waited_for_and_a_failed_one_raises() -> None:
    model, ids, slow = prepared(seconds=0.2)
    with SocketSender() as server, server.announce("x") as outgoing:
        with LayerSender(lambda: slow, outgoing, b"") as sender:
            stream_capture(model, ids, sender.take)
        assert len(outgoing.frames) == 2
        assert sender.encode.busy > 0.4e9
    _, _, failing = prepared(fails_at=1)

    def fail(outgoing: Outgoing) -> None:
        with LayerSender(lambda: failing, outgoing, b"") as sender:
            stream_capture(model, ids, sender.take)

    with SocketSender() as server, server.announce("x") as outgoing:
        with pytest.raises(UnsupportedCache, match="cannot be carried"):
            fail(outgoing)
        assert len(outgoing.frames) == 1


def test_a_failed_plan_ends_the_prefill() -> None:
    model, ids, _ = prepared()
    ran: list[int] = []

    def refuse() -> StreamPlan:
        raise InvalidInput("no such plan")

    def fail(outgoing: Outgoing) -> None:
        with LayerSender(refuse, outgoing, b"") as sender:
            sender._thread.join(10.0)
            for index, layer in enumerate(model.model.layers):
                layer.register_forward_hook(lambda *_, index=index: ran.append(index))
            stream_capture(model, ids, sender.take)

    with (
        SocketSender() as server,
        server.announce("x") as outgoing,
        pytest.raises(InvalidInput, match="no such plan"),
    ):
        fail(outgoing)
    assert ran == []


def test_orders_and_settings_come_back_and_other_text_is_refused() -> None:
    order = Order(job("x", budget=0.5, link="1gbit", pipeline=False), HandoffNames.new())
    assert Order.from_json(order.to_json()) == order
    one, other = both_ends("10.0.0.1")
    for setting in (Setting(), one, other):
        assert Setting.from_json(setting.to_json()) == setting
    assert Setting().listen == LOOPBACK
    assert Setting().producer_keys is None
    assert one.producer_keys.consumers == {other.own.public}
    assert other.consumer_keys.producer == one.own.public
    assert one.own.secret.decode() not in repr(one)
    for text in ("", "[]", "{}", "1", '{"listen": "x"}', '{"listen": "x", "keys": ["a"]}', "[" * 100_000):
        with pytest.raises(InvalidInput):
            Setting.from_json(text)
        with pytest.raises(InvalidInput):
            Order.from_json(text)
