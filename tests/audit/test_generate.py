"""Free decoding: as transformers decodes, and with shared randomness."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from kvferry.audit.arm import CACHE_OFF, CACHE_ON, Arm
from kvferry.audit.generate import (
    Generated,
    build_cache,
    first_split,
    generate,
    generate_until_split,
    recompute_screened,
)
from kvferry.audit.models import ModelSet
from kvferry.audit.sample import SAMPLERS, Sampler
from kvferry.errors import InvalidInput
from tests.hf import tiny


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def models(request: pytest.FixtureRequest) -> ModelSet:
    return ModelSet(getattr(tiny, request.param)(dtype=torch.bfloat16))


def test_cache_on_is_what_generate_gives(models: ModelSet) -> None:
    prompt = tiny.prompt(1, 12)
    want = models.own.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, 12:].tolist()
    assert generate(models, CACHE_ON, prompt, 8).tokens == want


def test_cache_off_is_what_forward_gives(models: ModelSet) -> None:
    tokens = tiny.prompt(1, 12)
    for _ in range(5):
        with torch.no_grad():
            following = models.own(tokens, use_cache=False).logits[0, -1].argmax()
        tokens = torch.cat([tokens, following.reshape(1, 1)], dim=1)
    assert generate(models, CACHE_OFF, tiny.prompt(1, 12), 5).tokens == tokens[0, 12:].tolist()


def test_an_end_ends(models: ModelSet) -> None:
    whole = generate(models, CACHE_ON, tiny.prompt(1, 12), 8)
    end = whole.tokens[3]
    short = generate(models, CACHE_ON, tiny.prompt(1, 12), 8, ends=[end])
    assert short.ended
    assert short.tokens == whole.tokens[: whole.tokens.index(end) + 1]


def test_a_cache_put_back_goes_on_alike(models: ModelSet) -> None:
    prompt = tiny.prompt(1, 12)
    for construction in ("prefill", "incremental", "chunked(4)", "decoded(3)"):
        cache = build_cache(models, Arm(construction), prompt[:, :-1])
        one = generate(models, CACHE_ON, prompt, 6, start=cache, keep_logits=True)
        two = generate(models, CACHE_ON, prompt, 6, start=cache.clone(), keep_logits=True)
        assert one.tokens == two.tokens
        assert all(torch.equal(a, b) for a, b in zip(one.logits, two.logits, strict=True))


def test_the_same_logits_draw_the_same_token() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    for sampler in SAMPLERS.values():
        assert sampler.choose(logits, 3, 4) == sampler.choose(logits.clone(), 3, 4)
    drawn = {SAMPLERS["temperature"].choose(logits, 0, step)[0] for step in range(40)}
    assert len(drawn) > 5


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    sampler = Sampler("t", temperature=0.8)
    counts = torch.zeros(4)
    for sequence in range(3000):
        counts[sampler.choose(logits, sequence, 0)[0]] += 1
    expected = (logits / 0.8).softmax(-1) * 3000
    assert stats.chisquare(counts.numpy(), expected.numpy() / expected.sum().item() * 3000).pvalue > 0.001


def test_what_is_kept() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -5.0])
    drawn = {Sampler("k", temperature=2.0, top_k=2).choose(logits, 0, step)[0] for step in range(200)}
    assert drawn == {0, 1}
    p = logits.softmax(-1)
    drawn = {Sampler("p", 1.0, top_p=float(p[0] + p[1] / 2)).choose(logits, 0, step)[0] for step in range(200)}
    assert drawn == {0, 1}


def test_first_split() -> None:
    assert first_split([1, 2, 3], [1, 2, 3]) is None
    assert first_split([1, 2, 3], [1, 9, 3]) == 1
    assert first_split([1, 2], [1, 2, 3]) == 2
    assert first_split([], []) is None


def test_what_is_refused(models: ModelSet) -> None:
    with pytest.raises(InvalidInput):
        generate(models, Arm(batch=2), tiny.prompt(1, 8), 2)
    with pytest.raises(InvalidInput):
        generate(models, CACHE_ON, tiny.prompt(2, 8), 2)
    with pytest.raises(InvalidInput):
        Sampler(top_p=0.0)


def test_both_end_with_their_split(models: ModelSet) -> None:
    prompt = tiny.prompt(1, 12)
    for sampler in (SAMPLERS["greedy"], SAMPLERS["temperature"]):
        off, on = generate_until_split(models, (CACHE_OFF, CACHE_ON), prompt, 9, sampler, sequence=4)
        for arm, run in ((CACHE_OFF, off), (CACHE_ON, on)):
            whole = generate(models, arm, prompt, 9, sampler, sequence=4)
            assert run.tokens == whole.tokens[: len(run.tokens)]
            assert run.margins == whole.margins[: len(run.tokens)]
        split = first_split(off.tokens, on.tokens)
        assert split is None or split == len(on.tokens) - 1
    with pytest.raises(InvalidInput):
        generate_until_split(models, (CACHE_OFF, Arm(dtype="float32")), prompt, 2)


def test_screened_recomputation_chooses_what_recomputation_does(models: ModelSet) -> None:
    exact = ModelSet(models.get("float32"))
    prompt = tiny.prompt(1, 12)
    for of, least in ((models, 0), (exact, 6)):
        on = generate(of, CACHE_ON, prompt, 8, keep_logits=True)
        found = recompute_screened(of, CACHE_OFF, prompt, on, 8, 8.0)
        assert found.tokens == generate(of, CACHE_OFF, prompt, 8).tokens
        assert 8 - found.recomputed >= least
    other = Generated([(token + 1) % 128 for token in on.tokens], on.margins, on.logits)
    found = recompute_screened(exact, CACHE_OFF, prompt, other, 8, 8.0)
    assert (found.tokens, found.recomputed) == (generate(exact, CACHE_OFF, prompt, 8).tokens, 8)
    with pytest.raises(InvalidInput):
        recompute_screened(exact, CACHE_OFF, prompt, on, 8, 1.0)


def test_a_split_at_the_edge_of_what_is_drawn_from_is_told() -> None:
    sampler = Sampler("top_k", temperature=1.0, top_k=2)
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    assert [sampler.keeps(logits, token) for token in range(4)] == [True, True, False, False]
    nucleus = Sampler("top_p", temperature=1.0, top_p=0.9)
    assert [nucleus.keeps(logits, token) for token in range(4)] == [True, True, True, False]
    assert Sampler().keeps(logits, 3)


def test_the_last_logits_before_a_split_are_kept(models: ModelSet) -> None:
    runs = generate_until_split(models, (CACHE_OFF, CACHE_ON), tiny.prompt(1, 12), 5)
    assert [run.logits[-1].argmax().item() for run in runs] == [run.tokens[-1] for run in runs]
