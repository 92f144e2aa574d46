"""Training many policies in one pass against training each alone, and against plain autograd."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from marlaas.engine.adapter_io import adapter_tensors
from marlaas.engine.objectives import TrainedTokens, token_loss
from marlaas.engine.trainer import LoraTrainer
from marlaas.model.base import BaseModel
from marlaas.types import AdamParams, AdapterSpec, Datum, DatumOutput, Objective
from tests.engine.data import host, random_datum, random_group, with_wide_norms
from tests.models import random_llama, random_qwen3, stock_llama, stock_qwen3

torch.set_num_threads(1)

BASES = {
    "llama": (random_llama, stock_llama, {}),
    "llama, tied head": (random_llama, stock_llama, {"tie_word_embeddings": True}),
    "qwen3": (random_qwen3, stock_qwen3, {}),
}


def bases_in_fp64(kind: str) -> tuple[BaseModel, PreTrainedModel]:
    """Return one model as our base and as the stock model."""
    make_base, make_stock, config = BASES[kind]
    base = make_base(dtype=torch.float64, **config)
    with_wide_norms(base.model)
    return base, with_wide_norms(make_stock(dtype=torch.float64, **config))


@dataclass(frozen=True)
class Member:
    """A policy of a fused pass and what it is trained on."""

    key: str
    spec: AdapterSpec
    objective: Objective
    data: Sequence[Datum]


def members(seed: int = 0) -> list[Member]:
    """Return policies that differ in rank, bucket, alpha, targets, objective and temperature."""
    rng = np.random.default_rng(seed)

    def data(lengths: Sequence[int], temperature: float = 1.0) -> list[Datum]:
        return [random_datum(rng, length, temperature=temperature) for length in lengths]

    everything = ("attention", "mlp", "head")
    ppo = Objective(name="ppo", params={"clip_high": 0.28, "kl_coef": 0.1})
    return [
        Member("a", AdapterSpec(rank=4), Objective(name="dppo_tis"), data([9, 17, 30])),
        Member("b", AdapterSpec(rank=8, alpha=4, targets=everything), ppo, data([12, 7], 0.7)),
        Member("c", AdapterSpec(rank=16, targets=("head",)), Objective(name="gspo"), data([21])),
        Member(
            "d",
            AdapterSpec(rank=6, alpha=3, targets=("mlp", "head"), seed=3),
            Objective(name="cispo", params={"clip_high": 1.0}),
            data([5, 2, 13], 1.3),
        ),
        Member(
            "e",
            AdapterSpec(rank=8, seed=4),
            Objective(name="importance_sampling"),
            [*random_group(rng, 11, [6, 9, 1, 6]), *random_group(rng, 5, [3, 8])],
        ),
        Member(
            "f",
            AdapterSpec(rank=3, targets=("attention",), seed=5),
            Objective(name="cross_entropy"),
            data([40, 3]),
        ),
    ]


@dataclass
class Result:
    """What training left of one policy."""

    outputs: list[DatumOutput]
    grad_P: Tensor
    weights_P: Tensor
    grad_norm: float


def train(
    base: BaseModel, company: Sequence[Member], *, num_steps: int = 1, **options: object
) -> dict[str, Result]:
    """Train the members side by side; return the last step's results by key."""
    trainer = LoraTrainer(base, **options)  # type: ignore[arg-type]
    slots = {member.key: host(trainer, member.key, member.spec) for member in company}
    results = {}
    for _ in range(num_steps):
        for member in company:
            trainer.submit_forward_backward(
                member.key, slots[member.key], member.data, member.objective, ticket=member.key
            )
        finished = {}
        while trainer.has_work:
            finished |= dict(trainer.step()[0])
        for member in company:
            state = trainer.state(member.key)
            grad_P = state.grad_P.clone()
            step = trainer.optim_step(member.key, AdamParams(lr=0.01, weight_decay=0.1))
            base.bank.write(slots[member.key], trainer.weights(member.key))
            results[member.key] = Result(
                finished[member.key], grad_P, state.weights_P.clone(), step.grad_norm
            )
    for slot in slots.values():
        base.bank.free(slot)
    return results


