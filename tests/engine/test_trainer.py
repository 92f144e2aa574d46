"""The trainer's verbs: what each changes, refuses and gives back. Numbers are in tests/parity."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from marlaas.engine.adapter_io import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    hash_adapter,
    save_adapter,
    target_kinds,
)
from marlaas.engine.pass_memory import PassMemory, PassSize
from marlaas.engine.trainer import LoraTrainer
from marlaas.errors import InvalidRequest, NotFound
from marlaas.types import AdamParams, AdapterSpec, Datum, Objective
from tests.engine.data import VOCAB, host, random_datum, random_group, with_wide_norms
from tests.models import random_llama

torch.set_num_threads(1)

DPPO = Objective(name="dppo_tis")
SPEC = AdapterSpec(rank=4, targets=("attention", "head"))


def some_data(seed: int = 0) -> list[Datum]:
    return random_group(np.random.default_rng(seed), 5, [7, 4, 9])


def run_all(trainer: LoraTrainer) -> dict:
    finished = {}
    while trainer.has_work:
        done, work = trainer.step()
        assert work is not None and work.kind in ("train", "score")
        finished |= dict(done)
    return finished


def test_a_fresh_policy_is_the_base_model() -> None:
    base = random_llama()
    trainer = LoraTrainer(base)
    spec = AdapterSpec(rank=5, seed=3, targets=("attention", "mlp", "head"))
    trainer.create("p", spec)
    assert trainer.version("p") == 0
    slot = base.bank.allocate(rank=5, scale=1.0, kinds=target_kinds(spec))
    base.bank.write(slot, trainer.weights("p"))
    trainer.submit_forward("p", slot, some_data(), "policy")
    trainer.submit_forward(None, None, some_data(), "base")
    finished = run_all(trainer)
    for own, stock in zip(finished["policy"], finished["base"], strict=True):
        assert np.array_equal(own.logprobs, stock.logprobs)


def test_equal_seeds_make_equal_policies() -> None:
    trainer = LoraTrainer(random_llama())
    for key, seed in (("a", 1), ("b", 1), ("c", 2)):
        trainer.create(key, AdapterSpec(seed=seed))
    assert trainer.adapter_hash("a") == trainer.adapter_hash("b") != trainer.adapter_hash("c")


def test_forward_scores_every_token_but_the_first_at_the_datums_temperature() -> None:
    base = random_llama()
    trainer = LoraTrainer(base)
    slot = host(trainer, "p", SPEC)
    data = [
        replace(datum, temperature=t) for datum, t in zip(some_data(), (1, 0.5, 2), strict=True)
    ]
    trainer.submit_forward("p", slot, data, 0)
    for datum, output in zip(data, run_all(trainer)[0], strict=True):
        assert output.logprobs.shape == datum.tokens.shape
        assert output.logprobs[0] == 0 and (output.logprobs[1:] < 0).all()
        assert output.loss == 0 and not output.counts
    hot, cold = (
        trainer.submit_forward("p", slot, [replace(data[0], temperature=t)], t) for t in (1e6, 1.0)
    )
    assert hot is cold is None
    np.testing.assert_allclose(run_all(trainer)[1e6][0].logprobs[1:], -math.log(VOCAB), rtol=1e-4)


def test_forward_leaves_gradients_alone() -> None:
    trainer = LoraTrainer(random_llama())
    slot = host(trainer, "p", SPEC)
    trainer.submit_forward("p", slot, some_data(), 0)
    run_all(trainer)
    assert not trainer.gradient("p").any()


def test_training_outputs_have_logprobs_loss_and_counts_of_the_trained_tokens() -> None:
    trainer = LoraTrainer(random_llama())
    slot = host(trainer, "p", SPEC)
    data = some_data()
    trainer.submit_forward_backward("p", slot, data, DPPO, 0)
    outputs = run_all(trainer)[0]
    trainer.submit_forward("p", slot, data, 1)
    for datum, output, scored in zip(data, outputs, run_all(trainer)[1], strict=True):
        is_trained = datum.weights != 0
        np.testing.assert_allclose(
            output.logprobs, np.where(is_trained, scored.logprobs, 0), rtol=1e-5
        )
        assert math.isfinite(output.loss) and output.loss != 0
        assert set(output.counts) == {"masked", "capped"}
        assert all(0 <= count <= is_trained.sum() for count in output.counts.values())


def test_gradients_of_submissions_add_up_until_the_step() -> None:
    base = random_llama(dtype=torch.float64)
    with_wide_norms(base.model)
    trainer = LoraTrainer(base)
    slot = host(trainer, "p", SPEC)
    data = some_data()
    trainer.submit_forward_backward("p", slot, data, DPPO, 0)
    run_all(trainer)
    whole_P = trainer.gradient("p").clone()
    trainer.optim_step("p", AdamParams(lr=0.0))
    assert not trainer.gradient("p").any()
    for idx, datum in enumerate(data):
        trainer.submit_forward_backward("p", slot, [datum], DPPO, idx)
    assert len(run_all(trainer)) == len(data)
    torch.testing.assert_close(trainer.gradient("p"), whole_P, rtol=1e-9, atol=1e-12)


def test_a_submission_larger_than_the_budget_finishes_once_after_several_passes() -> None:
    trainer = LoraTrainer(random_llama(), budget_tokens=24)
    slot = host(trainer, "p", SPEC)
    rng = np.random.default_rng(0)
    data = [random_datum(rng, 20) for _ in range(5)]
    trainer.submit_forward_backward("p", slot, data, DPPO, "ticket")
    finished = [trainer.step()[0] for _ in range(5)]
    assert finished[:4] == [[], [], [], []]
    ((ticket, outputs),) = finished[4]
    assert ticket == "ticket" and len(outputs) == 5
    assert not trainer.has_work
    assert trainer.step() == ([], None)


def test_a_step_updates_advances_the_clock_and_clears_the_gradient() -> None:
    trainer = LoraTrainer(random_llama())
    slot = host(trainer, "p", SPEC)
    before_P, before_hash = trainer.weights("p").clone(), trainer.adapter_hash("p")
    trainer.submit_forward_backward("p", slot, some_data(), DPPO, 0)
    run_all(trainer)
    norm = float(trainer.gradient("p").norm())
    step = trainer.optim_step("p", AdamParams(lr=1e-2))
    assert (step.version, step.is_vetoed) == (1, False)
    assert step.grad_norm == pytest.approx(norm, rel=1e-5)
    assert step.adapter_hash == trainer.adapter_hash("p") != before_hash
    assert not torch.equal(trainer.weights("p"), before_P)
    assert not trainer.gradient("p").any()


def nothing(trainer: LoraTrainer, slot) -> None:
    pass


def untrained_tokens(trainer: LoraTrainer, slot) -> None:
    data = [replace(datum, weights=0 * datum.weights) for datum in some_data()]
    trainer.submit_forward_backward("p", slot, data, DPPO, 0)
    (outputs,) = run_all(trainer).values()
    assert [output.loss for output in outputs] == [0.0] * len(data)


@pytest.mark.parametrize("accumulate", [nothing, untrained_tokens])
def test_a_step_without_gradient_only_advances_the_clock(accumulate: Callable) -> None:
    trainer = LoraTrainer(random_llama())
    slot = host(trainer, "p", SPEC)
    trainer.submit_forward_backward("p", slot, some_data(), DPPO, 0)
    run_all(trainer)
    first = trainer.optim_step("p", AdamParams(lr=1e-2))
    state_4P = trainer.state("p").rows_4P.clone()
    accumulate(trainer, slot)
    second = trainer.optim_step("p", AdamParams(lr=1e-2, weight_decay=0.1))
    assert (first.version, second.version) == (1, 2)
    assert (second.grad_norm, second.is_vetoed) == (0.0, False)
    assert second.adapter_hash == first.adapter_hash
    assert torch.equal(trainer.state("p").rows_4P, state_4P), "momentum does not move it either"
    assert trainer.state("p").num_updates == 1


@pytest.mark.parametrize(("weight", "advantage"), [(1e3, 3e38), (3e38, 1e3), (1e3, -3e38)])
def test_a_loss_that_is_not_finite_vetoes_one_step_and_no_more(
    weight: float, advantage: float
) -> None:
    base = random_llama()
    trainer = LoraTrainer(base)
    slot = host(trainer, "p", SPEC)
    data = some_data()
    weights, advantages = data[1].weights.copy(), data[1].advantages.copy()
    weights[-1], advantages[-1] = weight, advantage
    poisoned = [data[0], replace(data[1], weights=weights, advantages=advantages), data[2]]
    before_3P = trainer.state("p").rows_4P[:3].clone()
    trainer.submit_forward_backward("p", slot, poisoned, Objective(name="ppo"), 0)
    trainer.submit_forward_backward("p", slot, data, Objective(name="ppo"), 1)
    run_all(trainer)
    step = trainer.optim_step("p", AdamParams(lr=1e-2))
    assert step.is_vetoed, "the product is beyond what fp32 holds"
    assert step.version == 1
    assert torch.equal(trainer.state("p").rows_4P[:3], before_3P)
    assert not trainer.gradient("p").any()
    trainer.submit_forward_backward("p", slot, data, DPPO, 2)
    run_all(trainer)
    assert not trainer.optim_step("p", AdamParams(lr=1e-2)).is_vetoed


def test_a_gradient_that_would_overflow_the_second_moment_is_vetoed() -> None:
    trainer = LoraTrainer(random_llama())
    slot = host(trainer, "p", SPEC)
    data = [replace(datum, weights=datum.weights * np.float32(1e30)) for datum in some_data()]
    trainer.submit_forward_backward("p", slot, data, Objective(name="cross_entropy"), 0)
    run_all(trainer)
    assert trainer.optim_step("p", AdamParams(lr=1e-2)).is_vetoed
    assert trainer.state("p").rows_4P.isfinite().all()


def test_the_norm_is_clipped_per_policy() -> None:
    base = random_llama()
    trainer = LoraTrainer(base)
    slots = {key: host(trainer, key, SPEC) for key in "ab"}
    for key, scale in (("a", 1.0), ("b", 1e4)):
        data = [replace(datum, weights=scale * datum.weights) for datum in some_data()]
        trainer.submit_forward_backward(key, slots[key], data, DPPO, key)
    run_all(trainer)
    expected_P = trainer.gradient("a").clone()
    small = trainer.optim_step("a", AdamParams(lr=0.0, max_grad_norm=100.0))
    large = trainer.optim_step("b", AdamParams(lr=0.0, max_grad_norm=1.0))
    assert large.grad_norm == pytest.approx(1e4 * small.grad_norm, rel=1e-3)
    # The first moment is (1 - beta1) g.
    torch.testing.assert_close(trainer.state("a").exp_avg_P, 0.1 * expected_P)
    assert float(trainer.state("b").exp_avg_P.norm()) == pytest.approx(0.1, rel=1e-3)


def test_padding_beyond_rank_and_targets_stays_zero() -> None:
    trainer = LoraTrainer(random_llama())
    specs = {
        "a": AdapterSpec(rank=3, targets=("mlp",)),
        "b": AdapterSpec(rank=8, targets=("attention", "head")),
        "c": AdapterSpec(rank=9, targets=("head",)),
    }
    slots = {key: host(trainer, key, spec) for key, spec in specs.items()}
    for step in range(3):
        for key in specs:
            trainer.submit_forward_backward(key, slots[key], some_data(step), DPPO, key)
        run_all(trainer)
        for key in specs:
            trainer.optim_step(key, AdamParams(lr=1e-2, weight_decay=0.1))
            trainer.base.bank.write(slots[key], trainer.weights(key))
    for key, spec in specs.items():
        state = trainer.state(key)
        row_P = state.weights_P.clone()
        for module in state.layout.modules:
            a_RD, b_OR = state.layout.row_views(row_P, module)
            if module.kind in target_kinds(spec):
                a_RD, b_OR = a_RD[spec.rank :], b_OR[:, spec.rank :]
            assert not a_RD.any() and not b_OR.any()


# ---------------------------------------------------------------------------------------------
# Snapshots


def test_a_policy_from_a_snapshot_goes_on_bit_for_bit(tmp_path: Path) -> None:
    base = random_llama()
    trainer = LoraTrainer(base, is_exact=True)
    adam = AdamParams(lr=1e-2, weight_decay=0.1)

    def train(key: str, slot, seed: int) -> str:
        base.bank.write(slot, trainer.weights(key))
        trainer.submit_forward_backward(key, slot, some_data(seed), DPPO, 0)
        run_all(trainer)
        return trainer.optim_step(key, adam).adapter_hash

    slot = host(trainer, "p", SPEC)
    train("p", slot, 0)
    trainer.save_snapshot("p", tmp_path / "deep" / "p.safetensors")
    expected = [train("p", slot, seed) for seed in (1, 2)]

    other = LoraTrainer(base, is_exact=True)
    loaded = other.load("p", tmp_path / "deep" / "p.safetensors")
    assert (loaded.spec, loaded.version, loaded.num_updates) == (SPEC, 1, 1)
    trainer = other
    assert [train("p", slot, seed) for seed in (1, 2)] == expected
    assert other.version("p") == 3
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["p.safetensors"]


def test_a_snapshot_replaces_the_one_before(tmp_path: Path) -> None:
    trainer = LoraTrainer(random_llama())
    host(trainer, "p", SPEC)
    for _ in range(2):
        trainer.optim_step("p", AdamParams(lr=1e-2))
        trainer.save_snapshot("p", tmp_path / "p")
    assert LoraTrainer(trainer.base).load("p", tmp_path / "p").version == 2


def test_a_snapshot_that_is_none_is_refused(tmp_path: Path) -> None:
    trainer = LoraTrainer(random_llama())
    with pytest.raises(NotFound, match="no snapshot at"):
        trainer.load("p", tmp_path / "missing")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        trainer.load("p", tmp_path / "text")
    host(trainer, "q", SPEC)
    trainer.save_snapshot("q", tmp_path / "q")
    with pytest.raises(InvalidRequest, match="another base model"):
        LoraTrainer(random_llama(hidden_size=64)).load("p", tmp_path / "q")


# ---------------------------------------------------------------------------------------------
# Removal


def trained(key: str, spec: AdapterSpec = SPEC) -> LoraTrainer:
    """Return a trainer whose policy has made one update."""
    trainer = LoraTrainer(random_llama())
    slot = host(trainer, key, spec)
    trainer.submit_forward_backward(key, slot, some_data(), DPPO, 0)
    run_all(trainer)
    trainer.optim_step(key, AdamParams(lr=1e-2))
    return trainer


def saved(trainer: LoraTrainer, key: str, folder: Path) -> Path:
    state = trainer.state(key)
    save_adapter(folder, state.weights_P, state.spec, state.layout, base_name="random")
    return folder


def test_a_fork_of_a_folder_is_its_adapter_bit_for_bit_with_fresh_moments(tmp_path: Path) -> None:
    spec = replace(SPEC, alpha=5.0, seed=1)
    source = saved(trained("p", spec), "p", tmp_path / "p")
    trainer = LoraTrainer(random_llama())
    state = trainer.create_from("fork", SPEC, source)
    assert (state.version, state.num_updates) == (0, 0)
    assert state.spec == replace(SPEC, alpha=5.0), "the scale is the source's"
    assert not state.rows_4P[1:].any()
    again = saved(trainer, "fork", tmp_path / "again")
    assert (again / WEIGHTS_NAME).read_bytes() == (source / WEIGHTS_NAME).read_bytes()
    assert (again / CONFIG_NAME).read_bytes() == (source / CONFIG_NAME).read_bytes()


def test_a_fork_of_a_snapshot_takes_the_moments_and_begins_at_version_0(tmp_path: Path) -> None:
    original = trained("p")
    original.save_snapshot("p", tmp_path / "state")
    trainer = LoraTrainer(random_llama())
    state = trainer.create_from("fork", SPEC, tmp_path / "state")
    assert (state.version, state.num_updates) == (0, 1)
    assert torch.equal(state.rows_4P[:3], original.state("p").rows_4P[:3])
    assert trainer.adapter_hash("fork") == original.adapter_hash("p")
    for one, key in ((original, "p"), (trainer, "fork")):
        slot = one.base.bank.allocate(rank=SPEC.rank, scale=4.0, kinds=target_kinds(SPEC))
        one.base.bank.write(slot, one.weights(key))
        one.submit_forward_backward(key, slot, some_data(1), DPPO, 0)
        run_all(one)
        one.optim_step(key, AdamParams(lr=1e-2))
    assert torch.equal(trainer.weights("fork"), original.weights("p"))
    assert (trainer.version("fork"), original.version("p")) == (1, 2)


@pytest.mark.parametrize("is_snapshot", [False, True])
def test_a_fork_of_another_shape_is_refused_and_nothing_is_made(
    is_snapshot: bool, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    if is_snapshot:
        trained("p").save_snapshot("p", source)
    else:
        saved(trained("p"), "p", source)
    trainer = LoraTrainer(random_llama())
    for wrong, problem in (
        (replace(SPEC, rank=5), "rank 4, the policy's is 5; expected the same"),
        (replace(SPEC, targets=("attention",)), "targets .*lm_head.*; expected the same"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            trainer.create_from("fork", wrong, source)
    with pytest.raises(NotFound):
        trainer.create_from("fork", SPEC, tmp_path / "nothing")
    trainer.create_from("fork", SPEC, source)


def test_a_fork_that_could_never_be_trained_whole_is_refused(tmp_path: Path) -> None:
    source = saved(trained("p"), "p", tmp_path / "p")
    tensors = {
        name: tensor
        for name, tensor in load_file(source / WEIGHTS_NAME).items()
        if "layers.1.self_attn.k_proj" not in name
    }
    save_file(tensors, source / WEIGHTS_NAME)
    with pytest.raises(InvalidRequest, match=r"no weights for model.layers.1.self_attn.k_proj"):
        LoraTrainer(random_llama()).create_from("fork", SPEC, source)


def test_a_removed_policy_leaves_zeros_and_its_open_tickets() -> None:
    trainer = LoraTrainer(random_llama(), budget_tokens=16)
    slots = {key: host(trainer, key, SPEC) for key in "ab"}
    for key in "ab":
        trainer.submit_forward_backward(key, slots[key], some_data(), DPPO, f"{key}1")
    trainer.submit_forward("a", slots["a"], some_data(), "a2")
    trainer.step()
    rows_4P = trainer.state("a").rows_4P
    assert rows_4P[3].any()
    assert trainer.remove("a") == ["a1", "a2"]
    assert not rows_4P.any()
    assert list(run_all(trainer)) == ["b1"]
    assert trainer.remove("unknown") == []
    trainer.create("a", SPEC)


# ---------------------------------------------------------------------------------------------
# Refusals


def spoilt(value: float) -> np.ndarray:
    """Return an array of some datum with one such value."""
    values = np.zeros(12, dtype=np.float32)
    values[7] = value
    return values


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tokens": np.array([1, 2, VOCAB] + [0] * 9, np.int32)}, r"tokens\[2\] = 128; .* 0..127"),
        ({"tokens": np.zeros((12, 1), np.int32)}, r"tokens has shape \(12, 1\); expected \(T,\)"),
        ({"tokens": np.array(3, np.int32)}, r"tokens has shape \(\)"),
        ({"targets": np.array(3, np.int32)}, r"targets has shape \(\)"),
        ({"weights": np.zeros(12, bool)}, "weights has dtype bool; expected float32"),
        ({"advantages": np.zeros(12, np.float16)}, "advantages has dtype float16"),
        ({"tokens": np.zeros(12, np.float32)}, "tokens has dtype float32; expected int32"),
        ({"targets": np.full(12, -2, np.int32)}, r"targets\[0\] = -2; expected -1..127"),
        ({"targets": np.zeros((12, 0), np.int32)}, r"targets has shape \(12, 0\); .*\(12, K\)"),
        ({"targets": np.zeros((12, 257), np.int32)}, r"targets .* expected at most 256"),
        (
            {"targets": np.zeros((12, 2), np.int32)},
            r"weights has shape \(12,\); expected \(12, 2\)",
        ),
        ({"targets": np.full(12, -1, np.int32)}, r"weights\[5\] is not 0; .* targets has -1"),
        ({"advantages": spoilt(math.nan)}, r"advantages\[7\] = nan; expected a finite number"),
        ({"weights": spoilt(math.inf)}, r"weights\[7\] = inf; expected a finite number"),
        ({"sampling_logprobs": spoilt(-math.inf)}, r"sampling_logprobs\[7\] = -inf"),
        ({"loss_inputs": {"clip_low": spoilt(math.nan)}}, r"loss_inputs\['clip_low'\]\[7\] = nan"),
        (
            {"loss_inputs": {"clip_low": spoilt(-0.3)}},
            r"clip_low \+ clip_high at \[7\] is negative",
        ),
        (
            {"loss_inputs": {"ratio_mask": spoilt(1.0)}},
            "loss_inputs ratio_mask: .* of clip_low",
        ),
        ({"temperature": 0.0}, "temperature = 0.0; expected a finite number > 0"),
        ({"weights": np.ones(12, dtype=np.float32)}, r"weights\[0\] is not 0"),
        ({"advantages": np.ones(3, dtype=np.float32)}, r"advantages has shape \(3,\)"),
        ({"tokens": np.array([1], dtype=np.int32)}, "1 tokens; expected 2..512"),
        ({"reference_logprobs": None}, "no reference_logprobs"),
    ],
)
def test_malformed_data_are_refused_before_anything_is_queued(change: dict, problem: str) -> None:
    trainer = LoraTrainer(random_llama())
    slot = host(trainer, "p", SPEC)
    data = some_data()
    bad = replace(data[0], **change)
    objective = Objective(name="ppo", params={"kl_coef": 0.1})
    with pytest.raises(InvalidRequest, match=f"datum 1: {problem}"):
        trainer.submit_forward_backward("p", slot, [data[1], bad], objective, 0)
    assert not trainer.has_work


def test_every_fault_of_a_submission_is_named_at_once() -> None:
    trainer = LoraTrainer(random_llama())
    slot = host(trainer, "p", SPEC)
    data = [replace(datum, temperature=-1.0) for datum in some_data()]
    with pytest.raises(InvalidRequest) as refusal:
        trainer.submit_forward_backward("p", slot, data, DPPO, 0)
    assert len(refusal.value.problems) == len(data)
    with pytest.raises(InvalidRequest, match="no data"):
        trainer.submit_forward_backward("p", slot, [], DPPO, 0)
    ones = np.ones((512, 256), dtype=np.float32)
    huge = Datum(
        tokens=np.zeros(512, np.int32), targets=np.zeros((512, 256), np.int32), weights=0 * ones,
        advantages=ones, sampling_logprobs=ones,
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="16908288 targets in all; expected at most 16777216"):
        trainer.submit_forward_backward("p", slot, [huge] * 129, DPPO, 0)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (AdapterSpec(rank=65), r"rank = 65; expected 1\.\.64"),
        (AdapterSpec(rank=0), r"rank = 0; expected 1\.\.64"),
        (AdapterSpec(alpha=math.inf), "alpha = inf; expected a finite number > 0"),
        (AdapterSpec(targets=()), "name no linear"),
        (AdapterSpec(targets=("experts",)), "targets = .* expected some of attention, mlp, head"),
    ],
)
def test_an_impossible_adapter_is_refused(spec: AdapterSpec, problem: str) -> None:
    trainer = LoraTrainer(random_llama())
    with pytest.raises(InvalidRequest, match=problem):
        trainer.create("p", spec)


def test_an_impossible_update_is_refused_and_changes_nothing() -> None:
    trainer = LoraTrainer(random_llama())
    slot = host(trainer, "p", SPEC)
    trainer.submit_forward_backward("p", slot, some_data(), DPPO, 0)
    run_all(trainer)
    grad_P = trainer.gradient("p").clone()
    with pytest.raises(InvalidRequest, match="adam lr = nan"):
        trainer.optim_step("p", AdamParams(lr=math.nan))
    assert torch.equal(trainer.gradient("p"), grad_P)
    assert trainer.version("p") == 0


# ---------------------------------------------------------------------------------------------
# Checkpointing


BETWEEN_BYTES = 100 << 10
"""What `some_data` take with checkpointing is less, and without it more."""


@pytest.mark.parametrize(
    ("options", "is_checkpointed"),
    [
        ({"checkpointing": "always"}, True),
        ({"checkpointing": "never"}, False),
        ({"checkpointing": "auto", "memory_budget_bytes": BETWEEN_BYTES}, True),
        ({"checkpointing": "auto"}, False),
    ],
)
def test_layers_are_checkpointed_when_activations_would_not_fit(
    options: dict, is_checkpointed: bool
) -> None:
    base = random_llama()
    trainer = LoraTrainer(base, **options)
    slot = host(trainer, "p", SPEC)
    num_passes = 0

    def count(module: torch.nn.Module, args: tuple) -> None:
        nonlocal num_passes
        num_passes += 1

    hook = base.model.base_model.layers[0].mlp.register_forward_pre_hook(count)
    trainer.submit_forward_backward("p", slot, some_data(), DPPO, 0)
    run_all(trainer)
    hook.remove()
    assert num_passes == (2 if is_checkpointed else 1)
    assert trainer.gradient("p").any()
    assert "forward" not in vars(base.model.base_model.layers[0])


def test_the_hash_is_that_of_the_weights() -> None:
    trainer = LoraTrainer(random_llama())
    host(trainer, "p", SPEC)
    state = trainer.state("p")
    assert trainer.adapter_hash("p") == hash_adapter(state.weights_P, SPEC, state.layout)
    state.weights_P[0] += 1
    assert trainer.adapter_hash("p") == hash_adapter(state.weights_P, SPEC, state.layout)


# ---------------------------------------------------------------------------------------------
# Memory


def bounded(num_tokens: int, **options) -> LoraTrainer:
    """Return a trainer whose memory is just enough for one datum of so many tokens."""
    base = random_llama(max_position_embeddings=4096)
    size = PassSize.of_sequence(num_tokens)
    budget_bytes = PassMemory.of(base).training(size, is_checkpointed=True)
    return LoraTrainer(base, memory_budget_bytes=budget_bytes, **options)


def test_a_datum_that_cannot_fit_is_refused_with_the_length_that_would() -> None:
    trainer = bounded(300)
    slot = host(trainer, "p", SPEC)
    assert trainer.max_tokens == 300
    rng = np.random.default_rng(0)
    data = [random_datum(rng, num) for num in (20, 900)]
    with pytest.raises(InvalidRequest, match=r"datum 1: 900 tokens take .* at most 300 tokens"):
        trainer.submit_forward_backward("p", slot, data, DPPO, 0)
    with pytest.raises(InvalidRequest, match=r"datum 1: 900 tokens take .* at most 300 tokens"):
        trainer.submit_forward("p", slot, data, 0)
    assert not trainer.has_work
    trainer.submit_forward_backward("p", slot, [random_datum(rng, 300)], DPPO, 0)
    run_all(trainer)


def test_data_that_do_not_fit_together_are_trained_on_one_after_another() -> None:
    trainer = bounded(300, budget_tokens=1 << 20)
    slots = {name: host(trainer, name, SPEC) for name in "pq"}
    data = {
        name: [random_datum(np.random.default_rng([ord(name), idx]), 290) for idx in range(3)]
        for name in "pq"
    }
    roomy = LoraTrainer(trainer.base, budget_tokens=1 << 20)
    seen = []
    for one in (trainer, roomy):
        for name, slot in slots.items():
            if one is roomy:
                one.create(name, SPEC)
            one.submit_forward_backward(name, slot, data[name], DPPO, name)
        num_passes = 0
        while one.has_work:
            one.step()
            num_passes += 1
        seen.append(num_passes)
    assert seen == [6, 1]
    for name in "pq":
        torch.testing.assert_close(trainer.gradient(name), roomy.gradient(name))
