"""Who may open the next group: deficit round robin in device seconds, while there is room.

    group opened ─► its predicted cost is charged      group finished ─► settled on what it cost

- Tenants share a worker in proportion to their weights, however many jobs or samples each brings.
  Cost is device time, so long and short groups compare.
- A tenant's jobs share its part by how long each still takes at least, within a factor of
  `MAX_PREFERENCE`: the one that would end last, tools included, goes ahead, and none starves.
- Only jobs that could open a group now stand in the queue: those that wait cost nothing, and an
  admission takes the same time at ten tenants and at a thousand.
- A sequence counts against a worker only while it samples: when its tool runs, others fill the
  hole.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Generic, TypeVar

import numpy as np

from marlaas.types import Group, JobId, JobSpec, TenantId, WorkerStats

K = TypeVar("K")

MAX_PREFERENCE = 4.0
"""Most that one job's part of its tenant's share may be of another's."""


class DeficitRing(Generic[K]):
    """Deficit round robin over keys (Shreedhar and Varghese, 1995).

    absent -> in the ring (earns a quantum a round, pays for what it takes) -> absent. A key that
    leaves loses its credit and keeps its debt. The quantum is the largest cost over the smallest
    weight, so a key without debt can pay at its next turn.

        ring = DeficitRing(cost_of=lambda key: {"a": 1.0, "b": 3.0}[key])
        ring.add("a"); ring.add("b")
        key = ring.head(); ring.charge(key, 1.0)      # over time: three times "a" for once "b"
    """

    def __init__(
        self, cost_of: Callable[[K], float], weight_of: Callable[[K], float] = lambda key: 1.0
    ) -> None:
        self._cost_of = cost_of
        self._weight_of = weight_of
        self._ring: deque[K] = deque()
        self._members: set[K] = set()
        self._credit: dict[K, float] = {}
        self._max_cost = 0.0
        self._min_weight = 1.0

    def __len__(self) -> int:
        return len(self._ring)

    def __contains__(self, key: K) -> bool:
        return key in self._members

    def add(self, key: K) -> None:
        """Let a key compete; nothing changes if it does already."""
        if key not in self._members:
            self._members.add(key)
            self._ring.append(key)
            self._credit.setdefault(key, 0.0)
            self._min_weight = min(self._min_weight, self._weight_of(key))

    def discard(self, key: K) -> None:
        """Take a key out; only its debt is remembered."""
        if key in self._members:
            self._members.remove(key)
            # The head leaves in all but rare cases, so this is O(1) where it matters.
            self._ring.remove(key)
            self._credit[key] = min(self._credit[key], 0.0)

    def forget(self, key: K) -> None:
        """Take a key out for good."""
        self.discard(key)
        self._credit.pop(key, None)

    def head(self) -> K | None:
        """Return the key whose turn it is, or None; the same one until something is charged."""
        num_visits = 0
        while self._ring:
            key = self._ring[0]
            cost = self._cost_of(key)
            self._max_cost = max(self._max_cost, cost)
            if self._credit[key] >= cost:
                return key
            if num_visits == len(self._ring):
                self._skip_rounds()
                num_visits = 0
            self._credit[key] += self._quantum(key)
            self._ring.rotate(-1)
            num_visits += 1
        return None

    def charge(self, key: K, cost: float) -> None:
        """Take `cost` off a key's credit; a negative cost gives back, up to a quantum.

        Without that bound a key that was alone, and paid too much at first, would hold a hoard
        that it spends in one go while a newcomer waits.
        """
        if key in self._credit:
            credit = self._credit[key]
            most = max(credit, self._quantum(key)) if cost < 0 else credit
            self._credit[key] = min(credit - cost, most)

    def reweigh(self) -> None:
        """Weights of keys have changed."""
        self._min_weight = min((1.0, *(self._weight_of(key) for key in self._ring)))

    def _quantum(self, key: K) -> float:
        return self._max_cost / self._min_weight * self._weight_of(key)

    def _skip_rounds(self) -> None:
        """Hand out at once the rounds after which still nobody could pay: all are deep in debt."""
        num_rounds = min(
            ceil((self._cost_of(key) - self._credit[key]) / self._quantum(key)) - 1
            for key in self._ring
        )
        for key in self._ring:
            self._credit[key] += max(0, num_rounds) * self._quantum(key)


