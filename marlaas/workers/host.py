"""One engine worker from the inside: messages in, quanta of work, replies out.

The host is where tenants' names end and slots begin. It knows which (policy, version) lives in
which slot, how many running sequences hold it, and in which order each policy's calls must happen.

    version:  made (create, load, optim_step) -> live (publish) -> retired -> freed
    call:     queued per policy -> running in the trainer -> answered

- A version's slot is freed once it is retired, no running sequence holds it, and it is not the
  newest one, which the trainer trains on. A policy that is only sampled goes with its last version.
- Order is a barrier within one policy only: an `optim_step` waits for that policy's own passes.
- Work is done in quanta (one decode step, one prefill pass, one training pass), so a message waits
  for one quantum at most, and sampling and training of different tenants interleave.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from marlaas.engine.adapter_io import load_adapter, read_spec, save_adapter, target_kinds
from marlaas.engine.generator import BatchGenerator
from marlaas.engine.trainer import LoraTrainer
from marlaas.engine.types import SequenceRequest, SequenceResult
from marlaas.errors import Conflict, InvalidRequest, MarlaasError, NotFound
from marlaas.model.bank import Slot
from marlaas.model.base import BaseModel
from marlaas.runtime import cpu_s, now_s, rss_bytes
from marlaas.types import (
    AdapterSpec,
    Completion,
    GenerateRequest,
    PolicyId,
    StepResult,
    WorkerStats,
)
from marlaas.workers import messages as m

MAX_LEAD_S = 0.5
"""How far one kind of work may get ahead of the other while both have work, in seconds."""


@dataclass(slots=True)
class HostedVersion:
    """One version of one policy in the bank."""

    slot: Slot
    adapter_hash: str
    is_live: bool = False
    is_retired: bool = False
    num_users: int = 0
    """Running sequences and training passes that read the slot."""


Ordered = m.ForwardBackward | m.OptimStep | m.ZeroGrad | m.SaveState
"""Calls that happen in the order in which they came, policy by policy."""


@dataclass(slots=True)
class HostedPolicy:
    """What the host knows of one policy."""

    spec: AdapterSpec
    versions: dict[int, HostedVersion] = field(default_factory=dict)
    trained_version: int | None = None
    """Newest version, whose weights the trainer holds; None where the policy is only sampled."""
    calls: deque[tuple[int, Ordered]] = field(default_factory=deque)
    num_passes: int = 0
    """Calls that the trainer has taken and not finished."""


@dataclass(slots=True)
class RunningSequence:
    """A `Generate` call between submission and result."""

    call_id: int
    request: GenerateRequest
    held: list[int]
    """Versions whose slots it holds; more than one only when in-flight."""


class EngineHost:
    """Owns base, generator and trainer of one device. Synchronous; one thread."""

    def __init__(
        self,
        name: str,
        base: BaseModel,
        generator: BatchGenerator,
        trainer: LoraTrainer,
        *,
        is_synced: bool = False,
    ) -> None:
        """`is_synced`: what is written survives a loss of power before its call is answered."""
        self.name = name
        self.base = base
        self.generator = generator
        self.trainer = trainer
        self._is_synced = is_synced
        self.replies: list[tuple[int, m.Reply]] = []
        self._policies: dict[PolicyId, HostedPolicy] = {}
        self._sequences: dict[str, RunningSequence] = {}
        self._passes: dict[int, tuple[PolicyId | None, HostedVersion | None]] = {}
        self._started_s = now_s()
        self._busy_s: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._quanta: dict[str, int] = {}
        self._cpu_s: dict[str, float] = {}
        self._sampling_lead_s = 0.0
        self._immediate: dict[type, Callable] = {
            m.Generate: self._generate,
            m.Cancel: self._cancel,
            m.Release: self._release,
            m.Publish: self._publish,
            m.Retire: self._retire,
            m.ExportVersion: self._export,
            m.ImportVersion: self._import,
            m.GetStats: self._stats,
            m.Forward: self._forward,
            m.Create: self._create,
            m.CreateFrom: self._create_from,
            m.Load: self._load,
            m.LoadVersion: self._load_version,
            m.SaveAdapter: self._save_adapter,
            m.Remove: self._remove,
        }

    @property
    def has_work(self) -> bool:
        return self.generator.has_work or self.trainer.has_work

    def handle(self, call_id: int, message: m.Call) -> None:
        """Take one message; its reply appears in `replies` now or after some quanta."""
        began = self._now()
        try:
            if isinstance(message, Ordered):
                policy = self._policy(message.policy_id)
                policy.calls.append((call_id, message))
                self._advance(message.policy_id, policy)
            else:
                reply = self._immediate[type(message)](call_id, message)
                if reply is not None:
                    self.replies.append((call_id, reply))
        except MarlaasError as error:
            self.replies.append((call_id, m.ReplyError(type(error).__name__, str(error))))
        self._count("other", 0, began)

    def run_quantum(self) -> None:
        """Do one piece of sampling or training, whichever is behind."""
        can_sample, can_train = self.generator.has_work, self.trainer.has_work
        is_sampling = can_sample and not (can_train and self._is_training_due())
        began = self._now()
        if is_sampling:
            results, work = self.generator.step()
            for result in results:
                self._finish_sequence(result)
        else:
            finished, work = self.trainer.step()
            for ticket, outputs in finished:
                self._finish_pass(cast(int, ticket), m.ReplyOutputs(outputs))
        elapsed = self._now()[0] - began[0]
        if work is not None:
            self._count(work.kind, work.num_tokens, began)
        if can_sample and can_train:
            lead = self._sampling_lead_s + (elapsed if is_sampling else -elapsed)
            self._sampling_lead_s = min(MAX_LEAD_S, max(-MAX_LEAD_S, lead))
        else:
            self._sampling_lead_s = 0.0

    def _is_training_due(self) -> bool:
        return self._sampling_lead_s >= 0

    @staticmethod
    def _now() -> tuple[float, float]:
        return now_s(), cpu_s()

    def _count(self, kind: str, num_tokens: int, began: tuple[float, float]) -> None:
        """Book the time since `began`, as `_now` gave it."""
        ended = self._now()
        self._busy_s[kind] = self._busy_s.get(kind, 0.0) + ended[0] - began[0]
        self._cpu_s[kind] = self._cpu_s.get(kind, 0.0) + ended[1] - began[1]
        if num_tokens:
            self._tokens[kind] = self._tokens.get(kind, 0) + num_tokens
            self._quanta[kind] = self._quanta.get(kind, 0) + 1

    # Sampling ------------------------------------------------------------------------------

    def _generate(self, call_id: int, message: m.Generate) -> None:
        request = message.request
        held: list[int] = []
        slot = None
        if request.policy_id is not None:
            version = self._live_version(request.policy_id, request.version)
            slot = version.slot
            held = [request.version]
        self.generator.submit(
            SequenceRequest(
                request_id=request.request_id,
                sequence_id=request.sequence_id,
                slot=slot,
                tokens=request.tokens,
                sampling=request.sampling,
                prefix_id=request.prefix_id,
                prefix_len=request.prefix_len,
                keep_kv=request.keep_kv,
                prompt_logprobs=request.prompt_logprobs,
                topk_prompt_logprobs=request.topk_prompt_logprobs,
                target_prompt_ids=request.target_prompt_ids,
                prompt_alt_tokens_k=request.prompt_alt_tokens_k,
                prompt_logprobs_from=request.prompt_logprobs_from,
                topk_sample_logprobs=request.topk_sample_logprobs,
                is_in_flight=request.in_flight,
            )
        )
        if request.policy_id is not None:
            self._policies[request.policy_id].versions[request.version].num_users += 1
        self._sequences[request.request_id] = RunningSequence(call_id, request, held)

    def _finish_sequence(self, result: SequenceResult) -> None:
        running = self._sequences.pop(result.request_id)
        request = running.request
        versions = np.full(len(result.tokens), request.version, dtype=np.int32)
        adapter_hash = ""
        if request.policy_id is not None:
            policy = self._policies[request.policy_id]
            by_slot = {policy.versions[number].slot: number for number in running.held}
            adapter_hash = policy.versions[request.version].adapter_hash
            for start, slot in result.slots:
                assert slot is not None
                versions[start:] = by_slot[slot]
            for number in running.held:
                policy.versions[number].num_users -= 1
                self._free_if_unused(policy, number)
            self._forget_if_empty(request.policy_id)
        completion = Completion(
            request_id=result.request_id,
            tokens=result.tokens,
            logprobs=result.logprobs,
            stop_reason=result.stop_reason,
            versions=versions,
            adapter_hash=adapter_hash,
            prompt_logprobs=result.prompt_logprobs,
            topk_prompt_ids=result.topk_prompt_ids,
            topk_prompt_logprobs=result.topk_prompt_logprobs,
            target_prompt_logprobs=result.target_prompt_logprobs,
            prompt_alt_ids=result.prompt_alt_ids,
            prompt_alt_logprobs=result.prompt_alt_logprobs,
            topk_sample_ids=result.topk_sample_ids,
            topk_sample_logprobs=result.topk_sample_logprobs,
            num_cached_tokens=result.num_cached_tokens,
        )
        self.replies.append((running.call_id, m.ReplyCompletion(completion)))

    def _cancel(self, call_id: int, message: m.Cancel) -> m.Reply:
        if message.request_id in self._sequences:
            result = self.generator.cancel(message.request_id)
            if result is not None:
                self._finish_sequence(result)
        return m.ReplyNone()

    def _release(self, call_id: int, message: m.Release) -> None:
        for sequence_id in message.sequence_ids:
            self.generator.release(sequence_id)

    # Policies and versions -----------------------------------------------------------------

    def _policy(self, policy_id: PolicyId) -> HostedPolicy:
        if policy_id not in self._policies:
            raise NotFound(f"policy {policy_id} is not loaded on {self.name}")
        return self._policies[policy_id]

    def _live_version(self, policy_id: PolicyId, version: int) -> HostedVersion:
        versions = self._policy(policy_id).versions
        if version not in versions or not versions[version].is_live:
            live = sorted(number for number, entry in versions.items() if entry.is_live)
            raise Conflict(f"version {version} of {policy_id} is not live; live versions: {live}")
        return versions[version]

    def _readable_version(self, policy_id: PolicyId, version: int) -> HostedVersion:
        """Return a version that data may be scored under: a live one, or the newest."""
        policy = self._policy(policy_id)
        if version == policy.trained_version:
            return policy.versions[version]
        return self._live_version(policy_id, version)

    def _add_version(
        self, policy: HostedPolicy, version: int, row: torch.Tensor, adapter_hash: str
    ) -> HostedVersion:
        if version in policy.versions:
            raise Conflict(f"version {version} is loaded already")
        spec = policy.spec
        bank, kinds = self.base.bank, target_kinds(spec)
        slot = bank.allocate(rank=spec.rank, scale=spec.alpha / spec.rank, kinds=kinds)
        bank.write(slot, row)
        policy.versions[version] = HostedVersion(slot, adapter_hash)
        return policy.versions[version]

    def _free_if_unused(self, policy: HostedPolicy, number: int) -> None:
        version = policy.versions[number]
        is_needed = not version.is_retired or number == policy.trained_version
        if version.num_users or is_needed:
            return
        self.generator.forget_slot(version.slot)
        self.base.bank.free(version.slot)
        del policy.versions[number]

    def _forget_if_empty(self, policy_id: PolicyId) -> None:
        """Forget a policy that was only sampled, once none of its versions is left."""
        policy = self._policies.get(policy_id)
        if policy is not None and policy.trained_version is None and not policy.versions:
            del self._policies[policy_id]

    def _create(self, call_id: int, message: m.Create) -> m.Reply:
        if message.policy_id in self._policies:
            raise Conflict(f"policy {message.policy_id} is loaded already")
        self._check_targets(message.spec)
        self.trainer.create(message.policy_id, message.spec)
        return m.ReplyHash(self._host(message.policy_id, message.spec, 0).adapter_hash)

    def _create_from(self, call_id: int, message: m.CreateFrom) -> m.Reply:
        if message.policy_id in self._policies:
            raise Conflict(f"policy {message.policy_id} is loaded already")
        self._check_targets(message.spec)
        state = self.trainer.create_from(message.policy_id, message.spec, message.source)
        return m.ReplyHash(self._host(message.policy_id, state.spec, 0).adapter_hash)

    def _load(self, call_id: int, message: m.Load) -> m.Reply:
        if message.policy_id in self._policies:
            raise Conflict(f"policy {message.policy_id} is loaded already")
        state = self.trainer.load(message.policy_id, message.snapshot)
        version = self._host(message.policy_id, state.spec, state.version)
        return m.ReplyStep(
            StepResult(version=state.version, grad_norm=0.0, adapter_hash=version.adapter_hash)
        )

    def _host(self, policy_id: PolicyId, spec: AdapterSpec, number: int) -> HostedVersion:
        """Make the trainer's weights of a policy its live version."""
        policy = HostedPolicy(spec, trained_version=number)
        row, adapter_hash = self.trainer.weights(policy_id), self.trainer.adapter_hash(policy_id)
        version = self._add_version(policy, number, row, adapter_hash)
        version.is_live = True
        self._policies[policy_id] = policy
        return version

    def _check_targets(self, spec: AdapterSpec) -> None:
        supported = self.base.supported_targets
        wrong = [target for target in spec.targets if target not in supported]
        if wrong:
            raise InvalidRequest(
                f"targets {wrong} are not supported by base {self.base.name}; "
                f"expected some of {sorted(supported)}"
            )

    def _load_version(self, call_id: int, message: m.LoadVersion) -> m.Reply:
        spec = read_spec(message.folder)
        self._check_targets(spec)
        loaded = load_adapter(message.folder, self.base.bank.bucket(spec.rank).layout)
        policy = self._sampled(message.policy_id, loaded.spec)
        try:
            version = self._add_version(policy, message.version, loaded.row, loaded.adapter_hash)
        finally:
            self._forget_if_empty(message.policy_id)
        version.is_live = True
        return m.ReplyHash(loaded.adapter_hash)

    def _sampled(self, policy_id: PolicyId, spec: AdapterSpec) -> HostedPolicy:
        """Return the policy that a version of shape `spec` may be added to; a new one if there is
        none. All versions of a policy have one shape, which says where they live and how they act.
        """
        policy = self._policies.setdefault(policy_id, HostedPolicy(spec))
        if _shape(policy.spec) != _shape(spec):
            raise Conflict(
                f"policy {policy_id} is loaded with another shape: {_shape(policy.spec)}; "
                f"expected an adapter like that, not {_shape(spec)}"
            )
        return policy

    def _publish(self, call_id: int, message: m.Publish) -> m.Reply:
        policy = self._policy(message.policy_id)
        if message.version not in policy.versions:
            raise NotFound(f"{message.policy_id} has no version {message.version} here")
        new = policy.versions[message.version]
        new.is_live = True
        for running in self._sequences.values():
            is_behind = running.held and running.held[-1] < message.version
            request = running.request
            if request.in_flight and request.policy_id == message.policy_id and is_behind:
                new.num_users += 1
                running.held.append(message.version)
        for number, old in policy.versions.items():
            if number < message.version:
                self.generator.switch_slot(old.slot, new.slot)
        return m.ReplyNone()

    def _retire(self, call_id: int, message: m.Retire) -> m.Reply:
        policy = self._policy(message.policy_id)
        if message.version in policy.versions:
            policy.versions[message.version].is_retired = True
            self._free_if_unused(policy, message.version)
            self._forget_if_empty(message.policy_id)
        return m.ReplyNone()

    def _save_adapter(self, call_id: int, message: m.SaveAdapter) -> m.Reply:
        version = self._live_version(message.policy_id, message.version)
        policy = self._policy(message.policy_id)
        # The trainer's copy is fp32; the bank's may be rounded to the base's type.
        is_newest = message.version == policy.trained_version
        row = self.trainer.weights(message.policy_id) if is_newest else None
        adapter_hash = save_adapter(
            message.folder,
            self.base.bank.read(version.slot) if row is None else row,
            policy.spec,
            self.base.bank.bucket(policy.spec.rank).layout,
            base_name=self.base.name,
            is_synced=self._is_synced,
        )
        return m.ReplyHash(adapter_hash)

    def _remove(self, call_id: int, message: m.Remove) -> m.Reply:
        policy = self._policy(message.policy_id)
        for running in list(self._sequences.values()):
            if running.request.policy_id == message.policy_id:
                self._cancel(0, m.Cancel(running.request.request_id))
        for waiting_id, _ in policy.calls:
            self.replies.append((waiting_id, m.ReplyError("NotFound", "the policy was removed")))
        for ticket in cast(list[int], self.trainer.remove(message.policy_id)):
            error = m.ReplyError("NotFound", "the policy was removed")
            self._passes.pop(ticket)
            self.replies.append((ticket, error))
        policy.trained_version = None
        for number, version in list(policy.versions.items()):
            version.is_retired, version.num_users = True, 0
            self._free_if_unused(policy, number)
        self._policies.pop(message.policy_id, None)
        return m.ReplyNone()

    def _export(self, call_id: int, message: m.ExportVersion) -> m.Reply:
        policy = self._policy(message.policy_id)
        version = self._live_version(message.policy_id, message.version)
        row = self.base.bank.read(version.slot).float().cpu().numpy().copy()
        return m.ReplyVersion(policy.spec, version.adapter_hash, row)

    def _import(self, call_id: int, message: m.ImportVersion) -> m.Reply:
        self._check_targets(message.spec)
        policy = self._sampled(message.policy_id, message.spec)
        row = torch.from_numpy(message.row)
        try:
            version = self._add_version(policy, message.version, row, message.adapter_hash)
        finally:
            self._forget_if_empty(message.policy_id)
        version.is_live = True
        self._publish(call_id, m.Publish(message.policy_id, message.version))
        return m.ReplyNone()

    # Training ------------------------------------------------------------------------------

    def _advance(self, policy_id: PolicyId, policy: HostedPolicy) -> None:
        """Start every call of the policy whose turn it is."""
        while policy.calls:
            call_id, message = policy.calls[0]
            if isinstance(message, m.OptimStep | m.ZeroGrad) and policy.num_passes:
                return
            policy.calls.popleft()
            try:
                match message:
                    case m.ForwardBackward():
                        self._forward_backward(call_id, policy, message)
                    case m.OptimStep():
                        self.replies.append((call_id, self._optim_step(policy, message)))
                    case m.ZeroGrad():
                        self.replies.append((call_id, self._zero_grad(policy, message)))
                    case m.SaveState():
                        self.replies.append((call_id, self._save_state(policy, message)))
            except MarlaasError as error:
                self.replies.append((call_id, m.ReplyError(type(error).__name__, str(error))))

    def _trained(self, policy_id: PolicyId, policy: HostedPolicy) -> HostedVersion:
        if policy.trained_version is None:
            raise Conflict(f"policy {policy_id} is not trained on {self.name}")
        return policy.versions[policy.trained_version]

    def _forward_backward(
        self, call_id: int, policy: HostedPolicy, message: m.ForwardBackward
    ) -> None:
        version = self._trained(message.policy_id, policy)
        self.trainer.submit_forward_backward(
            message.policy_id, version.slot, message.data, message.objective, call_id
        )
        policy.num_passes += 1
        version.num_users += 1
        self._passes[call_id] = (message.policy_id, version)

    def _forward(self, call_id: int, message: m.Forward) -> None:
        version = None
        if message.policy_id is not None:
            version = self._readable_version(message.policy_id, message.version)
        slot = version.slot if version else None
        self.trainer.submit_forward(message.policy_id, slot, message.data, call_id)
        if version is not None:
            version.num_users += 1
            self._policy(message.policy_id).num_passes += 1  # type: ignore[arg-type]
        self._passes[call_id] = (message.policy_id, version)

    def _finish_pass(self, ticket: int, reply: m.Reply) -> None:
        self.replies.append((ticket, reply))
        policy_id, version = self._passes.pop(ticket)
        if policy_id is None or version is None:
            return
        policy = self._policies[policy_id]
        policy.num_passes -= 1
        version.num_users -= 1
        for number, entry in list(policy.versions.items()):
            if entry is version:
                self._free_if_unused(policy, number)
        self._forget_if_empty(policy_id)
        self._advance(policy_id, policy)

    def _optim_step(self, policy: HostedPolicy, message: m.OptimStep) -> m.Reply:
        began = self._now()
        self._trained(message.policy_id, policy)
        result = self.trainer.optim_step(message.policy_id, message.adam)
        if message.snapshot is not None:
            self.trainer.save_snapshot(
                message.policy_id, message.snapshot, is_synced=self._is_synced
            )
        old, policy.trained_version = policy.trained_version, result.version
        row = self.trainer.weights(message.policy_id)
        self._add_version(policy, result.version, row, result.adapter_hash)
        if old is not None:
            self._free_if_unused(policy, old)
        self._count("publish", 0, began)
        return m.ReplyStep(result)

    def _zero_grad(self, policy: HostedPolicy, message: m.ZeroGrad) -> m.Reply:
        self._trained(message.policy_id, policy)
        self.trainer.zero_grad(message.policy_id)
        return m.ReplyNone()

    def _save_state(self, policy: HostedPolicy, message: m.SaveState) -> m.Reply:
        self._trained(message.policy_id, policy)
        self.trainer.save_snapshot(message.policy_id, message.path, is_synced=self._is_synced)
        return m.ReplyNone()

    # Statistics ----------------------------------------------------------------------------

    def _stats(self, call_id: int, message: m.GetStats) -> m.Reply:
        generator = self.generator
        return m.ReplyStats(
            WorkerStats(
                name=self.name,
                elapsed_s=now_s() - self._started_s,
                busy_s=dict(self._busy_s),
                tokens=dict(self._tokens),
                quanta=dict(self._quanta),
                cpu_s=dict(self._cpu_s),
                num_decoding=generator.num_decoding,
                num_waiting=generator.num_waiting,
                num_parked=generator.num_parked,
                kv_tokens=generator.kv_tokens,
                kv_capacity_tokens=generator.pool.capacity_tokens,
                rss_bytes=rss_bytes(),
            )
        )


def _shape(spec: AdapterSpec) -> tuple[int, float, tuple[str, ...]]:
    """Return what all versions of a policy have in common: rank, alpha and linears."""
    return spec.rank, spec.alpha, tuple(sorted(target_kinds(spec)))
