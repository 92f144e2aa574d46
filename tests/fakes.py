"""Fakes that behave: a policy that really learns, workers with virtual latencies, tools that stall.

The fake base model knows a few letters and no context: a policy is one logit per letter, so
sampling, logprobs and policy gradients are exact and cheap. Everything takes time on the running
loop's clock, so that under `runtime.run_virtual` hours pass in milliseconds. Snapshots are files.
"""

import asyncio
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from marlaas import runtime
from marlaas.envs.base import EnvStep
from marlaas.errors import EnvironmentFailure, FailureKind, InvalidRequest, NotFound, WorkerLost
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import (
    AdamParams,
    AdapterSpec,
    Capabilities,
    Completion,
    Datum,
    DatumOutput,
    EvalRecord,
    GenerateRequest,
    Group,
    JobSpec,
    JobState,
    Message,
    Notice,
    Objective,
    PolicyId,
    Prompt,
    StepRecord,
    StepResult,
    StopReason,
    WorkerStats,
)

ALPHABET = np.frombuffer(b"abcdefghxy\n", dtype=np.uint8).astype(np.int32)
"""Bytes that the fake base model can say; the last one stops."""

INDEX = {int(byte): index for index, byte in enumerate(ALPHABET)}
STOP = int(ALPHABET[-1])
UNKNOWN_LOGPROB = np.float32(-10.0)
"""What the fake model thinks of bytes it cannot say."""


