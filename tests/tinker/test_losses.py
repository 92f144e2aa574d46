"""Losses, gradients and updates through the SDK equal the naive formulas of `naive.py`.

A gradient is read out of the service through the optimizer: with betas 0 and an `eps` as large as
the learning rate and far above every gradient, one Adam update is minus the gradient.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from tests.tinker import naive
from tests.tinker.naive import Naive
from tests.tinker.served import WAIT_S, Tenant, datum, export, logprobs, new_run, some_tokens, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]

FAR = 1e6
LENGTHS = (6, 11, 18)


@pytest.fixture(scope="module")
def fresh(acme: Tenant, service: tinker.ServiceClient, tmp_path_factory) -> Path:
    """The PEFT folder of the adapter that every run of the module begins with."""
    return export(acme, new_run(service), tmp_path_factory.mktemp("fresh"))


@pytest.fixture(scope="module")
def reference(fresh: Path) -> Naive:
    return Naive(fresh)


@pytest.fixture(scope="module")
def data(reference: Naive) -> list[types.Datum]:
    """Data as of a policy a little away: ratios on both sides of every bound."""
    return [with_advantages(reference, seed, length) for seed, length in enumerate(LENGTHS)]


def with_advantages(reference: Naive, seed: int, length: int, **more: Any) -> types.Datum:
    rng = np.random.Generator(np.random.Philox(seed))
    plain = datum(some_tokens(seed, length))
    with torch.no_grad():
        lp = reference.logprobs(plain).numpy()
    away = rng.normal(0, 0.3, len(lp))
    away[[0, -1]] = (2.0, -1.5)  # beyond the bounds of every loss
    return datum(
        some_tokens(seed, length),
        logprobs=(lp - away).astype(np.float32),
        advantages=rng.normal(0, 1, len(lp)).astype(np.float32),
        **more,
    )


def weighted(seed: int, length: int) -> types.Datum:
    """Weights of any size and sign, targets that are not the next tokens."""
    rng = np.random.Generator(np.random.Philox(seed))
    return datum(
        some_tokens(seed, length),
        target_tokens=rng.integers(3, 1024, length - 1),
        weights=rng.normal(0, 1, length - 1).astype(np.float32),
    )


def sparse(seed: int, length: int, width: int = 16) -> types.Datum:
    """Several targets a position, few of which weigh anything: sent as CSR."""
    rng = np.random.Generator(np.random.Philox(seed))
    shape = (length - 1, width)
    weights = np.where(rng.random(shape) < 0.2, rng.random(shape), 0).astype(np.float32)
    targets = np.where(weights > 0, rng.integers(3, 1024, shape), 0)
    made = types.Datum(
        model_input=types.ModelInput.from_ints(some_tokens(seed, length)[:-1]),
        loss_fn_inputs={
            "target_tokens": torch.from_numpy(targets),
            "weights": torch.from_numpy(weights),
        },
    )
    assert made.loss_fn_inputs["weights"].sparse_crow_indices is not None
    return made


@dataclass(frozen=True)
class Case:
    """One way to ask for a loss, and the formula that answers it."""

    name: str
    formula: Callable
    config: dict[str, float] | None = None
    is_masked: bool = False
    are_bounds_per_token: bool = False


CASES = (
    Case("importance_sampling", naive.importance_sampling),
    Case("ppo", naive.ppo),
    Case(
        "ppo",
        functools.partial(naive.ppo, low=0.9, high=1.05),
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
    ),
    Case("ppo", naive.ppo, are_bounds_per_token=True),
    Case("cispo", naive.cispo),
    Case(
        "cispo",
        functools.partial(naive.cispo, low=0.8, high=1.2),
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    Case("dro", functools.partial(naive.dro, beta=0.3), {"beta": 0.3}),
    Case("dro", naive.dro),
    Case("gspo", naive.gspo, is_masked=True),
    Case(
        "gspo",
        functools.partial(naive.gspo, low=0.8, high=1.2),
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        is_masked=True,
    ),
)


def data_of(case: Case, reference: Naive) -> list[types.Datum]:
    made = []
    for seed, length in enumerate(LENGTHS):
        more: dict[str, np.ndarray] = {}
        if case.is_masked:
            more["sequence_ratio_mask"] = (np.arange(length - 1) >= 2).astype(np.float32)
        if case.are_bounds_per_token:
            rng = np.random.Generator(np.random.Philox(100 + seed))
            more["clip_low_threshold"] = rng.uniform(0.7, 1.0, length - 1).astype(np.float32)
            more["clip_high_threshold"] = rng.uniform(1.0, 1.3, length - 1).astype(np.float32)
        made.append(with_advantages(reference, seed, length, **more))
    return made


def update(acme: Tenant, run: tinker.TrainingClient, folder: Path, fresh: Path) -> dict:
    """Take the step that makes the update minus the gradient; return the gradient."""
    far = types.AdamParams(learning_rate=FAR, eps=FAR, beta1=0.0, beta2=0.0)
    run.optim_step(far).result(timeout=WAIT_S)
    after = load_file(export(acme, run, folder) / "adapter_model.safetensors")
    before = load_file(fresh / "adapter_model.safetensors")
    return {name: before[name].double() - after[name].double() for name in before}


def assert_same_gradient(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        size = max(gradient.abs().max().item(), 1e-3)
        # Weights of A are about 0.1: what is left of a small update of them is their rounding.
        assert (ours[name] - gradient).abs().max() < 1e-3 * size + 1e-6, name


def assert_outputs(output: types.ForwardBackwardOutput, reference: Naive, data) -> None:
    for row, one in zip(output.loss_fn_outputs, data, strict=True):
        with torch.no_grad():
            expected = reference.logprobs(one)
        assert row["logprobs"].shape == list(expected.shape)
        found = row["logprobs"].to_torch().double()
        weights = one.loss_fn_inputs.get("weights")
        if weights is not None:
            is_scored = weights.to_torch() != 0
            found, expected = found[is_scored], expected[is_scored]
        assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.config}")
def test_a_loss_of_reinforcement_learning_and_its_gradient_are_those_of_the_formula(
    case: Case, acme: Tenant, run, reference: Naive, fresh: Path, tmp_path: Path
):
    data = data_of(case, reference)
    output = run.forward_backward(data, case.name, case.config).result(timeout=WAIT_S)
    assert_outputs(output, reference, data)
    expected = reference.loss(case.formula, data).item()
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    ours = update(acme, run, tmp_path, fresh)
    assert_same_gradient(ours, reference.gradient(case.formula, data))


@pytest.mark.parametrize("make", [weighted, sparse], ids=["dense", "sparse"])
def test_cross_entropy_and_its_gradient_are_those_of_the_formula(
    make: Callable, acme: Tenant, run, reference: Naive, fresh: Path, tmp_path: Path
):
    data = [make(seed, length) for seed, length in enumerate(LENGTHS)]
    output = run.forward_backward(data, "cross_entropy").result(timeout=WAIT_S)
    assert_outputs(output, reference, data)
    expected = reference.loss(naive.cross_entropy, data).item()
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    ours = update(acme, run, tmp_path, fresh)
    assert_same_gradient(ours, reference.gradient(naive.cross_entropy, data))


def test_targets_without_weights_weigh_one_each(run):
    tokens = some_tokens(1, 9)
    plain = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:])},
    )
    outputs = [
        run.forward_backward([one], "cross_entropy").result(timeout=WAIT_S)
        for one in (plain, datum(tokens))
    ]
    assert outputs[0].metrics["loss:sum"] == outputs[1].metrics["loss:sum"] > 0


def test_a_custom_loss_and_its_gradient_are_those_of_the_function(
    acme: Tenant, run, reference: Naive, fresh: Path, tmp_path: Path, data
):
    def squares(lp: torch.Tensor, inputs) -> torch.Tensor:
        return (lp + 3.0).square().mean()

    def custom(given: list[types.Datum], logprobs: list[torch.Tensor]):
        loss = torch.stack([squares(lp, {}) for lp in logprobs]).sum()
        return loss, {"squares:sum": loss.item()}

    output = run.forward_backward_custom(data, custom).result(timeout=WAIT_S)
    expected = reference.loss(squares, data).item()
    assert output.metrics["squares:sum"] == pytest.approx(expected, rel=1e-4)
    assert output.metrics["loss:sum"] == output.metrics["squares:sum"]
    ours = update(acme, run, tmp_path, fresh)
    assert_same_gradient(ours, reference.gradient(squares, data))


def test_a_traced_loss_gives_what_the_function_gives(service, run, data):
    def weighted(logprobs: torch.Tensor, advantages: torch.Tensor):
        loss = -(logprobs * advantages).sum()
        return loss, {"custom/gain:sum": -loss}

    ranks = {"logprobs": 1, "advantages": 1}
    handle = service.create_custom_loss(weighted, ranks).result(timeout=WAIT_S)
    output = run.forward_backward_custom(data, handle).result(timeout=WAIT_S)
    assert output.metrics["custom/gain:sum"] == pytest.approx(-output.metrics["loss:sum"])


def test_gradients_of_several_calls_add_up_and_a_pass_alone_adds_none(
    acme: Tenant, run, reference: Naive, fresh: Path, tmp_path: Path
):
    data = [weighted(seed, length) for seed, length in enumerate(LENGTHS)]
    for one in data:
        run.forward_backward([one], "cross_entropy")
        run.forward([one], "cross_entropy")
    ours = update(acme, run, tmp_path, fresh)
    assert_same_gradient(ours, reference.gradient(naive.cross_entropy, data))


def test_a_prompt_in_several_chunks_is_the_prompt_in_one(run):
    tokens = some_tokens(3, 12)
    chunks = [types.EncodedTextChunk(tokens=part) for part in (tokens[:4], tokens[4:5], tokens[5:])]
    targets = {"target_tokens": np.array([*tokens[1:], 9]), "weights": np.ones(12, np.float32)}
    one = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=targets)
    many = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=targets)
    first, second = logprobs(run, [one, many])
    assert np.array_equal(first, second)


def test_many_data_are_cut_into_requests_and_come_back_in_order(run):
    data = [datum(some_tokens(seed, 4)) for seed in range(1030)]
    output = run.forward_backward(data, "cross_entropy").result(timeout=WAIT_S)
    assert len(output.loss_fn_outputs) == 1030
    (last,) = logprobs(run, data[-1:])
    assert np.allclose(output.loss_fn_outputs[-1]["logprobs"].to_numpy(), last, atol=1e-5)
    total = -sum(row["logprobs"].to_numpy().sum() for row in output.loss_fn_outputs)
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)


def test_steps_are_those_of_adamw(run, fresh: Path):
    """Five steps with decay and clipping; compared by what the adapters then say."""
    reference = Naive(fresh)
    data = [weighted(seed, length) for seed, length in enumerate(LENGTHS)]
    adam = types.AdamParams(
        learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1, grad_clip_norm=2.0
    )
    parameters = list(reference.parameters().values())
    theirs = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)
    for _ in range(5):
        run.forward_backward(data, "cross_entropy")
        run.optim_step(adam)
        theirs.zero_grad()
        reference.loss(naive.cross_entropy, data).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 2.0)
        theirs.step()
    for found, one in zip(logprobs(run, data), data, strict=True):
        with torch.no_grad():
            expected = reference.logprobs(one).numpy()
        assert np.allclose(found, expected, atol=2e-2)
        assert np.abs(expected - found).mean() < 3e-3


@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_proj", "up_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_only_what_the_flags_name_is_trained(acme, service, tmp_path: Path, flags, modules):
    run = new_run(service, **flags)
    train(run, [datum(some_tokens(1, 9))])
    saved = load_file(export(acme, run, tmp_path) / "adapter_model.safetensors")
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in saved} == modules
    info = acme.rest().get_weights_info_by_tinker_path(
        run.save_state("flags").result(timeout=WAIT_S).path
    )
    told = info.result(timeout=WAIT_S)
    assert (told.train_attn, told.train_mlp, told.train_unembed) == tuple(
        flags.get(name, True) for name in ("train_attn", "train_mlp", "train_unembed")
    )


def test_the_same_seed_makes_the_same_adapter_and_none_makes_another(service):
    data = [datum(some_tokens(1, 9))]
    runs = [new_run(service, seed=seed) for seed in (3, 3, 4)]
    unseeded = service.create_lora_training_client("tiny", rank=8).result(timeout=WAIT_S)
    for one in (*runs, unseeded):
        train(one, data)
    same, again, other, none = (logprobs(one, data)[0] for one in (*runs, unseeded))
    assert np.array_equal(same, again)
    assert not np.array_equal(same, other) and not np.array_equal(same, none)


def test_the_substitute_for_stable_reinforce_is_named_when_a_session_begins(
    acme: Tenant, run, data
):
    """Its formula is not published: ours is `dppo_tis`, and the service says so."""
    output = run.forward_backward(data, "stable_reinforce").result(timeout=WAIT_S)
    assert "loss:sum" in output.metrics
    with acme.wire() as wire:
        begun = wire.post(
            "create_session", type="create_session", tags=[], user_metadata={}, sdk_version="0.38.0"
        )
    assert "stable_reinforce" in begun.json()["info_message"]
