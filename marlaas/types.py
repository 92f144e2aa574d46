"""The vocabulary that every part of MARLaaS speaks: plain frozen records and two protocols.

Nothing here has behaviour beyond derived properties, and nothing here needs torch. Arrays are
NumPy. Per-token arrays of one trajectory or datum are aligned with its token ids: entry `t`
describes token `t`, hence the prediction made at position `t - 1`; entry 0 is never trained.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NewType, Protocol

import numpy as np

MAX_NAME_CHARS = 64
"""Of a tenant, a job, an upload."""
SEGMENT = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")
"""What may be such a name: one path segment that no shell, URL or file system reads as anything
else."""

TenantId = NewType("TenantId", str)
JobId = NewType("JobId", str)
PolicyId = NewType("PolicyId", str)

BASE_VERSION = 0
"""Version 0 of every policy is the untrained adapter, whose output equals the base model's."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. `role` is system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One dataset item: what an environment is made from."""

    index: int
    """Place in the job's prompt stream; the same index and seed give the same item."""
    messages: tuple[Message, ...]
    """The opening of the conversation, before the policy's first turn."""
    reference: Mapping[str, object]
    """What the environment needs to judge (answer, hidden tests, documents). JSON values only."""


# ---------------------------------------------------------------------------------------------
# Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next tokens of one sequence are drawn."""

    max_tokens: int
    """Most tokens to sample in this call."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """Sampling ends after one of these; the token is kept in the output."""
    stop_strings: tuple[str, ...] = ()
    """Sampling ends once the decoded output contains one of these; its tokens are kept."""
    seed: int = 0
    """64-bit. Token at position `t` uses the uniform number of (seed, t) and nothing else."""


class StopReason(StrEnum):
    """Why sampling of one call ended."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    CANCELLED = "cancelled"
    NON_FINITE = "non_finite"
    """The logits of this row held NaN or infinity: this sequence ends, its neighbours go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Continue one sequence. The same `sequence_id` over turns lets its KV be reused."""

    request_id: str
    sequence_id: str
    policy_id: PolicyId | None
    """None samples from the base model itself."""
    version: int
    tokens: np.ndarray
    """int32 [T]. The whole context so far, exact ids."""
    sampling: SamplingParams
    prefix_id: str = ""
    """Sequences with equal (policy, version, prefix_id) and equal first `prefix_len` tokens share
    that prefix: it is computed once."""
    prefix_len: int = 0
    keep_kv: bool = False
    """Another turn of this sequence will follow; keep its KV if memory allows."""
    prompt_logprobs: bool = False
    """Also score the tokens of the context."""
    topk_prompt_logprobs: int = 0
    """Most likely tokens to report at each position of the context."""
    target_prompt_ids: np.ndarray | None = None
    """int32 [T, K]. Tokens to score at each position of the context, beside the one that stands
    there; -1: no such cell. Row 0 has none."""
    prompt_alt_tokens_k: int = 0
    """Tokens to draw at each position of the context, at the temperature, with replacement."""
    prompt_logprobs_from: int = 0
    """Whatever is asked of the context is asked of entries from here on: what is before may come
    from memory."""
    topk_sample_logprobs: int = 0
    """Most likely tokens to report with each sampled one."""
    in_flight: bool = False
    """Take newer versions of the policy at token boundaries instead of staying pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What one `GenerateRequest` came back with."""

    request_id: str
    tokens: np.ndarray
    """int32 [C]. The sampled ids, the stop token included."""
    logprobs: np.ndarray
    """float32 [C]. Log-probability under the distribution that was sampled from."""
    stop_reason: StopReason
    versions: np.ndarray
    """int32 [C]. Policy version per sampled token; constant unless the request was in-flight."""
    adapter_hash: str
    """Content hash of the adapter that sampled the first token; empty for the base model."""
    prompt_logprobs: np.ndarray | None = None
    """float32 [T], NaN at 0 and before `prompt_logprobs_from`; only when asked for. Temperature 1,
    as all that is said of the context."""
    topk_prompt_ids: np.ndarray | None = None
    """int32 [T, k], -1 where there is none."""
    topk_prompt_logprobs: np.ndarray | None = None
    """float32 [T, k], NaN where there is none."""
    target_prompt_logprobs: np.ndarray | None = None
    """float32 [T, K], NaN where `target_prompt_ids` has no cell."""
    prompt_alt_ids: np.ndarray | None = None
    """int32 [T, k], -1 where there is none."""
    prompt_alt_logprobs: np.ndarray | None = None
    """float32 [T, k]. Under the distribution that they were drawn from, as of sampled tokens."""
    topk_sample_ids: np.ndarray | None = None
    """int32 [C, k], the most likely first."""
    topk_sample_logprobs: np.ndarray | None = None
    """float32 [C, k]. At the temperature, before any truncation."""
    num_cached_tokens: int = 0
    """Context tokens that did not have to be computed for this call."""

    @property
    def reply_tokens(self) -> np.ndarray:
        """The sampled ids that are the reply's text: without the stop token that ended it."""
        return self.tokens[:-1] if self.stop_reason is StopReason.STOP_TOKEN else self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a generator can do. A request that needs more is refused, never watered down."""

    prompt_logprobs: bool = True
    topk_prompt_logprobs: bool = True
    min_p: bool = True
    stop_strings: bool = True
    in_flight: bool = True
    max_context: int = 2048
    """Tokens of context and completion together."""
    max_trained_tokens: int | None = None
    """The longest trajectory whose gradient fits into the trainer's memory, whatever the adapter;
    None: no bound is known."""

    def max_trajectory(self, *, is_training: bool) -> int:
        """Return how long a trajectory may become that is trained on, or only judged."""
        if not is_training or self.max_trained_tokens is None:
            return self.max_context
        return min(self.max_context, self.max_trained_tokens)


# ---------------------------------------------------------------------------------------------
# Training

TARGET_GROUPS: Mapping[str, tuple[str, ...]] = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "head": ("lm_head",),
}
"""Names a job may use for target modules, and the linears that each stands for."""

RANK_BUCKETS = (8, 16, 32, 64)
"""An adapter of rank r lives in the smallest bucket that is at least r; the rest is zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """Shape of one policy's LoRA adapter. Its output is scaled by `alpha / rank`."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("attention", "mlp")
    """Keys of `TARGET_GROUPS`."""
    seed: int = 0
    """Makes the initial A matrices; B starts at zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One training example of one policy: a whole token sequence and what to do with each token.

    With `targets` of K tokens per entry every array but `tokens` has their shape [T, K], and what
    is said of a token holds for a cell.
    """

    tokens: np.ndarray
    """int32 [T]. What the model reads; the last one is never read."""
    weights: np.ndarray
    """float32 [T]. Loss weight, normaliser included; 0 on tokens that are not trained."""
    advantages: np.ndarray
    """float32 [T]."""
    sampling_logprobs: np.ndarray
    """float32 [T]. Recorded when the token was sampled; 0 where there is none."""
    reference_logprobs: np.ndarray | None = None
    """float32 [T]. Under the frozen base; only when the objective has a KL term."""
    temperature: float = 1.0
    """The temperature the tokens were sampled at; logits are divided by it in training too."""
    targets: np.ndarray | None = None
    """int32 [T] or [T, K]. The token or tokens that entry t is about, predicted at position t - 1;
    None: tokens[t] itself. -1: no such cell. Entry 0 is about nothing."""
    is_scored_everywhere: bool = False
    """The output has logprobs of every entry from 1 on, trained or not."""
    loss_inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    """float32, in the shape of `weights`: parameters of the objective token by token, see
    `LOSS_INPUTS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A token objective by name with its parameters, see `docs/algorithms.md`."""

    name: str
    params: Mapping[str, float] = field(default_factory=dict)


OBJECTIVE_PARAMS: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {"kl_coef": 0.0},
    "importance_sampling": {"kl_coef": 0.0},
    "ppo": {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "kl_coef": 0.0},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "kl_coef": 0.0},
    "dppo_tis": {"cap": 2.0, "delta": 0.2, "log_ratio_penalty": 1e-3, "kl_coef": 0.0},
    "dro": {"beta": 0.05, "kl_coef": 0.0},
}
"""Token objectives with their parameters and defaults; `engine/objectives.py` has the formulas.
`clip_low` and `clip_high` are distances from 1: ratios stay in [1 - clip_low, 1 + clip_high]. They
may be negative: both bounds may lie on one side of 1."""

LOSS_INPUTS: Mapping[str, tuple[str, ...]] = {
    "ppo": ("clip_low", "clip_high"),
    "gspo": ("clip_low", "clip_high", "ratio_mask"),
    "cispo": ("clip_low", "clip_high"),
}
"""What `Datum.loss_inputs` may hold, by objective: bounds token by token, in place of the
parameters, and `ratio_mask`, not 0 on the tokens that a sequence's ratio is the mean over (without
it: the trained ones)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatumOutput:
    """What a forward pass says of one datum."""

    logprobs: np.ndarray
    """float32 [T], or [T, K] as `targets`. Train logprobs where `weights` is not 0 (everywhere for
    `forward` and with `is_scored_everywhere`), else 0."""
    loss: float
    """The datum's share of the loss: sum over tokens of weight x token loss."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Sums over trained tokens, e.g. `masked`, `clipped`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """One AdamW update of one policy."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    """Gradient norm is clipped to it; 0 does not clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step of one policy did."""

    version: int
    """The version that the step made; a vetoed step makes one too, with unchanged weights."""
    grad_norm: float
    adapter_hash: str
    is_vetoed: bool = False
    """The gradient was not finite: no weight was changed, and the gradient is cleared."""


# ---------------------------------------------------------------------------------------------
# Trajectories


class TrajectoryEnd(StrEnum):
    """Why a trajectory ended. Only the first three carry a reward that may be trained on."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    TRUNCATED = "truncated"
    """A turn hit `max_tokens` or the context's end; the environment judged what there was."""
    ENVIRONMENT_ERROR = "environment_error"
    TOOL_TIMEOUT = "tool_timeout"
    SANDBOX_LIMIT = "sandbox_limit"
    SANDBOX_LOST = "sandbox_lost"
    NON_FINITE = "non_finite"
    STRAGGLER = "straggler"
    """Cut because it would have passed the staleness bound after the job's deadline."""
    CANCELLED = "cancelled"

    @property
    def is_trainable(self) -> bool:
        """True when the reward is a verdict on the policy, not on the machinery."""
        return self in (TrajectoryEnd.DONE, TrajectoryEnd.MAX_TURNS, TrajectoryEnd.TRUNCATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One generation inside a trajectory: tokens [start, end) were sampled."""

    start: int
    end: int
    version: int
    """Policy version of the first token; the oldest one, since versions only grow."""
    adapter_hash: str
    stop_reason: StopReason
    latency_s: float = 0.0
    """Time the environment took to answer this turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The finished record of one rollout. Token ids are exactly those sampled or rendered."""

    index: int
    """Place inside its group, 0 .. group_size - 1."""
    tokens: np.ndarray
    """int32 [T]."""
    loss_mask: np.ndarray
    """bool [T]. True on sampled tokens."""
    sampling_logprobs: np.ndarray
    """float32 [T]. 0 where `loss_mask` is False."""
    versions: np.ndarray
    """int32 [T]. Policy version that sampled the token; -1 where `loss_mask` is False."""
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    """The conversation as text, for people; training never reads it."""
    reward: float
    """0.0 and meaningless unless `end.is_trainable`."""
    is_success: bool
    end: TrajectoryEnd
    detail: str = ""
    """What went wrong, in words, when something did."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def min_version(self) -> int | None:
        """Oldest policy version among its tokens; None when nothing was sampled."""
        return min((turn.version for turn in self.turns), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The G trajectories of one prompt, the unit of scheduling and of advantages."""

    index: int
    """Place in the job's stream of groups."""
    prompt_index: int
    version: int
    """Policy version that its rollouts started with."""
    trajectories: tuple[Trajectory, ...]


# ---------------------------------------------------------------------------------------------
# The two protocols of an engine worker, as the loop sees them


class Generator(Protocol):
    """Samples tokens for many policies and versions at once."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample until a stop. Cancelling the awaiting task takes the sequence out of the batch."""
        ...

    async def release(self, sequence_ids: Sequence[str]) -> None:
        """These sequences will have no further turn: free what is kept for them."""
        ...


class Trainer(Protocol):
    """Trains many policies; the Tinker verbs. Order is a barrier per policy only."""

    async def create(self, policy_id: PolicyId, spec: AdapterSpec) -> str:
        """Make a fresh policy at version 0, live for generation. Returns its adapter hash."""
        ...

    async def create_from(self, policy_id: PolicyId, spec: AdapterSpec, source: str) -> str:
        """Make a policy at version 0, live, that begins where another one was: at a PEFT folder, or
        at a snapshot file, which gives moments and update clock, too. Rank and targets must be
        those of `spec`; alpha is the source's. Returns its adapter hash."""
        ...

    async def load(self, policy_id: PolicyId, snapshot: str) -> StepResult:
        """Bring a policy back from a state snapshot (adapter, moments, clock), live."""
        ...

    async def load_version(self, policy_id: PolicyId, version: int, folder: str) -> str:
        """Make an older version live again for generation and `forward`, from the folder that
        `save_adapter` wrote. Training state stays as it is. Returns its adapter hash."""
        ...

    async def forward_backward(
        self, policy_id: PolicyId, data: Sequence[Datum], objective: Objective
    ) -> list[DatumOutput]:
        """Accumulate gradients of the summed loss of `data` into the policy's gradient row."""
        ...

    async def forward(
        self, policy_id: PolicyId | None, version: int, data: Sequence[Datum]
    ) -> list[DatumOutput]:
        """Logprobs of every token under a live version, under the newest one even before it is
        live, or under the base (None)."""
        ...

    async def optim_step(
        self, policy_id: PolicyId, adam: AdamParams, snapshot: str | None = None
    ) -> StepResult:
        """Apply the accumulated gradient and clear it; write the state to `snapshot` if given.

        With nothing accumulated since the last step, weights and moments stay as they are and the
        version advances all the same: a step without update is a step of the clock. The new
        version is not live until `publish`: the caller commits its record first.
        """
        ...

    async def zero_grad(self, policy_id: PolicyId) -> None:
        """Clear the accumulated gradient and what was wrong with it, once the passes and steps that
        were called before are done. Weights, moments and clocks stay."""
        ...

    async def save_state(self, policy_id: PolicyId, path: str) -> None:
        """Write a state snapshot as of the last step that was called before; an accumulated
        gradient is no part of it, and stays."""
        ...

    async def publish(self, policy_id: PolicyId, version: int) -> None:
        """Make `version`, the newest, live for generation. Pauses nobody."""
        ...

    async def retire(self, policy_id: PolicyId, version: int) -> None:
        """No new request will name this version; its slot is freed once running ones end."""
        ...

    async def save_adapter(self, policy_id: PolicyId, version: int, folder: str) -> str:
        """Write a live version as a PEFT folder. Returns its adapter hash."""
        ...

    async def merge(self, adapter_folder: str, out_folder: str) -> None:
        """Write the base with a PEFT folder's adapter added to its weights, as a Hugging Face
        folder that needs no adapter. Holds up nobody; cancelling leaves nothing behind."""
        ...

    async def remove(self, policy_id: PolicyId) -> None:
        """Forget the policy: its running sequences end as cancelled, its memory is zeroed."""
        ...


# ---------------------------------------------------------------------------------------------
# Jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Extra waiting time of every environment call, log-normal: a tool that takes its time."""

    median_s: float = 0.0
    """0 switches it off."""
    sigma: float = 0.0
    """Standard deviation of the logarithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Where a job begins: a version of one of the tenant's jobs, with an adapter of this shape."""

    job: str
    version: int
    with_optimizer: bool = False
    """Take the moments too; only the newest version of a job has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a tenant submits. Everything that decides the result of a job is in here."""

    tenant: TenantId
    name: str
    """Unique per tenant; one path segment."""
    env: Mapping[str, object]
    """`{"family": NAME, ...settings of the family}`."""
    algorithm: Mapping[str, object] = field(default_factory=lambda: {"preset": "dppo_tis"})
    """`{"preset": NAME, ...parameters to override}`."""
    adapter: AdapterSpec = field(default_factory=AdapterSpec)
    steps: int = 20
    prompts_per_step: int = 4
    """P: groups that one optimizer step takes."""
    group_size: int = 8
    """G: trajectories of one prompt."""
    max_staleness: int = 4
    """Optimizer steps that a trajectory's oldest token may lag when it is trained on."""
    learning_rate: float = 2e-3
    max_tokens: int = 64
    """Most tokens per turn."""
    temperature: float = 1.0
    eval_every: int = 0
    """Steps between evaluations; 0: only the first and the last version, which always are."""
    eval_prompts: int = 128
    """Held-out prompts of one evaluation; 0 evaluates nothing."""
    stop_at_success: float = 0.0
    """Stop early once an evaluation succeeds this often; 0 never stops."""
    latency: Latency = field(default_factory=Latency)
    is_in_flight: bool = False
    """Rollouts take newer versions at token boundaries instead of keeping their first."""
    is_seeded: bool = False
    """Fixed-lag, bitwise reproducible schedule (design decision 9)."""
    straggler_deadline_s: float = 60.0
    """How long a step waits for a group that would pass the staleness bound before it is cut."""
    seed: int = 0
    keep_versions: int = 3
    """Newest versions kept as PEFT folders, beside the first, the best and the promoted one."""
    max_job_tokens: int = 0
    """Cap on sampled and trained tokens together; past it the job pauses. 0: no cap."""
    max_device_s: float = 0.0
    """Cap on device seconds; past it the job pauses. 0: no cap."""
    fork: "Fork | None" = None
    """Begin from another job's version instead of from the base."""

    @property
    def job_id(self) -> JobId:
        return JobId(f"{self.tenant}/{self.name}")

    @property
    def policy_id(self) -> PolicyId:
        return PolicyId(f"{self.tenant}/{self.name}")


class JobState(StrEnum):
    """`queued -> running -> done`; every other end, and every stop, carries a reason."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    """The tenant, or a cap of theirs, stopped it; `resume` queues it again."""
    DONE = "done"
    HELD = "held"
    """Stopped because its results could not be trusted (gap, non-finite update)."""
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_active(self) -> bool:
        """True when the machine runs it or will, without anybody asking again."""
        return self in (JobState.QUEUED, JobState.RUNNING)

    @property
    def is_terminal(self) -> bool:
        """True when it ended: it takes no step unless somebody resumes it, if that is legal."""
        return not self.is_active and self is not JobState.PAUSED


JOB_MOVES: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset(
        {
            JobState.RUNNING,
            JobState.PAUSED,
            JobState.HELD,
            JobState.FAILED,
            JobState.CANCELLED,
        }
    ),
    JobState.RUNNING: frozenset(
        {
            JobState.QUEUED,
            JobState.PAUSED,
            JobState.DONE,
            JobState.HELD,
            JobState.FAILED,
            JobState.CANCELLED,
        }
    ),
    JobState.PAUSED: frozenset({JobState.QUEUED, JobState.CANCELLED}),
    JobState.HELD: frozenset({JobState.QUEUED, JobState.CANCELLED}),
    JobState.FAILED: frozenset({JobState.QUEUED, JobState.CANCELLED}),
    JobState.DONE: frozenset(),
    JobState.CANCELLED: frozenset(),
}
"""Legal moves from one state to another. A move from a state to itself changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """What can be said of a job now, beside what the store holds of it."""

    waits_for: str = ""
    """Why a queued job does not run, or a running one makes no progress, in words; else empty."""
    place: int | None = None
    """1-based place among the queued jobs, in the order in which they would start."""
    starts_in_s: float | None = None
    """Estimate for a queued job; None where there is nothing to estimate from."""
    ends_in_s: float | None = None
    """Estimate for a queued or running job."""
    device_s: float = 0.0
    """Device seconds charged so far, of all runs together."""


# ---------------------------------------------------------------------------------------------
# Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One client process, as long as it says that it is there. Runs and samplers belong to it."""

    session_id: str
    """Made by the server, unguessable."""
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    project_id: str = ""
    display_name: str = ""
    created_s: float = 0.0
    """Since the epoch, as every time here."""
    seen_s: float = 0.0
    """When it was last heard of."""
    finished_s: float | None = None
    end_reason: str = ""


class StateKind(StrEnum):
    """What the newest durable training state of a run is."""

    FRESH = "fresh"
    """No file: the untrained adapter, made from its spec."""
    ADAPTER = "adapter"
    """A PEFT folder: trained weights, fresh moments."""
    SNAPSHOT = "snapshot"
    """A snapshot file: weights, moments and update clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A policy that a client drives operation by operation."""

    run_id: str
    """`<session>:train:<seq>`."""
    session_id: str
    seq: int
    """The client's number of it, from 0 in each session."""
    base_model: str
    """The name that the client used."""
    spec: AdapterSpec
    metadata: Mapping[str, str] = field(default_factory=dict)
    optimizer: Mapping[str, object] = field(default_factory=dict)
    """As the client configured it. JSON values."""
    created_s: float = 0.0
    used_s: float = 0.0
    """When an operation was last accepted or finished."""
    version: int = 0
    """Optimizer steps and loads so far; the durable state is of this version."""
    boundary_seq: int = -1
    """The last operation that cleared the gradients; what came before it is never replayed. -1:
    none yet."""
    state_path: str | None = None
    """Where the durable state is; None if fresh."""
    state_kind: StateKind = StateKind.FRESH
    adapter_hash: str = ""
    is_corrupted: bool = False
    ended_s: float | None = None
    """When its training state was deleted, long after its session ended. It takes no operation any
    more; its checkpoints stay."""


FORWARD_BACKWARD = "forward_backward"
"""Kind of the operations whose payload stays after they are done, until a boundary uses up their
gradients: a restarted worker is given them again."""


class OperationState(StrEnum):
    """`accepted -> done | failed`."""

    ACCEPTED = "accepted"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One numbered request of a run. Created at most once, executed in the order of numbers."""

    run_id: str
    seq: int
    """0 makes the run; the client counts from 1."""
    kind: str
    request_id: str
    payload: bytes = b""
    """What is asked for; empty once it is not needed any more."""
    state: OperationState = OperationState.ACCEPTED
    result: bytes = b""
    """What came out; empty until done, and again once dropped by age."""
    error: str = ""
    error_category: str = ""
    """`user`, `server` or `unknown`, when failed."""
    created_s: float = 0.0
    finished_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """What a client samples from: the base, or a checkpoint."""

    sampler_id: str
    """`<session>:sample:<seq>`."""
    session_id: str
    seq: int
    base_model: str
    checkpoint_path: str | None = None
    """`tinker://...`; None samples from the base."""
    created_s: float = 0.0
    used_s: float = 0.0