class Needs:
    """How long each of a tenant's jobs still takes at least. One of which nothing is known takes as
    long as the others on average.

        needs.expect("acme/search", 40.0); needs.expect("acme/sums", 10.0)
        needs.weight_of("acme/search") / needs.weight_of("acme/sums")           # 1.6 / 0.5
    """

    def __init__(self) -> None:
        self._seconds: dict[JobId, float] = {}
        self._sum_s = 0.0

    def expect(self, job_id: JobId, seconds: float) -> None:
        """Take `seconds` as what a job needs from now on."""
        self._sum_s += seconds - self._seconds.get(job_id, 0.0)
        self._seconds[job_id] = seconds

    def forget(self, job_id: JobId) -> None:
        """Leave a job out of account."""
        self._sum_s -= self._seconds.pop(job_id, 0.0)

    def weight_of(self, job_id: JobId) -> float:
        """Return a job's weight among the tenant's: 1 if it takes as long as they do on average, at
        least and at most so much less or more that any two are `MAX_PREFERENCE` apart."""
        seconds = self._seconds.get(job_id)
        mean_s = self._sum_s / len(self._seconds) if self._seconds else 0.0
        if seconds is None or mean_s <= 0:
            return 1.0
        most = MAX_PREFERENCE**0.5
        return min(most, max(1 / most, seconds / mean_s))


class FairQueue:
    """The jobs of one worker that could open a group now: tenants by weight, then their jobs.

    The controller adds a job when it becomes able to open a group, discards it when it no longer
    is, and asks `next` while the worker has room.
    """

    def __init__(
        self, cost_of: Callable[[JobId], float], weights: Mapping[TenantId, float]
    ) -> None:
        self._cost_of = cost_of
        self._jobs: dict[TenantId, DeficitRing[JobId]] = {}
        self._needs: dict[TenantId, Needs] = {}
        self._tenants: DeficitRing[TenantId] = DeficitRing(
            self._tenant_cost, lambda tenant: weights.get(tenant, 1.0)
        )

    def add(self, spec: JobSpec) -> None:
        """Let a job compete; nothing changes if it does already."""
        ring = self._jobs.get(spec.tenant)
        if ring is None:
            needs = self._needs[spec.tenant] = Needs()
            ring = self._jobs[spec.tenant] = DeficitRing(self._cost_of, needs.weight_of)
        ring.add(spec.job_id)
        self._tenants.add(spec.tenant)

    def discard(self, spec: JobSpec) -> None:
        """Take out a job that cannot open a group now."""
        ring = self._jobs.get(spec.tenant)
        if ring is not None:
            ring.discard(spec.job_id)
            if not ring:
                self._tenants.discard(spec.tenant)

    def forget(self, spec: JobSpec) -> None:
        """Take out a job that has ended."""
        self.discard(spec)
        if spec.tenant in self._jobs:
            self._jobs[spec.tenant].forget(spec.job_id)
            self._needs[spec.tenant].forget(spec.job_id)

    def expect(self, spec: JobSpec, seconds: float) -> None:
        """Take `seconds` as what a job still needs at least, until told otherwise."""
        if spec.tenant in self._needs:
            self._needs[spec.tenant].expect(spec.job_id, seconds)

    @property
    def has_waiting(self) -> bool:
        """True while some job could open a group."""
        return len(self._tenants) > 0

    def next(self) -> JobId | None:
        """Return the job whose turn it is, or None."""
        tenant = self._tenants.head()
        return None if tenant is None else self._jobs[tenant].head()

    def reweigh(self) -> None:
        """Weights have changed: what a round brings the tenants follows the smallest one."""
        self._tenants.reweigh()

    def charge(self, spec: JobSpec, cost_s: float) -> None:
        """Charge device seconds to a job and its tenant; negative ones are given back."""
        self._tenants.charge(spec.tenant, cost_s)
        if spec.tenant in self._jobs:
            self._jobs[spec.tenant].charge(spec.job_id, cost_s)

    def _tenant_cost(self, tenant: TenantId) -> float:
        job = self._jobs[tenant].head()
        assert job is not None, "a tenant without ready jobs is not in the ring"
        return self._cost_of(job)


# ---------------------------------------------------------------------------------------------
# Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """What a group makes a device compute."""

    prefill: float
    decode: float
    train: float

    @classmethod
    def of(cls, group: Group, *, is_training: bool) -> "TokenCounts":
        """Count a finished group: the shared opening once, each sampled and each trained token."""
        trajectories = group.trajectories
        decode = sum(int(np.count_nonzero(trajectory.loss_mask)) for trajectory in trajectories)
        total = sum(len(trajectory.tokens) for trajectory in trajectories)
        openings = [trajectory.turns[0].start for trajectory in trajectories if trajectory.turns]
        shared = sum(openings) - max(openings, default=0)
        return cls(
            prefill=total - decode - shared, decode=decode, train=total if is_training else 0
        )

    @classmethod
    def guess(cls, spec: JobSpec, max_turns: int) -> "TokenCounts":
        """Guess, before anything was seen, replies of half their limit and prompts as long."""
        decode = spec.group_size * max_turns * spec.max_tokens / 2
        return cls(prefill=decode, decode=decode, train=2 * decode)


