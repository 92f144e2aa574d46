"""Sampling through the SDK: what is drawn, where it stops, and what is said of its tokens."""

import math
import pickle
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tinker.served import BASE, CHAT, FOLDER, WAIT_S, Tenant, datum, new_run, prompt, train

pytestmark = pytest.mark.slow

TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)
ASKED = TOKENIZER.encode(CHAT)
STARTED = TOKENIZER.encode("User: What is 3 + 4?\n\nAssistant:")
SEVEN = TOKENIZER.encode("3 + 4 = 7")[-1]
NUM_SAMPLES = 2000


@pytest.fixture(scope="module")
def sampler(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=BASE).result(timeout=WAIT_S)


@pytest.fixture(scope="module")
def expected_NV() -> torch.Tensor:
    """The stock model's logprobs after every token of `ASKED`."""
    stock = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64)
    with torch.no_grad():
        return stock(torch.tensor([ASKED])).logits[0].log_softmax(-1)


def sample(
    sampler: tinker.SamplingClient,
    tokens: list[int] = ASKED,
    n: int = 1,
    *,
    extras: dict[str, Any] | None = None,
    **params: Any,
) -> types.SampleResponse:
    asked = types.SamplingParams(**params)
    return sampler.sample(prompt(tokens), n, asked, **(extras or {})).result(timeout=WAIT_S)


def text(sequence: types.SampledSequence) -> str:
    return TOKENIZER.decode(sequence.tokens)


# ---------------------------------------------------------------------------------------------
# What is drawn


def test_temperature_0_takes_what_the_stock_model_finds_likeliest(sampler, expected_NV):
    (sequence,) = sample(sampler, max_tokens=1, temperature=0.0).sequences
    assert sequence.tokens == [int(expected_NV[-1].argmax())]
    assert sequence.stop_reason == "length"


def test_a_seed_decides_what_is_drawn_and_none_does_not(sampler):
    drawn = [
        [one.tokens for one in sample(sampler, n=4, max_tokens=12, seed=seed).sequences]
        for seed in (1, 1, 2, None, None)
    ]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2] and drawn[3] != drawn[4]
    assert len({tuple(tokens) for tokens in drawn[0]}) > 1, "siblings differ"


def test_logprobs_of_what_was_drawn_are_those_of_scoring_it(sampler):
    (sequence,) = sample(sampler, max_tokens=16, seed=3, stop=[]).sequences
    whole = prompt(ASKED + sequence.tokens)
    scored = sampler.compute_logprobs(whole).result(timeout=WAIT_S)
    assert np.allclose(sequence.logprobs, scored[len(ASKED) :], atol=1e-4)


def test_top_k_and_top_p_narrow_what_can_be_drawn(sampler, expected_NV):
    likeliest = expected_NV[-1].topk(2).indices.tolist()
    for params in ({"top_k": 2}, {"top_p": 1e-6}):
        drawn = sample(sampler, n=16, max_tokens=1, seed=1, **params).sequences
        allowed = likeliest if "top_k" in params else likeliest[:1]
        assert {one.tokens[0] for one in drawn} <= set(allowed)


def test_a_sampler_keeps_its_weights_while_the_run_goes_on(service):
    run = new_run(service)
    before = run.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
    first = before.compute_logprobs(prompt(ASKED)).result(timeout=WAIT_S)
    train(run, [datum(ASKED)], lr=1e-2)
    after = run.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
    assert before.compute_logprobs(prompt(ASKED)).result(timeout=WAIT_S) == first
    assert sum(after.compute_logprobs(prompt(ASKED)).result(timeout=WAIT_S)[1:]) > sum(first[1:])


def test_an_in_flight_sampler_takes_the_newest_published_weights(service):
    run = new_run(service)
    shared = run.save_weights_and_get_sampling_client(kind="inflight").result(timeout=WAIT_S)
    first = shared.compute_logprobs(prompt(ASKED)).result(timeout=WAIT_S)
    train(run, [datum(ASKED)], lr=1e-2)
    newer = run.save_weights_and_get_sampling_client(kind="inflight").result(timeout=WAIT_S)
    assert newer.compute_logprobs(prompt(ASKED)).result(timeout=WAIT_S) != first


def test_training_says_of_a_sample_what_sampling_said(service):
    run = new_run(service)
    train(run, [datum(ASKED)], lr=1e-3)
    sampler = run.save_weights_and_get_sampling_client().result(timeout=WAIT_S)
    (sequence,) = sample(sampler, max_tokens=12, seed=5, stop=[]).sequences
    whole = datum(ASKED + sequence.tokens)
    output = run.forward([whole], "cross_entropy").result(timeout=WAIT_S)
    trained = output.loss_fn_outputs[0]["logprobs"].to_numpy()[len(ASKED) - 1 :]
    assert np.allclose(trained, sequence.logprobs, atol=1e-4)


