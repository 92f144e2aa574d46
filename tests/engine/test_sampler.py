"""Draws against exact distributions."""

import time

import numpy as np
import pytest
import torch

from marlaas.engine.sampler import SamplingBatch, sample, uniforms
from marlaas.types import SamplingParams

torch.set_num_threads(1)


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, **fields})  # type: ignore[arg-type]


def draw(logits_NV: torch.Tensor, rows: list[SamplingParams], positions=None):
    positions = np.arange(len(rows)) if positions is None else np.asarray(positions)
    return sample(logits_NV.clone(), SamplingBatch.build(rows, logits_NV.shape[1]), positions)


def truncated_naively(logits_V: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """Return the processed distribution, token by token, in fp64."""
    probability_V = (logits_V.double() / p.temperature).softmax(-1)
    order = probability_V.argsort(descending=True, stable=True).tolist()
    kept, mass = [], 0.0
    for rank, token in enumerate(order):
        is_kept = (not p.top_k or rank < p.top_k) and (p.top_p >= 1.0 or mass < p.top_p)
        is_kept &= bool(probability_V[token] >= p.min_p * probability_V.max())
        if is_kept or not kept:
            kept.append(token)
        mass += float(probability_V[token])
    out_V = torch.zeros_like(probability_V)
    out_V[kept] = probability_V[kept]
    return out_V / out_V.sum()


def test_uniforms_depend_on_seed_and_position_alone_and_look_uniform():
    seeds = np.arange(300, dtype=np.uint64)
    table = np.array([uniforms(seeds, np.full(300, position)) for position in range(300)])
    assert ((table >= 0) & (table < 1)).all()
    assert len(np.unique(table)) == table.size
    one = uniforms(np.array([7], dtype=np.uint64), np.array([11]))
    assert one[0] == table[11, 7]
    counts, _ = np.histogram(table, bins=100, range=(0, 1))
    chi_square = ((counts - 900) ** 2 / 900).sum()
    assert chi_square < 149  # The 0.999 quantile of chi-square with 99 degrees of freedom.
    # Neighbours in either direction are uncorrelated: 5 standard errors of 90,000 pairs.
    centred = table - 0.5
    up, down, left, right = centred[1:], centred[:-1], centred[:, :-1], centred[:, 1:]
    for one, other in ((up, down), (left, right), (up[:, 1:], down[:, :-1])):
        assert abs((one * other).mean() * 12) < 5 / 300


def test_any_64_bit_seed_is_accepted():
    rows = [params(seed=seed) for seed in (0, -1, 2**63, 2**64 - 1)]
    assert draw(torch.randn(4, 50), rows).is_finite_N.all()


CASES = [
    params(),
    params(temperature=0.7),
    params(temperature=1.6, top_k=7),
    params(top_p=0.6),
    params(min_p=0.15),
    params(temperature=1.2, top_k=12, top_p=0.8, min_p=0.05),
]


@pytest.mark.parametrize("vocab_size", [19, 300, 2200])
def test_draws_follow_the_processed_distribution(vocab_size):
    torch.manual_seed(vocab_size)
    num_draws = 4000
    for idx, case in enumerate(CASES):
        logits_V = 2 * torch.randn(vocab_size)
        expected_V = truncated_naively(logits_V, case)
        rows = [params(**{**_fields(case), "seed": seed}) for seed in range(num_draws)]
        samples = draw(logits_V.expand(num_draws, -1), rows, np.full(num_draws, idx))
        counts_V = torch.bincount(samples.token_N, minlength=vocab_size).double()
        assert not counts_V[expected_V == 0].any()
        # Tokens that are expected less than five times are counted as one.
        common = expected_V * num_draws >= 5
        observed = torch.cat([counts_V[common], counts_V[~common].sum()[None]])
        expected = torch.cat([expected_V[common], expected_V[~common].sum()[None]]) * num_draws
        observed, expected = observed[expected > 0], expected[expected > 0]
        chi_square = float(((observed - expected) ** 2 / expected).sum())
        freedom = len(expected) - 1
        assert chi_square < freedom + 4 * (2 * freedom) ** 0.5 + 8
        logprob_N = expected_V[samples.token_N].log()
        torch.testing.assert_close(samples.logprob_N.double(), logprob_N, atol=2e-6, rtol=0)


def _fields(p: SamplingParams) -> dict[str, object]:
    return {name: getattr(p, name) for name in ("temperature", "top_k", "top_p", "min_p")}


@pytest.mark.parametrize("vocab_size", [777, 2048, 2049, 8192])
def test_a_draw_is_where_the_cumulative_mass_passes_the_uniform_number(vocab_size):
    torch.manual_seed(0)
    logits_NV = 3 * torch.randn(200, vocab_size)
    rows = [params(seed=seed) for seed in range(200)]
    position_N = np.arange(200)
    samples = draw(logits_NV, rows, position_N)
    mass_NV = logits_NV.double().softmax(-1).cumsum(-1)
    uniform_N1 = torch.from_numpy(uniforms(np.arange(200, dtype=np.uint64), position_N))[:, None]
    expected_N = torch.searchsorted(mass_NV, uniform_N1, right=True)[:, 0]
    assert samples.token_N.tolist() == expected_N.tolist()
    expected = logits_NV.log_softmax(-1).gather(1, expected_N[:, None])[:, 0]
    torch.testing.assert_close(samples.logprob_N, expected, atol=1e-5, rtol=0)


def test_temperature_zero_takes_the_most_likely_token_with_its_logprob_at_temperature_one():
    logits_NV = torch.randn(5, 300)
    rows = [params(temperature=0.0, seed=1, top_k=3)] * 3 + [params(seed=4), params(top_p=0.3)]
    samples = draw(logits_NV, rows)
    assert samples.token_N[:3].tolist() == logits_NV[:3].argmax(-1).tolist()
    expected_N = logits_NV.log_softmax(-1).amax(-1)[:3]
    torch.testing.assert_close(samples.logprob_N[:3], expected_N, atol=1e-6, rtol=0)


@pytest.mark.parametrize("vocab_size", [700, 2500])
def test_a_token_without_mass_is_never_drawn(vocab_size):
    logits_V = torch.full((vocab_size,), -200.0)
    logits_V[[3, 250, 699]] = torch.tensor([0.0, 0.0, -1.0])
    rows = [params(seed=seed) for seed in range(3000)]
    samples = draw(logits_V.expand(3000, -1), rows)
    assert set(samples.token_N.tolist()) == {3, 250, 699}


@pytest.mark.parametrize("vocab_size", [1500, 2500])
def test_a_row_with_nan_or_infinity_is_reported_and_changes_no_other(vocab_size):
    torch.manual_seed(1)
    logits_NV = torch.randn(12, vocab_size)
    rows = [params(**{**_fields(case), "seed": idx}) for idx, case in enumerate(CASES * 2)]
    rows[11] = params(temperature=0.0)
    clean = draw(logits_NV, rows)
    assert clean.is_finite_N.all()
    dirty_NV = logits_NV.clone()
    dirty_NV[0] = torch.nan
    dirty_NV[3, 7] = torch.nan
    dirty_NV[4, 1499] = torch.inf
    dirty_NV[8, 0] = -torch.inf
    dirty_NV[9] = -torch.inf
    dirty_NV[11, 5] = torch.nan
    dirty = draw(dirty_NV, rows)
    bad = [0, 3, 4, 8, 9, 11]
    good = [row for row in range(12) if row not in bad]
    assert not dirty.is_finite_N[bad].any() and dirty.is_finite_N[good].all()
    assert torch.equal(dirty.token_N[good], clean.token_N[good])
    assert torch.equal(dirty.logprob_N[good], clean.logprob_N[good])
    assert ((dirty.token_N >= 0) & (dirty.token_N < vocab_size)).all()


@pytest.mark.parametrize("vocab_size", [1000, 3000])
def test_a_row_is_drawn_alone_as_in_company(vocab_size):
    torch.manual_seed(2)
    logits_NV = 2 * torch.randn(len(CASES), vocab_size)
    rows = [params(**{**_fields(case), "seed": idx}) for idx, case in enumerate(CASES)]
    together = draw(logits_NV, rows)
    for row in range(len(rows)):
        alone = draw(logits_NV[row : row + 1], rows[row : row + 1], [row])
        assert alone.token_N[0] == together.token_N[row]
        assert alone.logprob_N[0] == together.logprob_N[row]


def test_a_nucleus_wider_than_the_candidates_is_found():
    torch.manual_seed(3)
    logits_V = 0.1 * torch.randn(5000)
    case = params(top_p=0.9)
    expected_V = truncated_naively(logits_V, case)
    assert (expected_V > 0).sum() > 4000
    samples = draw(logits_V.expand(500, -1), [params(top_p=0.9, seed=seed) for seed in range(500)])
    expected_N = expected_V[samples.token_N].log()
    torch.testing.assert_close(samples.logprob_N.double(), expected_N, atol=2e-6, rtol=0)


def test_64_rows_of_a_large_vocabulary_take_milliseconds():
    logits_NV = torch.randn(64, 49152)
    rows = [params(seed=seed, temperature=0.9) for seed in range(64)]
    batch = SamplingBatch.build(rows, 49152)
    times = []
    for step in range(7):
        scratch_NV = logits_NV.clone()
        start_s = time.process_time()
        sample(scratch_NV, batch, np.full(64, step))
        times.append(time.process_time() - start_s)
    # About 10 ms on the slowest machine it was tried on; a generator per row takes over 100.
    assert min(times) < 0.05
