"""The benchmark of the engine compares equal work and says how far from the limit it is."""

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from marlaas.bench import engine
from marlaas.bench.synthetic import random_data
from marlaas.model.base import BaseModel
from tests.models import random_llama

SMALL = engine.Plan(new_tokens=6, rounds=1, budget_tokens=128)
PROBE = {"gemm_gflops": 1.0, "read_gb_per_s": 1.0}


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return random_llama()


@pytest.fixture(scope="module")
def limits(base: BaseModel) -> engine.Limits:
    return engine.Limits.of(base, PROBE)


def stock(base: BaseModel) -> LlamaForCausalLM:
    return LlamaForCausalLM(base.stock_config)


def test_the_weights_of_layers_and_head_are_all_that_is_multiplied(base, limits) -> None:
    linears = sum(shape.in_features * shape.out_features for shape in base.bank.modules)
    assert limits.layer_weights + limits.head_weights == linears


def test_the_limit_of_a_decode_step_is_arithmetic_or_memory_whichever_is_longer(limits) -> None:
    one = limits.decode_s([100], 0)
    flop = 2 * (limits.layer_weights + limits.head_weights + limits.adapter_weights)
    assert one == pytest.approx((flop + 4 * limits.num_layers * limits.query_width * 100) / 1e9)
    assert limits.decode_s([100] * 4, 0) == pytest.approx(4 * one)  # all of it lies in the caches


def test_the_limit_of_training_counts_the_head_for_scored_tokens_only(base, limits) -> None:
    (datum,) = random_data(base, 32, 0)
    everything = 4 * limits.layer_weights + 6 * limits.adapter_weights
    flop = everything * 31 + 4 * limits.head_weights * np.count_nonzero(datum.weights)
    flop += 7 * limits.num_layers * limits.query_width * 31**2
    assert limits.train_s([datum]) == pytest.approx(flop / 1e9)


def test_generations_are_measured_against_transformers(base, limits) -> None:
    row = engine.measure_decode(base, stock(base), limits, SMALL, [6, 6, 6])
    assert row.tokens == 18
    assert row.others["transformers"] > 0
    assert row.fraction > 0


def test_updates_are_measured_against_one_at_a_time_and_peft(base, limits) -> None:
    row = engine.measure_train(base, lambda: stock(base), limits, SMALL, 16)
    assert row.tokens == 16 * engine.NUM_POLICIES
    assert set(row.others) == {"one at a time", "PEFT"}


def test_ragged_lengths_reach_the_longest_and_are_short_on_average() -> None:
    lengths = engine.ragged_lengths(200, 60)
    assert max(lengths) == 60
    assert min(lengths) >= 1
    assert 10 < np.mean(lengths) < 30
