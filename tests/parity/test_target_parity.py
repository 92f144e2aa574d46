"""Training on targets of one's own, fused with others, against formulas written down plainly: the
stock model with merged weights, all of its logits, fp64, and autograd."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from marlaas.engine.adapter_io import adapter_tensors
from marlaas.engine.trainer import LoraTrainer
from marlaas.types import AdamParams, AdapterSpec, Datum, Objective
from tests.engine.data import VOCAB, host, random_datum, random_group
from tests.parity.test_trainer_parity import (
    BASES,
    Member,
    assert_same_bits,
    bases_in_fp64,
    members,
    train,
)

torch.set_num_threads(1)

EVERYTHING = ("attention", "mlp", "head")
GSPO = {"clip_low": 0.1, "clip_high": 0.15}


def aimed(
    rng: np.random.Generator, datum: Datum, num_targets: int | None, *, is_missing: float = 0.0
) -> Datum:
    """Return the datum with targets that have nothing to do with its tokens, some left out."""
    shape = (len(datum.tokens),) if num_targets is None else (len(datum.tokens), num_targets)
    targets = rng.integers(0, VOCAB, shape).astype(np.int32)
    if num_targets and num_targets > 1:
        targets[::3, 1] = targets[::3, 0]  # one token twice in a row of logits
    targets[rng.random(shape) < is_missing] = -1
    weights = rng.normal(size=shape) * (rng.random(shape) < 0.6)
    weights[0] = 0.0
    weights[targets < 0] = 0.0

    def values(low: float, high: float) -> np.ndarray:
        return rng.uniform(low, high, shape).astype(np.float32)

    return replace(
        datum,
        targets=targets,
        weights=weights.astype(np.float32),
        advantages=values(-1, 1),
        sampling_logprobs=values(-6, -4),
        reference_logprobs=None,
    )


def with_inputs(rng: np.random.Generator, datum: Datum, *names: str) -> Datum:
    """Return the datum with bounds of each token's own, on any side of 1, or a mask."""
    shape = datum.weights.shape
    ranges = {"clip_low": (-0.3, 0.3), "clip_high": (0.3, 0.6)}
    inputs = {
        name: rng.uniform(*ranges[name], shape)
        if name in ranges
        else (rng.random(shape) < 0.5).astype(np.float64)
        for name in names
    }
    return replace(
        datum, loss_inputs={name: values.astype(np.float32) for name, values in inputs.items()}
    )


