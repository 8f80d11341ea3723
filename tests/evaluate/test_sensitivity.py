"""Sensitivities of a real model: found, kept, and taken up by the policy ``optimal``."""

import pytest

import kvferry as kv
from kvferry.evaluate.method import Method
from kvferry.evaluate.perplexity import PreparedWindow
from kvferry.evaluate.scores import fidelity
from kvferry.evaluate.sensitivity import calibrate_sensitivity
from kvferry.evaluate.windows import cut_windows
from kvferry.hf.text import default_text
from kvferry.ship.encode import decode, pack
from kvferry.ship.plan import plan
from kvferry.ship.sensitivity import kept


@pytest.fixture(scope="module")
def found(smollm2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    return folder, calibrate_sensitivity(*smollm2, windows=1, prefix=192, suffix=96, cache=folder)


def test_found_once_and_kept(smollm2, found, prepared):
    folder, first = found
    told = []
    again = calibrate_sensitivity(*smollm2, windows=9, cache=folder, on_progress=told.append)
    assert not told
    assert again.to_json() == kept(prepared.snapshot.identity, folder).to_json() == first.to_json()


def test_it_beats_every_other_policy_at_equal_bytes(smollm2, found):
    """On other text than it was found on."""
    model, tokenizer = smollm2
    text = default_text()[200_000:]
    window = PreparedWindow(model, cut_windows(tokenizer, text, windows=1, prefix=448, suffix=96)[0])
    made = plan(window.snapshot, 0.285, "auto", sensitivity=found[1])
    packet = pack(made)
    assert packet.policy == "optimal"
    ours = fidelity([window.score(decode(packet))]).kl_mean
    for policy, quantizers in (("sink_protect", None), ("greedy", None), ("sink_protect", "sym8/chan4b128:asym4g64")):
        nominal = None if quantizers is None else 0.25
        method = Method(policy, None if nominal else 0.285, nominal, quantizers)
        other = window.judge(method)
        assert other.nbytes >= 0.97 * len(packet), policy
        assert ours < fidelity([other.scores]).kl_mean, (policy, quantizers)


def test_an_own_text_is_no_reason_to_take_a_kept_answer(smollm2, found):
    told = []
    calibrate_sensitivity(
        *smollm2,
        text=default_text()[50_000:90_000],
        windows=1,
        prefix=64,
        suffix=16,
        cache=False,
        on_progress=told.append,
    )
    assert told == ["window 1 of 1"]
    with pytest.raises(kv.errors.InvalidInput, match="enough for"):
        calibrate_sensitivity(*smollm2, text="short", cache=False)