class CheckpointKind(StrEnum):
    """What a checkpoint is for."""

    WEIGHTS = "weights"
    """Training goes on from it; has the optimizer's state where there is one."""
    SAMPLER = "sampler_weights"
    EXTERNAL = "external_weights"
    """To be downloaded."""


EPHEMERAL = "#"
"""Begins the names of checkpoints that a client did not name: hidden from lists, pruned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A saved version of a run: immutable, kept until it expires or is deleted."""

    run_id: str
    kind: CheckpointKind
    name: str
    version: int
    """The run's, when it was saved."""
    adapter_hash: str
    folder: Path
    """Has `adapter/`, and `state` if `has_optimizer`."""
    has_optimizer: bool = False
    size_bytes: int = 0
    """Of its files, as found when it was stored."""
    is_public: bool = False
    """Every tenant may read it."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    created_s: float = 0.0
    used_s: float = 0.0
    expires_s: float | None = None

    @property
    def path(self) -> str:
        return f"tinker://{self.run_id}/{self.kind.value}/{self.name}"

    @property
    def is_ephemeral(self) -> bool:
        return self.name.startswith(EPHEMERAL)


# ---------------------------------------------------------------------------------------------
# Tenants


OPERATOR = TenantId("operator")
"""Owner of operator keys. No tenant may have this name."""


class Role(StrEnum):
    """What a key may do."""

    TENANT = "tenant"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Limits of one tenant. 0 means none may be had; `None` means no limit."""

    max_running_jobs: int | None = 8
    max_queued_jobs: int | None = 200
    max_runs: int | None = 64
    """Runs of clients that are at work."""
    tokens_a_day: int | None = None
    """Sampled, trained, evaluated and served tokens together, per UTC day."""
    stored_bytes: int | None = 20 << 30
    sandbox_cpu_s_a_day: float | None = None
    requests_a_second: float | None = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A customer: owner of jobs, keys, adapters and uploads."""

    tenant_id: TenantId
    weight: float = 1.0
    """Share of the machine relative to other tenants."""
    quotas: Quotas = field(default_factory=Quotas)
    created_s: float = 0.0
    """Since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """What is kept of a key; the key itself is shown once, when it is made."""

    key_id: str
    tenant_id: TenantId
    """`OPERATOR` for an operator's key."""
    role: Role
    label: str
    created_s: float
    revoked_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What was used, by stage. Token counts equal what the stored trajectories hold."""

    sampled_tokens: int = 0
    """Tokens that policies sampled."""
    trained_tokens: int = 0
    """Tokens of trajectories that steps trained on, prompts included."""
    evaluated_tokens: int = 0
    """Tokens sampled in evaluations."""
    served_tokens: int = 0
    """Tokens sampled for completions, outside jobs."""
    prefill_tokens: int = 0
    """Context tokens computed, a shared opening once a group."""
    device_s: float = 0.0
    sandbox_cpu_s: float = 0.0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            **{name: getattr(self, name) + getattr(other, name) for name in Usage.__slots__}
        )


class EventKind(StrEnum):
    """What happened to a job."""

    STATE = "state"
    """`{"state", "reason"}`."""
    STEP = "step"
    """`{"step", "metrics", "elapsed_s", "is_empty", "is_vetoed"}`."""
    EVALUATION = "evaluation"
    """`{"version", "success", "reward", "num_prompts", "num_failed", "elapsed_s"}`."""
    NOTICE = "notice"
    """`{"stage", "cause", "since_s"}`: something makes no progress, or goes on again."""
    LOG = "log"
    """`{"text"}`: what the tenant's own code printed or raised, and of what its environments
    failed, each text once."""
    DELETED = "deleted"
    """`{"job"}`: a job was deleted. What its events said is gone; they are left as `{}`, without a
    job, so that the numbers keep no gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a tenant's history."""

    seq: int
    """1, 2, 3, ... per tenant, without gaps; a stream resumes behind it."""
    at_s: float
    """Since the epoch, for people."""
    job: str
    kind: EventKind
    data: Mapping[str, object]
    """JSON values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One thing that somebody with a key did to tenants, keys or jobs of others."""

    seq: int
    at_s: float
    """Since the epoch."""
    actor: str
    """Id of the key that was used."""
    action: str
    tenant_id: TenantId
    """Whom it was done to; empty when nobody in particular."""
    detail: object
    """JSON value; never a secret."""


