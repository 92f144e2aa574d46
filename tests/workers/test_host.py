"""The worker from the inside: versions and slots, order within a policy, who is touched by what."""

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
