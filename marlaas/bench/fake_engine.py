"""An engine that computes nothing, to measure what is around it: fixed latencies, random tokens.

    generate ─► a seat, `turn_s` ─► tokens drawn beforehand, each as likely as any other
    train    ─► `train_s`        ─► the logprobs that were recorded; versions count up

It keeps every promise that the loop relies on (numbered versions, hashes, equal logprobs when
sampling and training) and no state but version numbers. It writes no files: those are an engine
process's work. `CoinFamily` is an environment to go with it, whose verdict is a coin.
"""

import asyncio
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from marlaas import runtime
from marlaas.envs.base import EnvStep
from marlaas.errors import NotFound, UnsupportedFeature
from marlaas.types import (
    AdamParams,
    AdapterSpec,
    Capabilities,
    Completion,
    Datum,
    DatumOutput,
    GenerateRequest,
    Message,
    Objective,
    PolicyId,
    Prompt,
    StepResult,
    StopReason,
    WorkerStats,
)

NUM_REPLIES = 512
"""Replies that are drawn once, so that drawing takes no time while something is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSpeed:
    """What a fake worker's calls take; nothing of it is CPU time."""

    turn_s: float = 0.1
    """One turn of one sequence."""
    train_s: float = 0.05
    """One `forward_backward` or `forward`."""
    call_s: float = 0.001
    """Any other call."""
    num_tokens: int = 16
    """Sampled per turn."""
    max_decoding: int = 64
    """Sequences at a time: with `turn_s` this bounds what a worker samples a second."""