class UploadKind(StrEnum):
    """What a tenant may upload."""

    PROMPTS = "prompts"
    """JSONL, one prompt a line."""
    ENVIRONMENT = "environment"
    """A Python file; it runs in the tenant's sandbox only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A file of a tenant. Jobs name it by digest, so a later upload of that name changes none."""

    kind: UploadKind
    name: str
    digest: str
    """sha256, hex."""
    size_bytes: int
    num_lines: int
    created_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """What a list of groups shows of one."""

    index: int
    state: str
    reason: str
    version: int
    step: int | None
    num_trajectories: int
    reward_mean: float | None
    """Over trajectories with a verdict; None where there is none."""
    success_mean: float | None
    num_tokens: int
    """Of all its trajectories, prompts included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """Where one engine worker's time went since it started; kinds are `decode`, `prefill`, `train`,
    `score`, `publish` and `other`, the rest was idle."""

    name: str
    elapsed_s: float
    busy_s: Mapping[str, float]
    tokens: Mapping[str, int]
    """Tokens processed by kind (decode: sampled; prefill: computed; train, score: packed)."""
    num_decoding: int
    num_waiting: int
    """Sequences that wait for a place in the batch."""
    num_parked: int
    """Sequences out of the batch whose KV is kept for a next turn."""
    kv_tokens: int
    kv_capacity_tokens: int
    rss_bytes: int
    quanta: Mapping[str, int] = field(default_factory=dict)
    """Passes by kind: tokens over quanta is how full they were."""
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    """CPU seconds by kind. Below `busy_s` where other processes took the core in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The durable record of one optimizer step: what was trained on, what came out."""

    step: int
    """1-based; the policy version that the step made (a step without update advances too)."""
    group_indices: tuple[int, ...]
    """Groups consumed, in training order. With the job's cursor this is what resume needs."""
    adapter_hash: str
    is_vetoed: bool
    is_empty: bool
    """Every group had zero variance or was dropped: the clock advanced, the weights did not."""
    metrics: Mapping[str, float]
    """One flat row of the learning curve, see `docs/metrics.md`."""
    elapsed_s: float
    """Seconds since the job began (this run and earlier ones)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """One evaluation on held-out prompts, one sample each at the job's temperature."""

    version: int
    success: float
    """Share of prompts that succeeded, over those with a verdict."""
    reward: float
    num_prompts: int
    num_failed: int
    """Prompts without a verdict because the environment failed."""
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something of a job makes no progress, or does again."""

    stage: str
    """One of `loop.watchdog.Stage`."""
    tenant: TenantId
    job: str
    cause: str
    """What is waited for, in words."""
    since_s: float
    """How long it has been waited for."""


class JobObserver(Protocol):
    """Whoever wants to see progress. Called from the event loop: return quickly, never raise."""

    def job_state(self, spec: JobSpec, state: JobState, reason: str) -> None: ...

    def step_done(self, spec: JobSpec, record: StepRecord) -> None: ...

    def eval_done(self, spec: JobSpec, record: EvalRecord) -> None: ...

    def group_done(self, spec: JobSpec, group: Group) -> None: ...

    def notice(self, spec: JobSpec, notice: Notice) -> None: ...

    def workers_seen(self, stats: "Sequence[WorkerStats]") -> None: ...