def company(seed: int = 0) -> list[Member]:
    """Return policies with targets of every kind under every objective."""
    rng = np.random.default_rng(seed)

    def data(lengths: Sequence[int], num_targets: int | None = None, **options) -> list[Datum]:
        return [aimed(rng, random_datum(rng, length), num_targets, **options) for length in lengths]

    group = random_group(rng, 9, [6, 4, 8])
    everywhere = [replace(datum, is_scored_everywhere=True) for datum in group]
    at_two_temperatures = [
        replace(datum, temperature=temperature)
        for datum, temperature in zip(everywhere, (1.0, 0.7, 1.0), strict=True)
    ]
    distilled = [
        replace(aimed(rng, datum, 4, is_missing=0.3), is_scored_everywhere=True)
        for datum in random_group(rng, 7, [5, 3])
    ]
    masked = [with_inputs(rng, datum, "ratio_mask", "clip_high") for datum in data([14, 8])]
    bounded = [with_inputs(rng, datum, "clip_low", "clip_high") for datum in data([9, 16])]
    one_sided = {"clip_low": -0.2, "clip_high": 0.5}
    head = ("head",)
    return [
        Member("one", AdapterSpec(rank=4), Objective(name="importance_sampling"), data([7, 15])),
        Member("k", AdapterSpec(rank=8, targets=EVERYTHING), Objective(name="cross_entropy"),
               [*data([12], 3), *distilled, *data([6], 1, is_missing=0.2)]),
        Member("dro", AdapterSpec(rank=4, alpha=3, targets=head),
               Objective(name="dro", params={"beta": 0.3}), [*everywhere, *data([5])]),
        Member("warm", AdapterSpec(rank=5, targets=EVERYTHING, seed=2), Objective(name="dro"),
               at_two_temperatures),
        Member("gspo", AdapterSpec(rank=16, seed=3, targets=EVERYTHING),
               Objective(name="gspo", params=GSPO), [*masked, *data([6])]),
        Member("ppo", AdapterSpec(rank=8, seed=4), Objective(name="ppo"), [*bounded, *group]),
        Member("cispo", AdapterSpec(rank=8, seed=5, targets=head),
               Objective(name="cispo", params=one_sided), [*bounded, *data([7], 2)]),
        Member("one side", AdapterSpec(rank=8, seed=6), Objective(name="ppo", params=one_sided),
               data([11])),
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------
# The plain version


def plain_logprobs(
    model: PreTrainedModel,
    matrices: dict[str, tuple[Tensor, Tensor]],
    spec: AdapterSpec,
    datum: Datum,
) -> Tensor:
    """Return the logprobs of all targets [T] or [T, K]; 0 at entry 0 and where there is none."""
    merged = {
        f"{name}.weight": model.get_submodule(name).weight.detach() + spec.alpha / spec.rank * b @ a
        for name, (a, b) in matrices.items()
    }
    tokens = torch.from_numpy(datum.tokens.astype(np.int64))
    logits = functional_call(
        model, merged, (tokens[None, :-1],), {"use_cache": False}, tie_weights=False
    ).logits[0]
    logprob_TV = (logits / datum.temperature).log_softmax(-1)
    targets = tokens if datum.targets is None else torch.from_numpy(datum.targets).long()
    targets = targets.reshape(len(tokens), -1)[1:]
    chosen = logprob_TV.gather(1, targets.clamp(min=0)).where(targets >= 0, 0.0)
    return torch.cat([torch.zeros(1, chosen.shape[1]), chosen]).reshape(datum.weights.shape)


def plain_loss(lp: Tensor, datum: Datum, objective: Objective) -> Tensor:
    """Return what is minimised, written as the protocol has it."""

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.float64))

    def bound(name: str, default: float, sign: float) -> Tensor | float:
        distance = datum.loss_inputs.get(name)
        if distance is None:
            return 1.0 + sign * objective.params.get(name, default)
        return 1.0 + sign * tensor(distance)

    def clip(r: Tensor, low: float, high: float) -> Tensor:
        low, high = bound("clip_low", low, -1.0), bound("clip_high", high, 1.0)
        return torch.minimum(torch.maximum(r, low + 0 * r), high + 0 * r)

    w, a, q = map(tensor, (datum.weights, datum.advantages, datum.sampling_logprobs))
    r = (lp - q).exp()
    match objective.name:
        case "cross_entropy":
            loss = -lp
        case "importance_sampling":
            loss = -r * a
        case "ppo":
            loss = -torch.minimum(r * a, clip(r, 0.2, 0.2) * a)
        case "cispo":
            loss = -clip(r, 1.0, 4.0).detach() * lp * a
        case "dro":
            loss = -(lp * a - objective.params.get("beta", 0.05) / 2 * (lp - q) ** 2)
        case "gspo":
            mask = tensor(datum.loss_inputs.get("ratio_mask", datum.weights != 0))
            mask[0] = 0.0
            mean = (mask * (lp - q)).sum() / mask.sum().clamp(min=1)
            s = mean.detach().exp() * (lp - lp.detach()).exp()
            loss = -torch.minimum(s * a, clip(s, 0.1, 0.15) * a)
    return (w * loss).sum()


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("seed", range(2))
def test_losses_gradients_and_logprobs_are_those_of_the_plain_formulas(
    kind: str, seed: int
) -> None:
    base, model = bases_in_fp64(kind)
    together = company(seed)
    trainer = LoraTrainer(base)
    for member in together:
        slot = host(trainer, member.key, member.spec)
        trainer.submit_forward_backward(
            member.key, slot, member.data, member.objective, ticket=member.key
        )
    outputs = {}
    while trainer.has_work:
        outputs |= dict(trainer.step()[0])
    for member in together:
        state, spec = trainer.state(member.key), member.spec
        matrices = {
            module.name: (a.clone().requires_grad_(), b.clone().requires_grad_())
            for module, a, b in adapter_tensors(state.weights_P, spec, state.layout)
        }
        lps = [plain_logprobs(model, matrices, spec, datum) for datum in member.data]
        losses = [
            plain_loss(lp, datum, member.objective)
            for lp, datum in zip(lps, member.data, strict=True)
        ]
        leaves = [leaf for pair in matrices.values() for leaf in pair]
        expected = torch.autograd.grad(torch.stack(losses).sum(), leaves)
        own = [
            gradient
            for _, a, b in adapter_tensors(state.grad_P, spec, state.layout)
            for gradient in (a, b)
        ]
        for ours, plain in zip(own, expected, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-12)
        for output, datum, lp, loss in zip(
            outputs[member.key], member.data, lps, losses, strict=True
        ):
            assert output.loss == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)
            assert output.logprobs.shape == datum.weights.shape
            is_said = (datum.weights != 0) | datum.is_scored_everywhere
            is_said |= datum.loss_inputs.get("ratio_mask", np.zeros(1)) != 0
            expected_lp = np.where(is_said, lp.detach().numpy(), 0.0)
            np.testing.assert_allclose(output.logprobs, expected_lp, rtol=1e-6)


