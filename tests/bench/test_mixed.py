"""The benchmark of shared batches measures, sums up and writes what it says."""

import json
from dataclasses import replace

import pytest

from marlaas.bench import machine, mixed, synthetic
from tests.models import random_llama

SMALL = mixed.Plan(
    num_adapters=8,
    batch_sizes=(8,),
    policy_tokens=(8, 100),
    decode_rounds=2,
    decode_steps=2,
    update_rounds=2,
)


@pytest.fixture(scope="module")
def rows():
    return mixed.measure(random_llama(), SMALL, report=lambda line: None)


def test_every_row_compares_equal_work(rows):
    assert [row.tokens for row in rows] == [8, 8, 64, 800]
    for row in rows:
        assert row.together_s > 0
        assert row.apart_s > 0
        assert min(row.ratios) <= row.ratio <= max(row.ratios)


def test_the_summary_takes_the_smaller_ratio_of_the_bases():
    fast = mixed.Measured(
        name="update, 16 tokens a policy", together_s=1, apart_s=3, tokens=1, ratios=(3.0,)
    )
    slow = replace(fast, ratios=(1.0, 2.0, 9.0))
    assert mixed.summarize({"a": [fast], "b": [slow]}) == {"fused_speedup_16_tokens": 2.0}


def test_the_data_of_a_policy_have_as_many_tokens_as_they_should():
    base = random_llama()
    for num_tokens in (16, 64, 128, 130):
        data = synthetic.random_data(base, num_tokens, seed=0)
        assert sum(len(datum.tokens) for datum in data) == num_tokens
        assert all(0 < datum.weights.sum() < len(datum.tokens) for datum in data)


def test_the_report_is_a_table_a_plot_and_the_figures(rows, tmp_path):
    result = {
        "machine": machine.describe(),
        "probe": machine.probe(),
        "num_adapters": 8,
        "num_threads": 1,
        "clock": "CPU time",
    }
    mixed.write_report(tmp_path, result, {"random": rows})
    assert json.loads((tmp_path / "mixed.json").read_text())["machine"]["cores"] >= 1
    table = (tmp_path / "mixed.md").read_text()
    assert table.count("| random |") == len(rows)
    assert (tmp_path / "mixed.png").stat().st_size > 1000


def test_the_probe_takes_about_a_second_and_finds_rates():
    rates = machine.probe()
    assert rates["gemm_gflops"] > 0.1
    assert rates["read_gb_per_s"] > 0.1