def naive_logprobs(
    model: PreTrainedModel,
    matrices: dict[str, tuple[Tensor, Tensor]],
    spec: AdapterSpec,
    datum: Datum,
) -> Tensor:
    """Return the logprobs of tokens 1.. of one datum [T - 1], by the stock model with merged
    weights and its whole logits."""
    merged = {
        f"{name}.weight": model.get_submodule(name).weight.detach() + spec.alpha / spec.rank * b @ a
        for name, (a, b) in matrices.items()
    }
    tokens = torch.from_numpy(datum.tokens.astype(np.int64))
    # `tie_weights=False`: a head adapter must leave the embedding of a tied model as it is.
    logits = functional_call(
        model, merged, (tokens[None, :-1],), {"use_cache": False}, tie_weights=False
    ).logits[0]
    logprobs = (logits / datum.temperature).log_softmax(-1)
    return logprobs.gather(1, tokens[1:, None])[:, 0]


def naive_gradients(
    model: PreTrainedModel, matrices: dict[str, tuple[Tensor, Tensor]], member: Member
) -> tuple[list[Tensor], list[Tensor]]:
    """Return per datum the logprobs of its trained tokens, and the gradients of A, B, A, B, ..."""
    leaves = [leaf for pair in matrices.values() for leaf in pair]
    total, logprobs = torch.zeros((), dtype=torch.float64), []
    for datum in member.data:
        trained = torch.from_numpy(np.flatnonzero(datum.weights[1:]))
        if not len(trained):
            logprobs.append(torch.zeros(0))
            continue
        lp_M = naive_logprobs(model, matrices, member.spec, datum)[trained]
        fields = (
            datum.sampling_logprobs,
            datum.advantages,
            datum.reference_logprobs,
            datum.weights,
        )
        q_M, a_M, reference_M, weight_M = (
            torch.from_numpy(values.astype(np.float64))[trained + 1] for values in fields
        )
        tokens = TrainedTokens(
            logprobs_M=lp_M,
            sampling_logprobs_M=q_M,
            advantages_M=a_M,
            datum_M=torch.zeros(len(trained), dtype=torch.int64),
            num_data=1,
            reference_logprobs_M=reference_M,
        )
        total = total + (weight_M * token_loss(member.objective, tokens).loss_M).sum()
        logprobs.append(lp_M.detach())
    return logprobs, list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("kind", BASES)
def test_fused_gradients_are_those_of_plain_autograd_on_merged_weights(kind: str) -> None:
    base, model = bases_in_fp64(kind)
    company = members()
    trainer = LoraTrainer(base)
    states = {}
    for member in company:
        slot = host(trainer, member.key, member.spec)
        states[member.key] = trainer.state(member.key)
        trainer.submit_forward_backward(
            member.key, slot, member.data, member.objective, ticket=member.key
        )
    finished, work = trainer.step()
    assert len(finished) == len(company) and not trainer.has_work, "one fused pass"
    num_inputs = sum(len(datum.tokens) - 1 for member in company for datum in member.data)
    assert work is not None and work.num_tokens < num_inputs - 50, "prompts are computed once"
    outputs = dict(finished)
    for member in company:
        state, spec = states[member.key], member.spec
        matrices = {
            module.name: (a.clone().requires_grad_(), b.clone().requires_grad_())
            for module, a, b in adapter_tensors(state.weights_P, spec, state.layout)
        }
        logprobs, gradients = naive_gradients(model, matrices, member)
        own = [
            gradient
            for _, a, b in adapter_tensors(state.grad_P, spec, state.layout)
            for gradient in (a, b)
        ]
        for ours, naive in zip(own, gradients, strict=True):
            torch.testing.assert_close(ours, naive, rtol=1e-9, atol=1e-12)
        for output, datum, naive in zip(outputs[member.key], member.data, logprobs, strict=True):
            trained = np.flatnonzero(datum.weights)
            np.testing.assert_allclose(output.logprobs[trained], naive, rtol=1e-6)