# ---------------------------------------------------------------------------------------------
# Where it stops


def test_without_stops_the_base_ends_by_its_own_token_which_is_kept(sampler):
    for params in ({"max_tokens": 60}, {}):
        (sequence,) = sample(sampler, temperature=0.0, **params).sequences
        assert sequence.stop_reason == "stop"
        assert text(sequence).endswith("<|im_end|>") and "7" in text(sequence)


def test_an_empty_list_of_stops_lets_nothing_stop_it(sampler):
    (sequence,) = sample(sampler, temperature=0.0, max_tokens=60, stop=[]).sequences
    assert (sequence.stop_reason, len(sequence.tokens)) == ("length", 60)
    assert "<|im_end|>" in text(sequence)[:-10]


@pytest.mark.parametrize("stop", ["7", ["nothing", "7"], [SEVEN, 1]], ids=repr)
def test_a_stop_ends_the_sample_and_is_kept(sampler, stop):
    (sequence,) = sample(sampler, temperature=0.0, max_tokens=60, stop=stop).sequences
    assert sequence.stop_reason == "stop"
    assert text(sequence).endswith("7") and text(sequence).count("7") == 1


def test_the_end_token_is_no_stop_beside_stops_that_were_named(sampler):
    (sequence,) = sample(sampler, temperature=0.0, max_tokens=40, stop=["@@"]).sequences
    assert sequence.stop_reason == "length"


def test_a_stop_string_may_end_within_a_token_or_span_several(sampler):
    stop = "\n\nUser:"
    (sequence,) = sample(sampler, STARTED, temperature=0.0, max_tokens=40, stop=stop).sequences
    assert sequence.stop_reason == "stop" and stop in text(sequence)
    assert stop not in TOKENIZER.decode(sequence.tokens[:-1])


def test_a_request_that_does_not_fit_the_context_says_so(sampler):
    with pytest.raises(tinker.TinkerError, match=r"2048"):
        sample(sampler, ASKED * 40, max_tokens=2000)
    with pytest.raises(tinker.TinkerError, match=r"2048"):
        sample(sampler, (ASKED * 100)[:2048], max_tokens=1)


# ---------------------------------------------------------------------------------------------
# What is said of its tokens


def test_prompt_logprobs_are_those_of_the_stock_model(sampler, expected_NV):
    asked = {"include_prompt_logprobs": True}
    response = sample(sampler, max_tokens=1, extras=asked)
    assert response.prompt_logprobs is not None
    assert response.prompt_logprobs[0] is None and len(response.prompt_logprobs) == len(ASKED)
    expected = expected_NV[:-1].gather(1, torch.tensor(ASKED[1:])[:, None])[:, 0]
    assert np.allclose(response.prompt_logprobs[1:], expected.numpy(), atol=1e-4)
    assert sample(sampler, max_tokens=1).prompt_logprobs is None


def test_only_the_last_tokens_are_scored_when_that_is_asked(sampler):
    everything = sampler.compute_logprobs(prompt(ASKED)).result(timeout=WAIT_S)
    for last in (1, 5, len(ASKED) - 1):
        some = sampler.compute_logprobs(prompt(ASKED), last).result(timeout=WAIT_S)
        assert some[:-last] == [None] * (len(ASKED) - last)
        assert np.allclose(some[-last:], everything[-last:], atol=1e-5)


def test_the_likeliest_prompt_tokens_are_those_of_the_stock_model(sampler, expected_NV):
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3}
    response = sample(sampler, max_tokens=1, extras=asked)
    rows = response.topk_prompt_logprobs
    assert rows is not None and rows[0] is None and len(rows) == len(ASKED)
    for row, expected_V in zip(rows[1:], expected_NV[:-1], strict=True):
        values, tokens = expected_V.topk(3)
        assert row is not None and [token for token, _ in row] == tokens.tolist()
        assert np.allclose([value for _, value in row], values.numpy(), atol=1e-4)


def test_the_likeliest_sampled_tokens_hold_what_was_taken_greedily(sampler):
    response = sample(
        sampler, max_tokens=6, temperature=0.0, stop=[], extras={"topk_sample_logprobs": 2}
    )
    (sequence,) = response.sequences
    assert sequence.topk_logprobs is not None
    assert [row[0][0] for row in sequence.topk_logprobs if row] == sequence.tokens
    assert all(len(row or ()) == 2 for row in sequence.topk_logprobs)


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_tokens_of_ones_own_are_scored_at_every_prompt_position(sampler, expected_NV, is_sparse):
    ids = torch.full((len(ASKED) - 1, 2), -1, dtype=torch.int64)
    ids[-3:] = torch.tensor([[5, 6], [7, -1], [8, 9]])
    made = types.TensorData
    target = made.from_torch_sparse(ids, pad_value=-1) if is_sparse else made.from_torch(ids)
    response = sample(sampler, max_tokens=1, extras={"target_prompt_logprobs": target})
    assert response.target_prompt_logprobs is not None
    found = response.target_prompt_logprobs.to_torch()
    expected = expected_NV[:-1].gather(1, ids.clamp(min=0))
    assert torch.allclose(found.double()[ids >= 0], expected[ids >= 0], atol=1e-4)
    assert (found[ids < 0] == 0).all()