class FakeEngine:
    """A worker, generator and trainer in one; it is never lost.

    engine = FakeEngine("fake-0", vocab_size=tokenizer.vocab_size, speed=FakeSpeed())
    controller = Controller(store, [engine], tokenizer, make_family=lambda spec: CoinFamily())
    """

    incarnation = 0
    kv_capacity_tokens = 1 << 20

    def __init__(self, name: str, *, vocab_size: int, speed: FakeSpeed) -> None:
        self.name = name
        self.speed = speed
        self.capabilities = Capabilities()
        self.max_decoding = speed.max_decoding
        self._logprob = np.float32(-math.log(vocab_size))
        draw = runtime.rng("fake engine", name)
        self._replies = draw.integers(
            vocab_size, size=(NUM_REPLIES, speed.num_tokens), dtype=np.int32
        )
        self._seats = asyncio.Semaphore(speed.max_decoding)
        self._versions: dict[PolicyId, int] = {}
        self._tokens: Counter[str] = Counter(decode=0, prefill=0, train=0)
        self._began_s = runtime.now_s()

    @property
    def generator(self) -> "FakeEngine":
        return self

    @property
    def trainer(self) -> "FakeEngine":
        return self

    async def recover(self) -> None:
        pass

    async def stats(self) -> WorkerStats:
        elapsed_s = runtime.now_s() - self._began_s
        return WorkerStats(
            name=self.name,
            elapsed_s=elapsed_s,
            busy_s=dict.fromkeys(self._tokens, elapsed_s / len(self._tokens)),
            tokens=dict(self._tokens),
            num_decoding=0,
            num_waiting=0,
            num_parked=0,
            kv_tokens=0,
            kv_capacity_tokens=self.kv_capacity_tokens,
            rss_bytes=0,
        )

    # Generator ----------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        assert request.policy_id is not None
        async with self._seats:
            await asyncio.sleep(self.speed.turn_s)
        tokens = self._replies[request.sampling.seed % NUM_REPLIES]
        self._tokens["prefill"] += len(request.tokens)
        self._tokens["decode"] += len(tokens)
        return Completion(
            request_id=request.request_id,
            tokens=tokens,
            logprobs=np.full(len(tokens), self._logprob),
            stop_reason=StopReason.STOP_TOKEN,
            versions=np.full(len(tokens), request.version, dtype=np.int32),
            adapter_hash=_hash(request.policy_id, request.version),
        )

    async def release(self, sequence_ids: Sequence[str]) -> None:
        pass

    # Trainer ------------------------------------------------------------------------------

    async def create(self, policy_id: PolicyId, spec: AdapterSpec) -> str:
        return await self._begin(policy_id)

    async def create_from(self, policy_id: PolicyId, spec: AdapterSpec, source: str) -> str:
        return await self._begin(policy_id)

    async def load(self, policy_id: PolicyId, snapshot: str) -> StepResult:
        raise NotFound(f"{self.name} writes no snapshot, so there is none to load")

    async def load_version(self, policy_id: PolicyId, version: int, folder: str) -> str:
        await asyncio.sleep(self.speed.call_s)
        return _hash(policy_id, version)

    async def forward_backward(
        self, policy_id: PolicyId, data: Sequence[Datum], objective: Objective
    ) -> list[DatumOutput]:
        return await self._score(data)

    async def forward(
        self, policy_id: PolicyId | None, version: int, data: Sequence[Datum]
    ) -> list[DatumOutput]:
        return await self._score(data)

    async def optim_step(
        self, policy_id: PolicyId, adam: AdamParams, snapshot: str | None = None
    ) -> StepResult:
        await asyncio.sleep(self.speed.call_s)
        self._versions[policy_id] += 1
        version = self._versions[policy_id]
        return StepResult(version=version, grad_norm=1.0, adapter_hash=_hash(policy_id, version))

    async def publish(self, policy_id: PolicyId, version: int) -> None:
        await asyncio.sleep(self.speed.call_s)

    async def retire(self, policy_id: PolicyId, version: int) -> None:
        await asyncio.sleep(self.speed.call_s)

    async def save_adapter(self, policy_id: PolicyId, version: int, folder: str) -> str:
        await asyncio.sleep(self.speed.call_s)
        return _hash(policy_id, version)

    async def merge(self, adapter_folder: str, out_folder: str) -> None:
        raise UnsupportedFeature(f"{self.name} has no weights to merge; use a real engine")

    async def remove(self, policy_id: PolicyId) -> None:
        await asyncio.sleep(self.speed.call_s)
        if self._versions.pop(policy_id, None) is None:
            raise NotFound(f"{self.name} has no policy {policy_id}")

    # --------------------------------------------------------------------------------------

    async def _begin(self, policy_id: PolicyId) -> str:
        await asyncio.sleep(self.speed.call_s)
        self._versions[policy_id] = 0
        return _hash(policy_id, 0)

    async def _score(self, data: Sequence[Datum]) -> list[DatumOutput]:
        self._tokens["train"] += sum(len(datum.tokens) for datum in data)
        await asyncio.sleep(self.speed.train_s)
        return [DatumOutput(logprobs=datum.sampling_logprobs, loss=0.0) for datum in data]


def _hash(policy_id: PolicyId, version: int) -> str:
    return f"{zlib.crc32(policy_id.encode()):08x}{version:08x}"


# ---------------------------------------------------------------------------------------------
# An environment


class CoinFamily:
    """A task without a right answer: one turn, and a coin decides, so that groups can be trained.

    The coin is the reply's checksum: the same reply has the same verdict.
    """

    name = "coin"
    max_turns = 1

    def prompt(self, index: int, *, seed: int, split: str) -> Prompt:
        """Return item `index` of a split."""
        text = f"Toss number {index} of the {split} split, seed {seed}: heads or tails?"
        return Prompt(index=index, messages=(Message("user", text),), reference={})

    def make(self, prompt: Prompt, num_envs: int) -> "list[CoinEnv]":
        """Return fresh environments for one group."""
        return [CoinEnv() for _ in range(num_envs)]

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    def cpu_s(self) -> float:
        return 0.0


class CoinEnv:
    """One episode of `CoinFamily`."""

    async def step(self, reply: str, *, is_last: bool) -> EnvStep:
        """Toss the coin."""
        is_success = bool(zlib.crc32(reply.encode()) & 1)
        return EnvStep(reward=float(is_success), is_success=is_success, metrics={"format": 1.0})

    async def close(self) -> None:
        pass