@pytest.mark.parametrize("kind", BASES)
def test_fused_equals_each_policy_alone_in_fp64_in_any_packing_order(kind: str) -> None:
    base, _ = bases_in_fp64(kind)
    alone = {m.key: train(base, [m], num_steps=2)[m.key] for m in members()}
    for order, budget_tokens in (((0, 1, 2, 3, 4, 5), 512), ((5, 3, 1, 4, 2, 0), 60)):
        company = [members()[idx] for idx in order]
        fused = train(base, company, num_steps=2, budget_tokens=budget_tokens)
        for key, together in fused.items():
            for ours, expected in (
                (together.grad_P, alone[key].grad_P),
                (together.weights_P, alone[key].weights_P),
            ):
                torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


def assert_same_bits(left: Result, right: Result) -> None:
    assert torch.equal(left.grad_P, right.grad_P)
    assert torch.equal(left.weights_P, right.weights_P)
    assert left.grad_norm == right.grad_norm
    for one, other in zip(left.outputs, right.outputs, strict=True):
        assert np.array_equal(one.logprobs, other.logprobs)
        assert (one.loss, one.counts) == (other.loss, other.counts)


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize(("seed", "budget_tokens"), [(0, 512), (1, 80), (2, 512)])
def test_in_exact_mode_company_changes_no_bit(kind: str, seed: int, budget_tokens: int) -> None:
    make_base, _, config = BASES[kind]
    base = make_base(**config)
    rng = np.random.default_rng(seed)
    company = members(seed)
    chosen = [company[idx] for idx in rng.permutation(len(company))[:4]]
    options = {"num_steps": 2, "is_exact": True, "budget_tokens": budget_tokens}
    fused = train(base, chosen, **options)
    for member in chosen:
        assert_same_bits(fused[member.key], train(base, [member], **options)[member.key])


@pytest.mark.parametrize("kind", BASES)
def test_in_exact_mode_company_changes_no_bit_of_a_score(kind: str) -> None:
    make_base, _, config = BASES[kind]
    trainer = LoraTrainer(make_base(**config), is_exact=True)
    company = [*members(), *crowd([9, 4, 30])]
    slots = {member.key: host(trainer, member.key, member.spec) for member in company}

    def scores(chosen: Sequence[Member]) -> dict[str, list[np.ndarray]]:
        for member in chosen:
            trainer.submit_forward(member.key, slots[member.key], member.data, member.key)
        finished = {}
        while trainer.has_work:
            finished |= dict(trainer.step()[0])
        return {key: [output.logprobs for output in outputs] for key, outputs in finished.items()}

    together = scores(company)
    for member in company:
        alone = scores([member])[member.key]
        assert all(map(np.array_equal, together[member.key], alone))


def poison(member: Member, road: str) -> Member:
    """Return the member with data whose loss is beyond what fp32 holds."""
    bad = member.data[0]
    fields = {name: getattr(bad, name).copy() for name in ("weights", "advantages")}
    if "inf" in road:
        fields["weights"] *= 1e4
    fields["advantages"][:] = -3e38 if "minus" in road else 3e38
    return replace(member, data=[replace(bad, **fields), *member.data[1:]])


@pytest.mark.parametrize("road", ["inf loss", "minus inf loss", "gradient beyond the moments"])
@pytest.mark.parametrize("is_exact", [True, False])
def test_a_loss_that_is_not_finite_changes_no_bit_of_a_neighbour(road: str, is_exact: bool) -> None:
    base = random_llama()
    company = members()[:4]
    healthy = train(base, company, is_exact=is_exact)
    company[1] = poison(company[1], road)
    poisoned = train(base, company, is_exact=is_exact)
    for key in "acd":
        assert_same_bits(poisoned[key], healthy[key])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("victim", range(4))