def test_alternatives_to_prompt_tokens_are_drawn_or_refused_in_words(sampler, expected_NV):
    try:
        response = sample(sampler, max_tokens=1, extras={"prompt_alt_tokens_k": 2})
    except tinker.TinkerError as error:
        assert "prompt_alt_tokens_k" in str(error)
        return
    assert response.prompt_alt_tokens is not None
    tokens = response.prompt_alt_tokens.tokens.to_torch()
    expected = expected_NV[:-1].gather(1, tokens)
    found = response.prompt_alt_tokens.logprobs.to_torch().double()
    assert torch.allclose(found, expected, atol=1e-4)


def test_samples_of_one_request_have_ids_of_their_own(sampler):
    sequences = sample(sampler, n=8, max_tokens=2).sequences
    assert len({one.sequence_id for one in sequences}) == 8


# ---------------------------------------------------------------------------------------------
# Many at once


def test_two_thousand_samples_are_in_flight_at_once_and_all_come_back(service, sampler):
    """Of two clients, each of which has a thousand in flight at most."""
    asked = types.SamplingParams(max_tokens=2, temperature=0.0, stop=[])
    another = service.create_sampling_client(base_model=BASE).result(timeout=WAIT_S)
    futures = [
        client.sample(prompt(ASKED[-4:]), 1, asked)
        for client in (sampler, another)
        for _ in range(NUM_SAMPLES // 2)
    ]
    drawn = {tuple(one.result(timeout=WAIT_S).sequences[0].tokens) for one in futures}
    assert len(drawn) == 1


def test_one_poll_for_all_samples_of_a_client_gives_what_a_poll_for_each_does(acme: Tenant):
    """The service tells clients to poll for each, but answers those that are told otherwise."""
    service = acme.service()
    told = {"sample_use_retrieve_futures": True, "sample_join_sampling_session": True}
    service.holder._client_config = service.holder._client_config.model_copy(update=told)
    client = service.create_sampling_client(base_model=BASE).result(timeout=WAIT_S)
    copy = pickle.loads(pickle.dumps(client))
    asked = [types.SamplingParams(max_tokens=4, seed=seed, stop=[]) for seed in range(20)]
    drawn = [[one.sample(prompt(ASKED), 2, params) for params in asked] for one in (client, copy)]
    tokens = [
        [[one.tokens for one in future.result(timeout=WAIT_S).sequences] for future in futures]
        for futures in drawn
    ]
    assert tokens[0] == tokens[1]
    plain = acme.service().create_sampling_client(base_model=BASE).result(timeout=WAIT_S)
    assert tokens[0][7] == [one.tokens for one in sample(plain, n=2, **dict(asked[7])).sequences]


def test_a_pickled_sampler_is_one_more_client_of_it(sampler):
    """As programs of several processes make them: each counts its requests by itself."""
    mine = sampler.compute_logprobs(prompt(ASKED)).result(timeout=WAIT_S)
    copies = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
    theirs = [copy.compute_logprobs(prompt(ASKED)) for copy in copies]
    assert [one.result(timeout=WAIT_S) for one in theirs] == [mine, mine]


def test_a_cancelled_sample_gives_its_place_back(sampler):
    long = types.SamplingParams(max_tokens=1500, stop=[])
    futures = [sampler.sample(prompt(ASKED), 1, long) for _ in range(8)]
    for future in futures:
        future.future().cancel()
    (sequence,) = sample(sampler, max_tokens=1).sequences
    assert len(sequence.tokens) == 1 and math.isfinite(sequence.logprobs[0])


def test_a_session_is_finished_again_and_what_was_queued_in_it_is_done(acme: Tenant, sampler):
    with acme.wire() as wire:
        session = wire.new_session()
        model = wire.new_model(session)
        passed = wire.forward_backward(model, 1, [datum(ASKED)]).json()["request_id"]
        for reason in ("success", "errored"):
            ended = wire.post(f"sessions/{session}/finish", reason={"type": reason}, detail=None)
            assert ended.status_code == 200
        assert wire.result(passed).loss_fn_outputs
    assert sample(sampler, max_tokens=1).sequences
