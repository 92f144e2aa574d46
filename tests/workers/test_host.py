"""The worker from the inside: versions and slots, order within a policy, who is touched by what."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from marlaas.engine.generator import BatchGenerator
from marlaas.engine.trainer import LoraTrainer
from marlaas.types import (
    AdamParams,
    AdapterSpec,
    Completion,
    Datum,
    GenerateRequest,
    Objective,
    PolicyId,
    SamplingParams,
    StopReason,
)
from marlaas.workers import messages as m
from marlaas.workers.host import EngineHost
from tests.models import random_llama

A, B = PolicyId("acme/a"), PolicyId("birch/b")


class Calls:
    """Sends messages to a host and keeps the replies by call id."""

    def __init__(self) -> None:
        base = random_llama()
        generator = BatchGenerator(base, kv_capacity_tokens=8192, max_context=512)
        self.host = EngineHost("engine", base, generator, LoraTrainer(base))
        self.replies: dict[int, m.Reply] = {}
        self.next_id = 0

    def send(self, message: m.Call) -> int:
        self.next_id += 1
        self.host.handle(self.next_id, message)
        self._collect()
        return self.next_id

    def quantum(self) -> None:
        self.host.run_quantum()
        self._collect()

    def finish(self) -> None:
        while self.host.has_work:
            self.quantum()

    def ask(self, message: m.Call) -> m.Reply:
        call_id = self.send(message)
        self.finish()
        return self.replies[call_id]

    def completion(self, call_id: int) -> Completion:
        reply = self.replies[call_id]
        assert isinstance(reply, m.ReplyCompletion), reply
        return reply.completion

    def num_slots(self) -> int:
        return self.host.base.bank.num_used

    def _collect(self) -> None:
        self.replies |= dict(self.host.replies)
        self.host.replies.clear()


@pytest.fixture
def calls() -> Calls:
    calls = Calls()
    for policy in (A, B):
        assert isinstance(calls.ask(m.Create(policy, AdapterSpec())), m.ReplyHash)
    return calls


def generate(
    policy: PolicyId | None,
    version: int = 0,
    *,
    name: str = "s",
    max_tokens: int = 8,
    in_flight: bool = False,
) -> m.Generate:
    return m.Generate(
        GenerateRequest(
            request_id=name,
            sequence_id=name,
            policy_id=policy,
            version=version,
            tokens=np.arange(5, dtype=np.int32),
            sampling=SamplingParams(max_tokens=max_tokens, seed=7),
            in_flight=in_flight,
        )
    )


def train(policy: PolicyId, seed: int = 0) -> m.ForwardBackward:
    rng = np.random.default_rng(seed)
    weights = np.full(12, 0.1, dtype=np.float32)
    weights[0] = 0.0
    datum = Datum(
        tokens=rng.integers(0, 128, 12).astype(np.int32),
        weights=weights,
        advantages=rng.standard_normal(12).astype(np.float32),
        sampling_logprobs=np.full(12, -4.0, dtype=np.float32),
    )
    return m.ForwardBackward(policy, [datum], Objective(name="importance_sampling"))


def step(policy: PolicyId, lr: float = 1e-2) -> m.OptimStep:
    return m.OptimStep(policy, AdamParams(lr=lr), None)


def test_an_optim_step_waits_for_the_passes_of_its_own_policy_only(calls: Calls) -> None:
    calls.send(train(A))
    waiting = calls.send(step(A))
    other = calls.send(step(B))
    assert other in calls.replies
    assert waiting not in calls.replies
    calls.finish()
    reply = calls.replies[waiting]
    assert isinstance(reply, m.ReplyStep)
    assert reply.result.version == 1
    assert reply.result.grad_norm > 0


def test_a_new_version_is_not_live_before_publish(calls: Calls) -> None:
    calls.send(train(A))
    calls.ask(step(A))
    refused = calls.ask(generate(A, version=1))
    assert isinstance(refused, m.ReplyError)
    assert refused.code == "Conflict"
    assert "live versions: [0]" in refused.message
    calls.ask(m.Publish(A, 1))
    assert isinstance(calls.ask(generate(A, version=1)), m.ReplyCompletion)


def test_a_retired_version_keeps_its_slot_until_its_last_sequence_ends(calls: Calls) -> None:
    running = calls.send(generate(A, max_tokens=20))
    calls.quantum()
    calls.send(train(A))
    while calls.host.trainer.has_work:
        calls.quantum()
    calls.send(step(A))
    calls.send(m.Publish(A, 1))
    calls.send(m.Retire(A, 0))
    assert calls.num_slots() == 3
    calls.finish()
    completion = calls.completion(running)
    assert len(completion.tokens) == 20
    assert (completion.versions == 0).all()
    assert calls.num_slots() == 2


def test_training_and_publishing_do_not_change_what_a_pinned_sequence_samples(calls: Calls) -> None:
    first = calls.send(generate(A, name="first", max_tokens=20))
    calls.finish()
    second = calls.send(generate(A, name="second", max_tokens=20))
    calls.quantum()
    calls.send(train(A))
    calls.send(step(A, lr=1.0))
    calls.finish()
    calls.send(m.Publish(A, 1))
    expected, seen = calls.completion(first), calls.completion(second)
    assert (expected.tokens == seen.tokens).all()
    assert expected.adapter_hash == seen.adapter_hash != ""


def test_an_in_flight_sequence_names_the_version_of_every_token(calls: Calls) -> None:
    running = calls.send(generate(A, max_tokens=30, in_flight=True))
    for _ in range(6):
        calls.quantum()
    calls.send(train(A))
    while calls.host.trainer.has_work:
        calls.quantum()
    calls.send(step(A))
    calls.send(m.Publish(A, 1))
    calls.send(m.Retire(A, 0))
    calls.finish()
    versions = calls.completion(running).versions
    assert versions[0] == 0
    assert versions[-1] == 1
    assert (np.diff(versions) >= 0).all()
    assert calls.num_slots() == 2


def test_removing_a_policy_cancels_its_sequences_and_touches_nobody_else(calls: Calls) -> None:
    before = calls.send(generate(B, name="before"))
    calls.finish()
    doomed = calls.send(generate(A, name="doomed", max_tokens=50))
    other = calls.send(generate(B, name="other"))
    calls.quantum()
    queued = calls.send(train(A))
    assert isinstance(calls.ask(m.Remove(A)), m.ReplyNone)
    assert calls.completion(doomed).stop_reason is StopReason.CANCELLED
    assert isinstance(calls.replies[queued], m.ReplyError)
    assert (calls.completion(other).tokens == calls.completion(before).tokens).all()
    assert calls.num_slots() == 1
    assert isinstance(calls.ask(generate(A)), m.ReplyError)


def test_a_bad_call_is_answered_and_the_host_goes_on(calls: Calls) -> None:
    bad = m.ForwardBackward(A, train(A).data, Objective(name="nonsense"))
    reply = calls.ask(bad)
    assert isinstance(reply, m.ReplyError)
    assert reply.code == "InvalidRequest"
    assert "dppo_tis" in reply.message
    too_long = generate(A)
    request = too_long.request
    long = GenerateRequest(
        request_id="long",
        sequence_id="long",
        policy_id=A,
        version=0,
        tokens=np.zeros(600, dtype=np.int32),
        sampling=request.sampling,
    )
    refused = calls.ask(m.Generate(long))
    assert isinstance(refused, m.ReplyError)
    assert "512" in refused.message
    assert isinstance(calls.ask(generate(A, name="next")), m.ReplyCompletion)


def test_a_policy_loaded_from_its_snapshot_goes_on_as_if_it_had_never_left(
    calls: Calls, tmp_path
) -> None:
    snapshot = str(tmp_path / "state.safetensors")
    calls.send(train(A))
    saved = calls.ask(m.OptimStep(A, AdamParams(lr=1e-2), snapshot))
    calls.send(train(A, seed=1))
    expected = calls.ask(step(A))
    calls.ask(m.Remove(A))
    loaded = calls.ask(m.Load(A, snapshot))
    assert isinstance(loaded, m.ReplyStep) and isinstance(saved, m.ReplyStep)
    assert loaded.result.adapter_hash == saved.result.adapter_hash
    calls.send(train(A, seed=1))
    again = calls.ask(step(A))
    assert isinstance(again, m.ReplyStep) and isinstance(expected, m.ReplyStep)
    assert again.result == expected.result


def test_a_saved_adapter_can_be_sampled_from_as_a_policy_of_its_own(calls: Calls, tmp_path) -> None:
    calls.send(train(A))
    calls.ask(step(A, lr=0.5))
    calls.ask(m.Publish(A, 1))
    first = calls.send(generate(A, version=1, name="trained"))
    calls.finish()
    folder = str(tmp_path / "adapter")
    saved = calls.ask(m.SaveAdapter(A, 1, folder))
    loaded = calls.ask(m.LoadVersion(PolicyId("chat"), 0, folder))
    assert saved == loaded
    second = calls.send(generate(PolicyId("chat"), name="loaded"))
    calls.finish()
    assert (calls.completion(first).tokens == calls.completion(second).tokens).all()


def test_weights_carried_to_another_host_sample_the_same(calls: Calls) -> None:
    calls.send(train(A))
    calls.ask(step(A, lr=0.5))
    calls.ask(m.Publish(A, 1))
    exported = calls.ask(m.ExportVersion(A, 1))
    assert isinstance(exported, m.ReplyVersion)
    other = Calls()
    carried = m.ImportVersion(A, 1, exported.spec, exported.adapter_hash, exported.row)
    assert isinstance(other.ask(carried), m.ReplyNone)
    here, there = calls.send(generate(A, version=1)), other.send(generate(A, version=1))
    calls.finish()
    other.finish()
    assert (calls.completion(here).tokens == other.completion(there).tokens).all()
    assert calls.completion(here).adapter_hash == other.completion(there).adapter_hash


SERVED = PolicyId("acme/a#serve-1")
"""A policy id of its own: no job can be called so."""


def trained_and_saved(calls: Calls, folder: Path) -> m.Reply:
    """Train A to version 1 and write that version; return the reply with its hash."""
    calls.send(train(A))
    calls.ask(step(A, lr=0.5))
    calls.ask(m.Publish(A, 1))
    return calls.ask(m.SaveAdapter(A, 1, str(folder)))


def test_a_version_is_served_beside_its_own_policy_in_training(
    calls: Calls, tmp_path: Path
) -> None:
    saved = trained_and_saved(calls, tmp_path / "v1")
    expected = calls.send(generate(A, version=1, name="expected"))
    calls.finish()
    assert calls.ask(m.LoadVersion(SERVED, 1, str(tmp_path / "v1"))) == saved
    running = calls.send(generate(SERVED, version=1, name="served", max_tokens=8))
    calls.quantum()
    calls.send(train(A, seed=1))
    calls.send(step(A, lr=0.5))
    calls.finish()
    calls.send(m.Publish(A, 2))
    calls.send(m.Retire(A, 1))
    assert (calls.completion(running).tokens == calls.completion(expected).tokens).all()
    assert isinstance(calls.ask(generate(SERVED, version=1, name="again")), m.ReplyCompletion)


def test_serving_a_version_changes_no_bit_of_its_policys_training(
    calls: Calls, tmp_path: Path
) -> None:
    alone = Calls()
    for one in (calls, alone):
        one.send(m.Remove(A))
        one.ask(m.Create(A, AdapterSpec()))
        trained_and_saved(one, tmp_path / "v1")
    calls.ask(m.LoadVersion(SERVED, 1, str(tmp_path / "v1")))
    calls.send(generate(SERVED, version=1, name="served", max_tokens=50))
    results = []
    for one in (calls, alone):
        one.send(train(A, seed=1))
        results.append(one.ask(step(A)))
    assert results[0] == results[1]


def test_a_version_can_be_judged_and_scored_where_no_policy_of_its_name_is_trained(
    calls: Calls, tmp_path: Path
) -> None:
    saved = trained_and_saved(calls, tmp_path / "v1")
    data = train(A).data
    expected = calls.ask(m.Forward(A, 1, data))
    other = Calls()
    assert other.ask(m.LoadVersion(A, 1, str(tmp_path / "v1"))) == saved
    assert isinstance(other.ask(generate(A, version=1)), m.ReplyCompletion)
    scored = other.ask(m.Forward(A, 1, data))
    assert isinstance(scored, m.ReplyOutputs) and isinstance(expected, m.ReplyOutputs)
    assert (scored.outputs[0].logprobs == expected.outputs[0].logprobs).all()
    refused = other.ask(train(A))
    assert isinstance(refused, m.ReplyError) and "is not trained on" in refused.message
    assert isinstance(other.ask(m.Create(A, AdapterSpec())), m.ReplyError), "the name is taken"
    other.ask(m.Retire(A, 1))
    assert isinstance(other.ask(m.Create(A, AdapterSpec())), m.ReplyHash)


def test_a_policy_that_is_only_sampled_goes_with_its_last_sequence(
    calls: Calls, tmp_path: Path
) -> None:
    trained_and_saved(calls, tmp_path / "v1")
    before = calls.num_slots()
    calls.ask(m.LoadVersion(SERVED, 1, str(tmp_path / "v1")))
    running = calls.send(generate(SERVED, version=1, max_tokens=20))
    calls.quantum()
    calls.send(m.Retire(SERVED, 1))
    assert calls.num_slots() == before + 1
    calls.finish()
    assert len(calls.completion(running).tokens) == 20
    assert calls.num_slots() == before
    gone = calls.ask(generate(SERVED, version=1))
    assert isinstance(gone, m.ReplyError) and gone.code == "NotFound"


def test_versions_of_one_policy_have_one_shape(calls: Calls, tmp_path: Path) -> None:
    trained_and_saved(calls, tmp_path / "v1")
    calls.ask(m.Create(SERVED, AdapterSpec(rank=4)))
    refused = calls.ask(m.LoadVersion(SERVED, 1, str(tmp_path / "v1")))
    assert isinstance(refused, m.ReplyError) and refused.code == "Conflict"
    assert "another shape" in refused.message


def test_a_fork_is_live_with_the_weights_it_began_from(calls: Calls, tmp_path: Path) -> None:
    saved = trained_and_saved(calls, tmp_path / "v1")
    fork = PolicyId("acme/fork")
    assert calls.ask(m.CreateFrom(fork, AdapterSpec(), str(tmp_path / "v1"))) == saved
    first, second = (
        calls.send(generate(policy, version, name=policy))
        for policy, version in ((A, 1), (fork, 0))
    )
    calls.finish()
    assert (calls.completion(first).tokens == calls.completion(second).tokens).all()
    assert calls.ask(m.SaveAdapter(fork, 0, str(tmp_path / "again"))) == saved
    names = ("adapter_model.safetensors", "adapter_config.json")
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "v1" / name).read_bytes()
    calls.send(train(fork))
    stepped = calls.ask(step(fork))
    assert isinstance(stepped, m.ReplyStep) and stepped.result.version == 1
    taken = calls.ask(m.CreateFrom(fork, AdapterSpec(), str(tmp_path / "v1")))
    assert isinstance(taken, m.ReplyError) and taken.code == "Conflict"


# ---------------------------------------------------------------------------------------------
# Verbs of clients that drive a policy step by step


def test_a_cleared_gradient_leaves_a_step_of_the_clock(calls: Calls) -> None:
    calls.send(train(A))
    waiting = calls.send(m.ZeroGrad(A))
    behind = calls.send(step(A))
    assert waiting not in calls.replies, "it waits for the pass before it"
    calls.finish()
    assert isinstance(calls.replies[waiting], m.ReplyNone)
    first = calls.replies[behind]
    assert isinstance(first, m.ReplyStep)
    assert (first.result.version, first.result.grad_norm) == (1, 0.0)
    poisoned = train(A, seed=1)
    poisoned.data[0].weights[-1] = 3e38
    poisoned.data[0].advantages[-1] = 1e3
    calls.ask(poisoned)
    calls.ask(m.ZeroGrad(A))
    calls.ask(train(A))
    second = calls.ask(step(A))
    assert isinstance(second, m.ReplyStep)
    assert second.result.grad_norm > 0 and not second.result.is_vetoed


def test_a_state_is_saved_as_of_the_last_step_in_the_order_of_calls(
    calls: Calls, tmp_path: Path
) -> None:
    early, late = str(tmp_path / "early"), str(tmp_path / "late")
    calls.send(m.SaveState(A, early))
    calls.send(train(A))
    stepping, saving = calls.send(step(A)), calls.send(m.SaveState(A, late))
    assert saving not in calls.replies
    calls.finish()
    stepped = calls.replies[stepping]
    assert isinstance(stepped, m.ReplyStep) and isinstance(calls.replies[saving], m.ReplyNone)
    calls.send(train(A, seed=1))
    calls.finish()
    calls.ask(m.SaveState(A, str(tmp_path / "again")))
    assert (tmp_path / "again").read_bytes() == (tmp_path / "late").read_bytes()
    expected = calls.ask(step(A))
    for path, version in ((early, 0), (late, 1)):
        calls.ask(m.Remove(A))
        loaded = calls.ask(m.Load(A, path))
        assert isinstance(loaded, m.ReplyStep) and loaded.result.version == version
    assert loaded.result.adapter_hash == stepped.result.adapter_hash
    calls.send(train(A, seed=1))
    assert calls.ask(step(A)) == expected
    refused = calls.ask(m.SaveState(PolicyId("acme/none"), late))
    assert isinstance(refused, m.ReplyError) and refused.code == "NotFound"


def test_the_newest_version_is_scored_before_it_is_live(calls: Calls) -> None:
    data = train(A).data
    calls.send(train(A))
    calls.ask(step(A, lr=0.5))
    before = calls.ask(m.Forward(A, 1, data))
    calls.ask(m.Publish(A, 1))
    after = calls.ask(m.Forward(A, 1, data))
    old = calls.ask(m.Forward(A, 0, data))
    assert isinstance(before, m.ReplyOutputs) and isinstance(after, m.ReplyOutputs)
    assert isinstance(old, m.ReplyOutputs)
    assert (before.outputs[0].logprobs == after.outputs[0].logprobs).all()
    assert (before.outputs[0].logprobs != old.outputs[0].logprobs).any()
    refused = calls.ask(m.Forward(A, 2, data))
    assert isinstance(refused, m.ReplyError) and refused.code == "Conflict"


def test_what_is_asked_of_tokens_comes_back_over_the_wire(calls: Calls) -> None:
    request = replace(
        generate(A).request,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        target_prompt_ids=np.full((5, 3), 7, dtype=np.int32),
        prompt_alt_tokens_k=4,
        prompt_logprobs_from=2,
        topk_sample_logprobs=6,
    )
    _, _, type_ = m.unpack_header(frame := m.pack(1, m.Generate(request)))
    message = m.unpack_body(type_, frame[m.HEADER_BYTES :])
    reply = calls.ask(message)  # type: ignore[arg-type]
    _, _, type_ = m.unpack_header(frame := m.pack(1, reply))
    read = m.unpack_body(type_, frame[m.HEADER_BYTES :])
    assert isinstance(read, m.ReplyCompletion)
    completion = read.completion
    assert completion.prompt_logprobs.shape == (5,)
    assert completion.topk_prompt_ids.shape == completion.topk_prompt_logprobs.shape == (5, 2)
    assert completion.target_prompt_logprobs.shape == (5, 3)
    assert completion.prompt_alt_ids.shape == completion.prompt_alt_logprobs.shape == (5, 4)
    assert completion.topk_sample_ids.shape == completion.topk_sample_logprobs.shape == (8, 6)
    assert np.isnan(completion.target_prompt_logprobs[:2]).all()
    assert np.isfinite(completion.target_prompt_logprobs[2:]).all()


def test_targets_and_their_outputs_come_back_over_the_wire(calls: Calls) -> None:
    shape = (12, 3)
    weights = np.ones(shape, dtype=np.float32)
    weights[0] = 0.0
    datum = replace(
        train(A).data[0],
        weights=weights,
        advantages=weights,
        sampling_logprobs=-4 * weights,
        targets=np.arange(36, dtype=np.int32).reshape(shape),
        is_scored_everywhere=True,
        loss_inputs={"clip_low": 0.2 * weights},
    )
    frame = m.pack(1, m.ForwardBackward(A, [datum], Objective(name="ppo")))
    _, _, type_ = m.unpack_header(frame)
    reply = calls.ask(m.unpack_body(type_, frame[m.HEADER_BYTES :]))  # type: ignore[arg-type]
    assert isinstance(reply, m.ReplyOutputs)
    logprobs = reply.outputs[0].logprobs
    assert logprobs.shape == shape and (logprobs[1:] < 0).all() and (logprobs[0] == 0).all()