def test_weights_that_are_not_finite_change_no_bit_of_a_neighbour(
    value: float, is_exact: bool, victim: int
) -> None:
    base = random_llama()
    company = members()[:4]
    healthy = train(base, company, is_exact=is_exact)
    trainer = LoraTrainer(base, is_exact=is_exact)
    slots = {member.key: host(trainer, member.key, member.spec) for member in company}
    bad = company[victim]
    row_P = trainer.weights(bad.key).clone()
    base.bank.write(slots[bad.key], torch.where(row_P == 0, row_P, value))
    for member in company:
        trainer.submit_forward_backward(
            member.key, slots[member.key], member.data, member.objective, ticket=member.key
        )
    outputs = dict(trainer.step()[0])
    before_P = trainer.weights(bad.key).clone()
    adam = AdamParams(lr=0.01, weight_decay=0.1)
    steps = {member.key: trainer.optim_step(member.key, adam) for member in company}
    assert steps[bad.key].is_vetoed
    assert torch.equal(trainer.weights(bad.key), before_P)
    for member in company:
        if member is not bad:
            assert not steps[member.key].is_vetoed
            assert torch.equal(trainer.weights(member.key), healthy[member.key].weights_P)
            for one, other in zip(outputs[member.key], healthy[member.key].outputs, strict=True):
                assert np.array_equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_checkpointed_gradients_are_those_of_the_plain_pass(dtype: torch.dtype) -> None:
    base = random_llama(dtype=dtype)
    plain = train(base, members(), checkpointing="never")
    checkpointed = train(base, members(), checkpointing="always")
    for key, result in plain.items():
        assert_same_bits(checkpointed[key], result)


def crowd(lengths: Sequence[int]) -> list[Member]:
    """Return policies of one rank bucket with one datum each: batched products."""
    rng = np.random.default_rng(0)
    return [
        Member(
            f"{idx}",
            AdapterSpec(rank=2 + idx % 7, targets=("attention", "mlp", "head"), seed=idx),
            Objective(name="dppo_tis"),
            [random_datum(rng, length, num_prompt=1)],
        )
        for idx, length in enumerate(lengths)
    ]


CROWDS = {
    "equal lengths": [13] * 9,
    "short": [3, 9, 5, 4, 8, 2, 6],
    "long": [40, 9, 25, 33, 14, 50],
}


@pytest.mark.parametrize("lengths", CROWDS.values(), ids=CROWDS)
def test_many_policies_of_one_bucket_equal_each_alone_in_fp64(lengths: list[int]) -> None:
    base, _ = bases_in_fp64("llama")
    fused = train(base, crowd(lengths), num_steps=2)
    for member in crowd(lengths):
        alone = train(base, [member], num_steps=2)[member.key]
        torch.testing.assert_close(fused[member.key].grad_P, alone.grad_P, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("company", [members(), crowd(CROWDS["equal lengths"])])
def test_a_base_in_bf16_trains_fp32_masters_towards_the_same_gradient(
    company: list[Member],
) -> None:
    wide = train(random_llama(), company)
    narrow = train(random_llama(dtype=torch.bfloat16), company)
    for key, result in narrow.items():
        assert result.grad_P.dtype == result.weights_P.dtype == torch.float32
        similarity = torch.cosine_similarity(result.grad_P, wide[key].grad_P, dim=0)
        assert similarity > 0.9


@pytest.mark.parametrize("lengths", CROWDS.values(), ids=CROWDS)
def test_one_of_many_with_weights_that_are_not_finite_changes_no_bit_of_the_others(
    lengths: list[int],
) -> None:
    base = random_llama()
    company = crowd(lengths)
    gradients = []
    for value in (None, float("nan"), float("inf")):
        trainer = LoraTrainer(base)
        slots = [host(trainer, member.key, member.spec) for member in company]
        if value is not None:
            base.bank.write(slots[2], torch.full_like(base.bank.read(slots[2]), value))
        for member, slot in zip(company, slots, strict=True):
            trainer.submit_forward_backward(
                member.key, slot, member.data, member.objective, ticket=member.key
            )
        trainer.step()
        gradients.append({member.key: trainer.gradient(member.key) for member in company})
        for slot in slots:
            base.bank.free(slot)
    healthy, *poisoned = gradients
    for others in poisoned:
        assert not others["2"].isfinite().all()
        for key in healthy.keys() - {"2"}:
            assert torch.equal(others[key], healthy[key])