class ByteTokenizer:
    """Every byte is a token; a message is `role:content` and a line end."""

    stop_token_ids = (STOP,)

    def least_tokens(self, messages: Sequence[Message]) -> int:
        return sum(len(message.content) for message in messages)

    def render_opening(self, messages: Sequence[Message]) -> list[int]:
        return list(self._render(messages))

    def render_continuation(
        self, sampled_ids: Sequence[int], messages: Sequence[Message]
    ) -> list[int]:
        ending = b"" if list(sampled_ids)[-1:] == [STOP] else b"\n"
        return list(ending + self._render(messages))

    def encode(self, text: str) -> list[int]:
        return list(text.encode("latin1"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("latin1")

    def _render(self, messages: Sequence[Message]) -> bytes:
        text = "".join(f"{message.role}:{message.content}\n" for message in messages)
        return f"{text}assistant:".encode("latin1")


# ---------------------------------------------------------------------------------------------
# Store


class SlowStore(AsyncStore):
    """A store whose calls take virtual time, before and after they are made, one after another.

    Like the real one, it keeps the order of calls, and a cancelled caller still waits for its call.
    """

    def __init__(self, store: Store, *, call_s: float, seed: int) -> None:
        super().__init__(store, is_threaded=False)
        self._call_s = call_s
        self._rng = runtime.rng("slow store", seed)
        self._turn = asyncio.Lock()

    async def call(self, function: Callable, *args: object, **kwargs: object) -> object:
        calling = asyncio.ensure_future(self._call_in_turn(function, args, kwargs))
        try:
            return await asyncio.shield(calling)
        except asyncio.CancelledError:
            await asyncio.wait([calling])
            calling.exception()  # nobody will ask
            raise

    async def _call_in_turn(self, function: Callable, args: tuple, kwargs: dict) -> object:
        async with self._turn:
            await asyncio.sleep(self._call_s * self._rng.exponential())
            try:
                return function(self.store, *args, **kwargs)
            finally:
                await asyncio.sleep(self._call_s * self._rng.exponential())


# ---------------------------------------------------------------------------------------------
# Environments


@dataclass(frozen=True, kw_only=True)
class ScriptedFamily:
    """The policy is to say "y"; a tool that may stall or fail answers each turn but the last."""

    max_turns: int = 1
    tool_s: float = 0.0
    """Median latency of a call."""
    tail: float = 0.0
    """Pareto exponent of the latency's tail: 0 is constant, 1 is very heavy."""
    fail_rate: float = 0.0
    crash: str = ""
    """Where the family's own code raises: "prompt", "step" or nowhere."""
    lost_starts: int = 0
    """Times that its sandbox dies while it starts."""
    starts: list[float] = field(default_factory=list)
    """When it was started."""
    name: str = "scripted"

    def prompt(self, index: int, *, seed: int, split: str) -> Prompt:
        if self.crash == "prompt":
            raise ValueError("a bug in the family")
        return Prompt(
            index=index,
            messages=(Message("user", f"{split} {index}: say y"),),
            reference={"seed": seed, "split": split},
        )

    def make(self, prompt: Prompt, num_envs: int) -> list["ScriptedEnv"]:
        return [ScriptedEnv(self, prompt, index) for index in range(num_envs)]

    async def start(self) -> None:
        self.starts.append(runtime.now_s())
        if len(self.starts) <= self.lost_starts:
            raise EnvironmentFailure(FailureKind.SANDBOX_LOST, "the sandbox cannot start")

    async def stop(self) -> None:
        pass

    def cpu_s(self) -> float:
        return 0.0


class ScriptedEnv:
    """One episode of a `ScriptedFamily`."""

    def __init__(self, family: ScriptedFamily, prompt: Prompt, index: int) -> None:
        self._family = family
        labels = (prompt.reference["seed"], prompt.reference["split"], prompt.index, index)
        self._rng = runtime.rng("scripted", *labels)
        self._turn = 0
        self.is_closed = False

    async def step(self, reply: str, *, is_last: bool) -> EnvStep:
        family, rng = self._family, self._rng
        self._turn += 1
        if family.tool_s:
            stretch = (1 + rng.pareto(family.tail)) if family.tail else 1.0
            await asyncio.sleep(family.tool_s * min(stretch, 1e6))
        if rng.random() < family.fail_rate:
            kinds = list(FailureKind)
            raise EnvironmentFailure(kinds[rng.integers(len(kinds))], "scripted")
        if family.crash == "step":
            raise ValueError("a bug in the environment")
        if is_last or self._turn == family.max_turns or rng.random() < 0.2:
            is_success = "y" in reply
            return EnvStep(reward=float(is_success), is_success=is_success, metrics={"format": 1.0})
        return EnvStep(messages=(Message("tool", f"turn {self._turn}, go on"),))

    async def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


def job(name: str = "say-y", tenant: str = "acme", **changes: object) -> JobSpec:
    """Return a short job in the scripted family, with some of it changed."""
    env = {"family": "scripted", **changes.pop("env", {})}
    spec = JobSpec(
        tenant=tenant, name=name, env=env, steps=5, prompts_per_step=2, group_size=4,
        max_tokens=8, learning_rate=5.0, eval_prompts=8, straggler_deadline_s=30.0,
    )  # fmt: skip
    return replace(spec, **changes)


# ---------------------------------------------------------------------------------------------
# Workers


@dataclass
class FakePolicy:
    """Training state of one policy: a logit per letter."""

    logits: np.ndarray
    version: int = 0
    gradient: np.ndarray | None = None
    live: dict[int, np.ndarray] = field(default_factory=dict)
    pending: np.ndarray | None = None
    """The newest version, made and not yet published."""
    is_trained: bool = True
    """False for versions that were loaded only to be sampled."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Virtual seconds of a fake worker's work."""

    token_s: float = 0.01
    """Decode step of a whole batch: each sequence gets one token."""
    prefill_s: float = 0.0005
    train_s: float = 0.001
    """Per token of forward and backward."""
    call_s: float = 0.001
    """Any other call."""
    restart_s: float = 5.0
    max_decoding: int = 16
    kv_capacity_tokens: int = 10**6


def logprobs_of(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    scaled = logits / temperature
    scaled = scaled - scaled.max()
    return scaled - np.log(np.exp(scaled).sum())


def hash_of(logits: np.ndarray) -> str:
    return hashlib.blake2b(logits.tobytes(), digest_size=8).hexdigest()


class FakeWorker:
    """An engine process: `alive -> lost -> (recover) -> alive`, empty after each loss.

    `kill` makes every call in progress and every later one raise `WorkerLost` until `recover`.
    `is_vetoed` decides which optimizer steps find a gradient that is not finite; `skew` makes the
    trainer's logprobs differ from the sampler's.
    """

    def __init__(
        self,
        name: str = "worker-0",
        *,
        speed: Speed = Speed(),
        is_vetoed: Callable[[PolicyId, int], bool] = lambda policy_id, version: False,
        skew: float = 0.0,
        max_context: int = 400,
    ) -> None:
        self.name = name
        self.incarnation = 0
        self.speed = speed
        self.is_vetoed = is_vetoed
        self.skew = skew
        self.capabilities = Capabilities(max_context=max_context)
        self.max_decoding = speed.max_decoding
        self.kv_capacity_tokens = speed.kv_capacity_tokens
        self.is_gone = False
        """It will never come back."""
        self.policies: dict[PolicyId, FakePolicy] = {}
        self.kept_sequences: set[str] = set()
        self.busy_s: dict[str, float] = {"decode": 0.0, "prefill": 0.0, "train": 0.0}
        self.tokens: dict[str, int] = {"decode": 0, "prefill": 0, "train": 0}
        self.max_seen_decoding = 0
        self._lost = asyncio.Event()
        self._recovering = asyncio.Lock()
        self._seats = asyncio.Semaphore(speed.max_decoding)
        self._device = asyncio.Lock()
        self.num_decoding = 0

    @property
    def generator(self) -> "FakeWorker":
        return self

    @property
    def trainer(self) -> "FakeWorker":
        return self

    # Life ---------------------------------------------------------------------------------

    def kill(self, *, for_good: bool = False) -> None:
        self.is_gone = self.is_gone or for_good
        self.policies = {}
        self.kept_sequences = set()
        self._lost.set()

    async def recover(self) -> None:
        async with self._recovering:
            if not self._lost.is_set():
                return
            await asyncio.sleep(self.speed.restart_s)
            if self.is_gone:
                raise WorkerLost(f"{self.name} is gone")
            self.incarnation += 1
            self._lost.clear()

    async def stats(self) -> WorkerStats:
        await self._work(self.speed.call_s)
        return WorkerStats(
            name=self.name, elapsed_s=runtime.now_s(), busy_s=dict(self.busy_s),
            tokens=dict(self.tokens), num_decoding=self.num_decoding, num_waiting=0, num_parked=0,
            kv_tokens=0, kv_capacity_tokens=self.kv_capacity_tokens, rss_bytes=0,
        )  # fmt: skip

    async def _work(self, seconds: float) -> None:
        """Let virtual time pass, unless the worker is lost before the work is done."""
        try:
            async with asyncio.timeout(seconds):
                await self._lost.wait()
        except TimeoutError:
            return
        raise WorkerLost(f"{self.name} went away")

    def _policy(self, policy_id: PolicyId) -> FakePolicy:
        if self._lost.is_set():
            raise WorkerLost(f"{self.name} went away")
        if policy_id not in self.policies:
            raise NotFound(f"{self.name} has no policy {policy_id}")
        return self.policies[policy_id]

    # Generator ----------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        if request.policy_id is None:
            policy = FakePolicy(np.zeros(len(ALPHABET)), live={0: np.zeros(len(ALPHABET))})
        else:
            policy = self._policy(request.policy_id)
        self.kept_sequences.discard(request.sequence_id)
        assert request.version in policy.live, f"{request.policy_id} v{request.version} not live"
        pinned = policy.live[request.version]
        async with self._seats:
            self.num_decoding += 1
            self.max_seen_decoding = max(self.max_seen_decoding, self.num_decoding)
            try:
                await self._work(self.speed.prefill_s * len(request.tokens))
                if request.in_flight:
                    return await self._generate_in_flight(request, policy)
                tokens, logprobs, stop_reason = self._sample(
                    request, len(request.tokens), request.sampling.max_tokens, pinned
                )
                await self._work(self.speed.token_s * len(tokens))
            finally:
                self.num_decoding -= 1
        if request.keep_kv:
            self.kept_sequences.add(request.sequence_id)
        self._count("prefill", self.speed.prefill_s, len(request.tokens))
        self._count("decode", self.speed.token_s / 4, len(tokens))
        versions = np.full(len(tokens), request.version, dtype=np.int32)
        adapter_hash = hash_of(pinned) if request.policy_id else ""
        scores = _scores_of_context(request, pinned)
        if request.topk_sample_logprobs:
            logprob_V = logprobs_of(pinned, request.sampling.temperature)
            best = np.argsort(-logprob_V, kind="stable")[: request.topk_sample_logprobs]
            scores["topk_sample_ids"] = np.tile(ALPHABET[best], (len(tokens), 1))
            scores["topk_sample_logprobs"] = np.tile(
                logprob_V[best].astype(np.float32), (len(tokens), 1)
            )
        return replace(
            self._completion(request, tokens, logprobs, stop_reason, versions, adapter_hash),
            **scores,
        )

    async def _generate_in_flight(self, request: GenerateRequest, policy: FakePolicy) -> Completion:
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        stop_reason = StopReason.LENGTH
        while len(tokens) < request.sampling.max_tokens:
            version = max(policy.live)
            token, logprob, reason = self._sample(
                request, len(request.tokens) + len(tokens), 1, policy.live[version]
            )
            await self._work(self.speed.token_s)
            tokens += token
            logprobs += logprob
            versions.append(version)
            if reason is StopReason.STOP_TOKEN:
                stop_reason = reason
                break
        adapter_hash = hash_of(policy.live.get(versions[0], policy.logits))
        return self._completion(
            request, tokens, logprobs, stop_reason, np.array(versions, np.int32), adapter_hash
        )

    def _sample(
        self, request: GenerateRequest, start: int, max_tokens: int, logits: np.ndarray
    ) -> tuple[list[int], list[float], StopReason]:
        logprob_V = logprobs_of(logits, request.sampling.temperature)
        cumulative_V = np.cumsum(np.exp(logprob_V))
        tokens: list[int] = []
        logprobs: list[float] = []
        for position in range(start, start + max_tokens):
            uniform = runtime.derive_seed(request.sampling.seed, position) / 2**63
            index = int(np.searchsorted(cumulative_V[:-1], uniform * cumulative_V[-1], "right"))
            tokens.append(int(ALPHABET[index]))
            logprobs.append(float(logprob_V[index]))
            if tokens[-1] in request.sampling.stop_token_ids:
                return tokens, logprobs, StopReason.STOP_TOKEN
        return tokens, logprobs, StopReason.LENGTH

    def _completion(
        self, request: GenerateRequest, tokens: list[int], logprobs: list[float],
        stop_reason: StopReason, versions: np.ndarray, adapter_hash: str,
    ) -> Completion:  # fmt: skip
        return Completion(
            request_id=request.request_id,
            tokens=np.array(tokens, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            stop_reason=stop_reason,
            versions=versions,
            adapter_hash=adapter_hash,
        )

    async def release(self, sequence_ids: Sequence[str]) -> None:
        self.kept_sequences -= set(sequence_ids)

    # Trainer ------------------------------------------------------------------------------

    async def create(self, policy_id: PolicyId, spec: AdapterSpec) -> str:
        await self._work(self.speed.call_s)
        logits = np.zeros(len(ALPHABET))
        self._add(policy_id, FakePolicy(logits, live={0: logits}))
        return hash_of(logits)

    async def create_from(self, policy_id: PolicyId, spec: AdapterSpec, source: str) -> str:
        await self._work(self.speed.call_s)
        path = Path(source)
        _, logits = _read(path / "adapter" if path.is_dir() else path)
        self._add(policy_id, FakePolicy(logits, live={0: logits}))
        return hash_of(logits)

    async def load(self, policy_id: PolicyId, snapshot: str) -> StepResult:
        await self._work(self.speed.call_s)
        version, logits = _read(Path(snapshot))
        self._add(policy_id, FakePolicy(logits, version=version, live={version: logits}))
        return StepResult(version=version, grad_norm=0.0, adapter_hash=hash_of(logits))

    async def load_version(self, policy_id: PolicyId, version: int, folder: str) -> str:
        await self._work(self.speed.call_s)
        stored, logits = _read(Path(folder) / "adapter")
        assert stored == version
        fresh = FakePolicy(logits, is_trained=False)
        live = self.policies.setdefault(policy_id, fresh).live
        assert version not in live, f"{policy_id} v{version} is loaded already"
        live[version] = logits
        return hash_of(logits)

    async def forward_backward(
        self, policy_id: PolicyId, data: Sequence[Datum], objective: Objective
    ) -> list[DatumOutput]:
        policy = self._policy(policy_id)
        _check(data)
        await self._train_work(data)
        outputs = []
        for datum in data:
            assert (datum.reference_logprobs is not None) == ("kl_coef" in objective.params)
            logprobs = self._score(policy.logits, datum)
            trained = np.nonzero(datum.weights)
            if objective.name == "cross_entropy":
                scale = datum.weights[trained]
            else:
                ratio = np.exp(logprobs[trained] - datum.sampling_logprobs[trained])
                scale = (datum.weights * datum.advantages)[trained] * np.minimum(ratio, 2.0)
            gradient = np.zeros(len(ALPHABET))
            targets = _targets(datum)[trained]
            for token, weight in zip(targets.tolist(), scale.tolist(), strict=True):
                if token in INDEX:
                    gradient[INDEX[token]] += weight
            probability_V = np.exp(logprobs_of(policy.logits, datum.temperature))
            gradient -= scale.sum() * probability_V
            before = 0.0 if policy.gradient is None else policy.gradient
            policy.gradient = before + gradient / datum.temperature
            outputs.append(
                DatumOutput(
                    logprobs=(
                        logprobs
                        if datum.is_scored_everywhere
                        else np.where(datum.weights != 0, logprobs, 0).astype(np.float32)
                    ),
                    loss=-float(scale.sum()),
                    counts={"masked": 0.0},
                )
            )
        return outputs

    async def forward(
        self, policy_id: PolicyId | None, version: int, data: Sequence[Datum]
    ) -> list[DatumOutput]:
        logits = np.zeros(len(ALPHABET))
        if policy_id is not None:
            policy = self._policy(policy_id)
            is_newest = policy.is_trained and version == policy.version
            logits = policy.logits if is_newest else policy.live[version]
        _check(data)
        await self._train_work(data)
        return [DatumOutput(logprobs=self._score(logits, datum), loss=0.0) for datum in data]

    async def optim_step(
        self, policy_id: PolicyId, adam: AdamParams, snapshot: str | None = None
    ) -> StepResult:
        await self._work(self.speed.call_s)
        policy = self._policy(policy_id)
        gradient, policy.gradient = policy.gradient, None
        is_vetoed = gradient is not None and self.is_vetoed(policy_id, policy.version + 1)
        if gradient is not None and not is_vetoed:
            policy.logits = policy.logits + adam.lr * gradient
        policy.version += 1
        policy.pending = policy.logits
        if snapshot is not None:
            _write(Path(snapshot), policy.version, policy.logits)
        norm = 0.0 if gradient is None else float(np.linalg.norm(gradient))
        return StepResult(
            version=policy.version,
            grad_norm=float("nan") if is_vetoed else norm,
            adapter_hash=hash_of(policy.logits),
            is_vetoed=is_vetoed,
        )

    async def zero_grad(self, policy_id: PolicyId) -> None:
        await self._work(self.speed.call_s)
        self._policy(policy_id).gradient = None

    async def save_state(self, policy_id: PolicyId, path: str) -> None:
        await self._work(self.speed.call_s)
        policy = self._policy(policy_id)
        _write(Path(path), policy.version, policy.logits)

    async def publish(self, policy_id: PolicyId, version: int) -> None:
        await self._work(self.speed.call_s)
        policy = self._policy(policy_id)
        assert version == policy.version and policy.pending is not None
        policy.live[version], policy.pending = policy.pending, None

    async def retire(self, policy_id: PolicyId, version: int) -> None:
        await self._work(self.speed.call_s)
        policy = self._policy(policy_id)
        assert not (policy.is_trained and version == policy.version), "the newest one never retires"
        policy.live.pop(version, None)  # one that was never published is not there
        if not policy.live and not policy.is_trained:
            del self.policies[policy_id]

    async def save_adapter(self, policy_id: PolicyId, version: int, folder: str) -> str:
        await self._work(self.speed.call_s)
        logits = self._policy(policy_id).live[version]
        Path(folder).mkdir(exist_ok=True)
        _write(Path(folder) / "adapter", version, logits)
        return hash_of(logits)

    async def remove(self, policy_id: PolicyId) -> None:
        await self._work(self.speed.call_s)
        if self.policies.pop(policy_id, None) is None:
            raise NotFound(f"{self.name} has no policy {policy_id}")

    def _add(self, policy_id: PolicyId, policy: FakePolicy) -> None:
        assert policy_id not in self.policies, f"{policy_id} is loaded already"
        self.policies[policy_id] = policy

    def _score(self, logits: np.ndarray, datum: Datum) -> np.ndarray:
        logprob_V = logprobs_of(logits, datum.temperature)
        targets = _targets(datum)
        scores = np.array(
            [logprob_V[INDEX[t]] + self.skew if t in INDEX else UNKNOWN_LOGPROB
             for t in targets.ravel().tolist()],
            dtype=np.float32,
        )  # fmt: skip
        if datum.targets is not None:
            scores[targets.ravel() < 0] = 0.0
        return scores.reshape(targets.shape)

    async def _train_work(self, data: Sequence[Datum]) -> None:
        count = sum(len(datum.tokens) for datum in data)
        async with self._device:
            await self._work(self.speed.train_s * count)
        self._count("train", self.speed.train_s, count)

    def _count(self, kind: str, seconds_per_token: float, tokens: int) -> None:
        self.tokens[kind] += tokens
        self.busy_s[kind] += seconds_per_token * tokens


def _targets(datum: Datum) -> np.ndarray:
    return datum.tokens if datum.targets is None else datum.targets


def _check(data: Sequence[Datum]) -> None:
    """Refuse what the engine would refuse."""
    for idx, datum in enumerate(data):
        shape = _targets(datum).shape
        for name in ("weights", "advantages", "sampling_logprobs"):
            values = getattr(datum, name)
            if values.shape != shape:
                raise InvalidRequest(
                    f"datum {idx}: {name} has shape {values.shape}; expected {shape}"
                )
            if not np.isfinite(values).all():
                raise InvalidRequest(f"datum {idx}: {name} holds a number that is not finite")


def _scores_of_context(request: GenerateRequest, logits: np.ndarray) -> dict[str, np.ndarray]:
    """Return what a request asks to be said of its context, as fields of a `Completion`."""
    logprob_V = logprobs_of(logits)
    first = max(request.prompt_logprobs_from, 1)
    num_tokens = len(request.tokens)

    def scores(ids: np.ndarray) -> np.ndarray:
        known = {token: logprob_V[index] for token, index in INDEX.items()}
        values = [np.nan if t < 0 else known.get(t, UNKNOWN_LOGPROB) for t in ids.ravel().tolist()]
        out = np.array(values, dtype=np.float32).reshape(ids.shape)
        out[:first] = np.nan
        return out

    def most_likely(num: int) -> np.ndarray:
        ids = np.tile(ALPHABET[np.argsort(-logprob_V, kind="stable")[:num]], (num_tokens, 1))
        ids[:first] = -1
        return ids

    fields: dict[str, np.ndarray] = {}
    if request.prompt_logprobs:
        fields["prompt_logprobs"] = scores(request.tokens)
    if request.topk_prompt_logprobs:
        fields["topk_prompt_ids"] = most_likely(request.topk_prompt_logprobs)
        fields["topk_prompt_logprobs"] = scores(fields["topk_prompt_ids"])
    if request.target_prompt_ids is not None:
        fields["target_prompt_logprobs"] = scores(request.target_prompt_ids)
    if request.prompt_alt_tokens_k:
        fields["prompt_alt_ids"] = most_likely(request.prompt_alt_tokens_k)
        fields["prompt_alt_logprobs"] = scores(fields["prompt_alt_ids"])
    return fields


def _write(path: Path, version: int, logits: np.ndarray) -> None:
    beside = path.with_name(path.name + ".tmp")
    beside.write_bytes(version.to_bytes(8, "little") + logits.tobytes())
    os.replace(beside, path)


def _read(path: Path) -> tuple[int, np.ndarray]:
    try:
        blob = path.read_bytes()
    except FileNotFoundError:
        raise NotFound(f"nothing at {path}") from None
    return int.from_bytes(blob[:8], "little"), np.frombuffer(blob[8:], dtype=np.float64).copy()


# ---------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """An observer that keeps everything it is told."""

    states: list[tuple[str, JobState, str]] = field(default_factory=list)
    steps: list[tuple[str, StepRecord]] = field(default_factory=list)
    evaluations: list[tuple[str, EvalRecord]] = field(default_factory=list)
    groups: list[tuple[str, Group]] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)

    def notice(self, spec: JobSpec, notice: Notice) -> None:
        self.notices.append(notice)

    def job_state(self, spec: JobSpec, state: JobState, reason: str) -> None:
        self.states.append((spec.job_id, state, reason))

    def step_done(self, spec: JobSpec, record: StepRecord) -> None:
        self.steps.append((spec.job_id, record))

    def eval_done(self, spec: JobSpec, record: EvalRecord) -> None:
        self.evaluations.append((spec.job_id, record))

    def group_done(self, spec: JobSpec, group: Group) -> None:
        self.groups.append((spec.job_id, group))


def family_of(spec: JobSpec) -> ScriptedFamily:
    """Make a `ScriptedFamily` from a job's `env` mapping."""
    settings: Mapping[str, object] = {k: v for k, v in spec.env.items() if k != "family"}
    return ScriptedFamily(**settings)