class CostModel:
    """Device seconds of a worker's work: tokens of a group (learned per job) x seconds per token.

    Starts from guesses; `learn` follows what a job's groups turn out to be, `learn_rates` what
    the worker reports to have needed.

        model.expect(job_id, TokenCounts.guess(spec, max_turns=1))
        estimate_s = model.predict_s(job_id)             # charged when a group opens
        model.learn(job_id, TokenCounts.of(group, is_training=True))
    """

    FOLLOW = 0.2
    """Weight of the newest group in a job's running mean: about the last five groups count."""

    MIN_TOKENS = 1000
    """Tokens of a kind that a worker must have processed before its rate is believed."""

    def __init__(self) -> None:
        # Of a base of 1-2 M parameters on one core; at first only their ratios matter.
        self._rates_s = {"prefill": 2e-4, "decode": 1e-3, "train": 4e-4}
        self._counts: dict[JobId, TokenCounts] = {}
        self.is_measured = False
        """The worker has said how long its work takes: seconds are seconds."""

    def expect(self, job_id: JobId, counts: TokenCounts) -> None:
        """Take `counts` as what a group of the job needs, until groups say otherwise."""
        self._counts[job_id] = counts

    def predict_s(self, job_id: JobId) -> float:
        """Return the predicted device seconds of the job's next group."""
        return self.seconds(self._counts[job_id])

    def learn(self, job_id: JobId, seen: TokenCounts) -> None:
        """Follow what a finished group of the job needed."""
        mean = self._counts[job_id]
        self._counts[job_id] = TokenCounts(
            prefill=mean.prefill + self.FOLLOW * (seen.prefill - mean.prefill),
            decode=mean.decode + self.FOLLOW * (seen.decode - mean.decode),
            train=mean.train + self.FOLLOW * (seen.train - mean.train),
        )

    def learn_rates(self, stats: WorkerStats) -> None:
        """Take over the seconds per token that the worker measured."""
        for kind in self._rates_s:
            tokens = stats.tokens.get(kind, 0)
            if tokens >= self.MIN_TOKENS:
                self._rates_s[kind] = stats.busy_s.get(kind, 0.0) / tokens
                self.is_measured = True

    def counts_of(self, job_id: JobId) -> TokenCounts:
        """Return what the job's next group is expected to need."""
        return self._counts[job_id]

    def forget(self, job_id: JobId) -> None:
        del self._counts[job_id]

    def seconds(self, counts: TokenCounts) -> float:
        """Return device seconds of given token counts; never 0, since nothing is free."""
        rates = self._rates_s
        return 1e-6 + (
            rates["prefill"] * counts.prefill
            + rates["decode"] * counts.decode
            + rates["train"] * counts.train
        )


# ---------------------------------------------------------------------------------------------
# Room


class WorkerLoad:
    """What a worker samples right now, against what it can hold: the admission stage's one gate.

    A sequence enters when its turn goes to the generator and leaves when the turn comes back, so
    one that waits for a tool takes no room. Turns after a tool are never refused; they may overfill
    a worker, whose own queue then holds them.
    """

    def __init__(self, max_decoding: int, kv_capacity_tokens: int) -> None:
        self.max_decoding = max_decoding
        self.kv_capacity_tokens = kv_capacity_tokens
        self.num_sampling = 0
        self.num_reserved = 0
        """Sequences of groups that were admitted and have not come to their first turn yet."""
        self.kv_tokens = 0
        self.num_kept = 0
        """Places that are kept for who has nothing here, and memory in proportion; see `Lanes`."""

    @property
    def has_room(self) -> bool:
        """True while another group would find a place soon."""
        return self._has_place(self.num_kept) or self.num_sampling + self.num_reserved == 0

    @property
    def has_kept_place(self) -> bool:
        """True while there is a place, kept or not."""
        return self._has_place(0)

    def _has_place(self, num_kept: int) -> bool:
        most = self.max_decoding - num_kept
        return (
            self.num_sampling + self.num_reserved < most
            and self.kv_tokens * self.max_decoding < self.kv_capacity_tokens * most
        )

    @contextmanager
    def sampling(self, kv_tokens: int, on_leave: Callable[[], None]) -> Iterator[None]:
        """Count one turn while it is with the generator."""
        self.num_sampling += 1
        self.kv_tokens += kv_tokens
        try:
            yield
        finally:
            self.num_sampling -= 1
            self.kv_tokens -= kv_tokens
            on_leave()