@pytest.mark.parametrize("kind", BASES)
def test_fused_with_anybody_equals_alone_in_fp64(kind: str) -> None:
    base, _ = bases_in_fp64(kind)
    alone = {m.key: train(base, [m], num_steps=2)[m.key] for m in company()}
    everybody = [*company(), *members()[:3]]
    for budget_tokens in (1024, 60):
        rng = np.random.default_rng(budget_tokens)
        order = [everybody[idx] for idx in rng.permutation(len(everybody))]
        fused = train(base, order, num_steps=2, budget_tokens=budget_tokens)
        for key, expected in alone.items():
            for ours, own in (
                (fused[key].grad_P, expected.grad_P),
                (fused[key].weights_P, expected.weights_P),
            ):
                torch.testing.assert_close(ours, own, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize(("seed", "budget_tokens"), [(0, 512), (1, 70), (2, 1024)])
def test_in_exact_mode_no_neighbour_changes_a_bit(kind: str, seed: int, budget_tokens: int) -> None:
    make_base, _, config = BASES[kind]
    base = make_base(**config)
    rng = np.random.default_rng(seed)
    everybody = [*company(seed), *members(seed)]
    chosen = [everybody[idx] for idx in rng.permutation(len(everybody))[:6]]
    options = {"num_steps": 2, "is_exact": True, "budget_tokens": budget_tokens}
    fused = train(base, chosen, **options)
    for member in chosen:
        assert_same_bits(fused[member.key], train(base, [member], **options)[member.key])


# ---------------------------------------------------------------------------------------------
# Rows of logits


def rows_of_head(trainer: LoraTrainer, data: Sequence[Datum], *, is_training: bool) -> int:
    """Return how many rows go through the head's product while the data are trained or scored."""
    slot = host(trainer, "p", AdapterSpec(rank=4, targets=EVERYTHING))
    if is_training:
        trainer.submit_forward_backward("p", slot, data, Objective(name="cross_entropy"), 0)
    else:
        trainer.submit_forward("p", slot, data, 0)
    num_rows, head = 0, trainer.base.head
    product = head.product

    def counted(hidden_ND: Tensor) -> Tensor:
        nonlocal num_rows
        num_rows += len(hidden_ND)
        return product(hidden_ND)

    head.product = counted  # type: ignore[method-assign]
    while trainer.has_work:
        trainer.step()
    del head.product
    trainer.remove("p")
    return num_rows


def test_targets_of_one_entry_share_a_row_and_a_shared_prefix_is_scored_from_one() -> None:
    base, _ = bases_in_fp64("llama")
    trainer = LoraTrainer(base)
    rng = np.random.default_rng(0)
    weights = np.ones((20, 5), dtype=np.float32)
    weights[0] = 0.0
    wide = replace(aimed(rng, random_datum(rng, 20), 5), weights=weights)
    assert rows_of_head(trainer, [wide], is_training=True) == 19
    group = [replace(datum, is_scored_everywhere=True) for datum in random_group(rng, 30, [4] * 6)]
    # 30 positions of the prompt predict, and three of each answer; the last is the first again.
    assert rows_of_head(trainer, group, is_training=False) == 30 + 6 * 3
    assert rows_of_head(trainer, group, is_training=True) == 30 + 6 * 3


# ---------------------------------------------------------------------------------------------
# Without a loss


def test_zero_weights_everywhere_give_logprobs_and_no_gradient() -> None:
    base, _ = bases_in_fp64("llama")
    trainer = LoraTrainer(base)
    rng = np.random.default_rng(0)
    data = [
        replace(datum, weights=0 * datum.weights, is_scored_everywhere=True)
        for datum in (random_datum(rng, 12), aimed(rng, random_datum(rng, 9), 3, is_missing=0.3))
    ]
    slots = {key: host(trainer, key, AdapterSpec(rank=4)) for key in ("idle", "busy")}
    before_P = trainer.weights("idle").clone()
    busy = company()[0]
    for with_company in (False, True):
        trainer.submit_forward_backward(
            "idle", slots["idle"], data, Objective(name="cross_entropy"), 0
        )
        if with_company:
            trainer.submit_forward_backward("busy", slots["busy"], busy.data, busy.objective, 1)
        trainer.submit_forward("idle", slots["idle"], data, 2)
        finished = {}
        while trainer.has_work:
            finished |= dict(trainer.step()[0])
        for trained, scored in zip(finished[0], finished[2], strict=True):
            np.testing.assert_allclose(trained.logprobs, scored.logprobs, rtol=1e-6)
            assert trained.loss == 0 and (trained.logprobs != 0).any()
        assert not trainer.gradient("idle").any()
        step = trainer.optim_step("idle", AdamParams(lr=1.0, weight_decay=0.1))
        assert (step.version, step.grad_norm) == (1 + with_company, 0.0)
    assert torch.equal(trainer.weights("idle"), before_P)
    assert trainer.state("idle").num_updates == 0
    assert trainer.gradient("busy").any()
