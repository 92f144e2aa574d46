"""What jobs use and what tenants may use: device seconds, caps of jobs, quotas of tenants.

    group settled, step committed ─► Meter (one job) ─► store, once a step
                                       └─► Tenants (a day's sums) ─► a spent tenant opens no group

- Token counts in the store come from what is stored there; meters only count along, to see when a
  cap or a quota is reached without asking the store at every group.
- A tenant is charged for work that was done for it: what a lost worker took with it is not.
- Groups in flight finish and are trained on, so what they will take counts against the day's tokens
  from when they open: as much as the job's largest group so far, later what they turned out to be.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import floor

from marlaas import runtime
from marlaas.errors import QuotaExceeded
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.store.usage import day_of
from marlaas.types import Group, JobId, JobSpec, Quotas, Tenant, TenantId, Usage

DAY_S = 86_400.0

UNLIMITED = Quotas(
    max_running_jobs=None,
    max_queued_jobs=None,
    max_runs=None,
    tokens_a_day=None,
    stored_bytes=None,
    sandbox_cpu_s_a_day=None,
    requests_a_second=None,
)
"""Of tenants that nobody set limits for: those of a run without a service."""


def sampled_tokens(group: Group) -> int:
    """Return how many tokens a policy sampled for a group."""
    return sum(int(trajectory.loss_mask.sum()) for trajectory in group.trajectories)


def trained_tokens(groups: Iterable[Group], dropped: Mapping[int, str]) -> int:
    """Return how many tokens a step trained on: those of its groups that were not dropped."""
    return sum(
        len(trajectory.tokens)
        for group in groups
        if group.index not in dropped
        for trajectory in group.trajectories
    )


class Meter:
    """What one job has used in all its runs together: `restore` -> add* -> `reading`*.

    meter.add_tokens(400); meter.add_device_s(1.5)
    await store.call(Store.add_usage, tenant, job, meter.reading(sandbox_cpu_s=family.cpu_s()))
    meter.why_capped()                       # "its cap of ... is reached", or empty
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self.tokens = 0
        """Sampled and trained."""
        self.device_s = 0.0
        self._largest_group = 0
        self._read_device_s = 0.0
        self._read_cpu_s = 0.0

    @property
    def entry(self) -> str:
        """What tells the last reading from the one before, and from no repetition of it."""
        return f"{self._read_device_s!r} {self._read_cpu_s!r}"

    def restore(self, usage: Usage) -> None:
        """Go on from what the store holds of the job."""
        self.tokens = usage.sampled_tokens + usage.trained_tokens
        self.device_s = self._read_device_s = usage.device_s

    @property
    def has_seen_groups(self) -> bool:
        """Whether `group_tokens` is more than a guess."""
        return self._largest_group > 0

    def note_group(self, tokens: int) -> None:
        """A group has turned out to take so many tokens, its training included."""
        self._largest_group = max(self._largest_group, tokens)

    def group_tokens(self, max_turns: int) -> int:
        """Return how many tokens the next group may take, sampled and trained on.

        As many as the largest one of this run; before there was one, with replies at their limit
        and prompts as long.
        """
        spec = self._spec
        return self._largest_group or 3 * spec.group_size * max_turns * spec.max_tokens

    def add_tokens(self, count: int) -> None:
        self.tokens += count

    def add_device_s(self, seconds: float) -> None:
        self.device_s += seconds

    def reading(self, *, sandbox_cpu_s: float) -> Usage:
        """Return what was used since the last reading and is in no group, step or evaluation.

        `sandbox_cpu_s` is what the job's sandboxes have used so far in this run.
        """
        usage = Usage(
            device_s=self.device_s - self._read_device_s,
            sandbox_cpu_s=sandbox_cpu_s - self._read_cpu_s,
        )
        self._read_device_s, self._read_cpu_s = self.device_s, sandbox_cpu_s
        return usage

    def why_capped(self) -> str:
        """Return which cap of its own the job has reached, or nothing."""
        return why_capped(self._spec, self.tokens, self.device_s)


def why_capped(spec: JobSpec, tokens: int, device_s: float) -> str:
    """Return which cap a job reaches with what it has used, or nothing."""
    if 0 < spec.max_job_tokens <= tokens:
        return f"its cap of {spec.max_job_tokens} tokens is reached"
    if 0 < spec.max_device_s <= device_s:
        return f"its cap of {spec.max_device_s:g} device seconds is reached"
    return ""


def why_full(used: int, limit: int | None) -> str:
    """Return that a tenant's storage is full, or nothing."""
    if limit is None or used < limit:
        return ""
    return f"{used} of {limit} bytes are stored; delete jobs or uploads"


@dataclass
class Today:
    """What a tenant has used on one UTC day."""

    day: int
    """Since the epoch."""
    tokens: int = 0
    sandbox_cpu_s: float = 0.0


@dataclass
class Held:
    """Tokens of one tenant that groups in flight will take, by job and index."""

    sampling: dict[tuple[JobId, int], int] = field(default_factory=dict)
    """Predicted: groups that are being sampled."""
    training: dict[tuple[JobId, int], int] = field(default_factory=dict)
    """Known: groups that wait for their step."""

    @property
    def tokens(self) -> int:
        return sum(self.sampling.values()) + sum(self.training.values())


class Tenants:
    """Weights and quotas in force, and what each tenant has used today.

    tenants.change([tenant])                          # at once, while jobs run
    await tenants.learn_today(store, "acme")          # before a job of a tenant runs
    tenants.use("acme", tokens=400)
    tenants.why_spent("acme", 400)                    # "its quota of ...", or empty: there is room
    """

    def __init__(self, weights: Mapping[TenantId, float]) -> None:
        self.weights: dict[TenantId, float] = dict(weights)
        """Share of the machine relative to other tenants; 1 if not named."""
        self._quotas: dict[TenantId, Quotas] = {}
        self._today: dict[TenantId, Today] = {}
        self._held: dict[TenantId, Held] = {}
        self._learned: set[TenantId] = set()
        """Tenants whose use before this server began is counted in."""
        self._day_end: asyncio.TimerHandle | None = None
        self._at_day_end: list[Callable[[], None]] = []
        self._waiting: list[asyncio.Future[None]] = []
        """Of whoever waits until its tenant may use tokens again."""

    def change(self, tenants: Iterable[Tenant]) -> None:
        """Take over weights and quotas of the named tenants; the others keep theirs."""
        for tenant in tenants:
            self.weights[tenant.tenant_id] = tenant.weight
            self._quotas[tenant.tenant_id] = tenant.quotas
        self._wake_waiting()

    def weight(self, tenant_id: TenantId) -> float:
        return self.weights.get(tenant_id, 1.0)

    def quotas(self, tenant_id: TenantId) -> Quotas:
        return self._quotas.get(tenant_id, UNLIMITED)

    async def learn_today(self, store: AsyncStore, tenant_id: TenantId) -> None:
        """Ask the store, once a tenant, what was used today before this server began."""
        if tenant_id in self._learned:
            return
        day = _day()
        usage = await store.call(Store.usage, tenant_id, since_day=day_of(day * DAY_S))
        if tenant_id not in self._learned:  # two jobs may have asked at once
            self._learned.add(tenant_id)
            tokens = usage.sampled_tokens + usage.trained_tokens
            tokens += usage.evaluated_tokens + usage.served_tokens
            self.use(tenant_id, tokens=tokens, sandbox_cpu_s=usage.sandbox_cpu_s)

    def use(self, tenant_id: TenantId, *, tokens: int = 0, sandbox_cpu_s: float = 0.0) -> None:
        """Count what a tenant has used."""
        today = self._used(tenant_id)
        today.tokens += tokens
        today.sandbox_cpu_s += sandbox_cpu_s

    def forget_use(self, tenant_id: TenantId) -> None:
        """The tenant is gone: another one of its name begins with nothing used."""
        self._today.pop(tenant_id, None)
        self._learned.discard(tenant_id)

    def hold_sampling(self, spec: JobSpec, index: int, tokens: int) -> None:
        """A group is opened that may take so many tokens."""
        self._held.setdefault(spec.tenant, Held()).sampling[spec.job_id, index] = tokens

    def hold_training(self, spec: JobSpec, index: int, tokens: int) -> None:
        """A group waits for its step, which trains on so many tokens."""
        self.let_go(spec, [index])
        self._held.setdefault(spec.tenant, Held()).training[spec.job_id, index] = tokens

    def let_go(self, spec: JobSpec, indices: Iterable[int]) -> None:
        """Groups were lost or trained on: what they took is counted."""
        held = self._held.get(spec.tenant, Held())
        for index in indices:
            held.sampling.pop((spec.job_id, index), None)
            held.training.pop((spec.job_id, index), None)

    def let_go_of_all(self, spec: JobSpec) -> None:
        """A job does not run any more."""
        held = self._held.get(spec.tenant, Held())
        for tokens in (held.sampling, held.training):
            for key in [key for key in tokens if key[0] == spec.job_id]:
                del tokens[key]
        if not held.sampling and not held.training:
            self._held.pop(spec.tenant, None)

    def why_spent(self, tenant_id: TenantId, group_tokens: int = 0) -> str:
        """Return which daily quota leaves the tenant nothing for today, or nothing.

        With `group_tokens`: nothing for a group that may take so many. The first group of a day has
        room in any quota, or a job of large groups would never come to its end.
        """
        quotas = self.quotas(tenant_id)
        if quotas.tokens_a_day is None and quotas.sandbox_cpu_s_a_day is None:
            return ""
        today = self._used(tenant_id)
        if quotas.tokens_a_day is not None:
            spent = self._why_no_tokens(tenant_id, quotas.tokens_a_day, today, group_tokens)
            if spent:
                return spent
        limit_s = quotas.sandbox_cpu_s_a_day
        if limit_s is not None and today.sandbox_cpu_s >= limit_s:
            return f"the tenant's quota of {limit_s:g} sandbox CPU seconds a day is used up"
        return ""

    def _why_no_tokens(
        self, tenant_id: TenantId, quota: int, today: Today, group_tokens: int
    ) -> str:
        spent = f"the tenant's quota of {quota} tokens a day is used up"
        if today.tokens >= quota:
            return spent
        held = self._held.get(tenant_id, Held())
        is_first = today.tokens == 0 and not held.sampling
        left = max(0, quota - today.tokens - held.tokens)
        if group_tokens > left and not is_first:
            return f"{spent} but for {left}; a group may take {group_tokens}"
        return ""

    def check_tokens(self, tenant_id: TenantId) -> None:
        """Refuse what is not a job's and cannot wait for the next day.

        Raises:
            QuotaExceeded: the tenant has used up its tokens; says when the day ends.
        """
        if spent := self.why_no_tokens(tenant_id):
            raise QuotaExceeded(spent, _day_left_s())

    def why_no_tokens(self, tenant_id: TenantId) -> str:
        """Return that the tenant has used up its tokens, or nothing."""
        limit = self.quotas(tenant_id).tokens_a_day
        if limit is None or self._used(tenant_id).tokens < limit:
            return ""
        return f"the tenant's quota of {limit} tokens a day is used up; the day ends at 0:00 UTC"

    async def tokens_left(self, tenant_id: TenantId) -> None:
        """Return once the tenant may use tokens: the day has ended, or its quota was raised."""
        while self.why_no_tokens(tenant_id):
            more: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(more)
            self.at_day_end(self._wake_waiting)
            await more

    def at_day_end(self, wake: Callable[[], None]) -> None:
        """Call `wake` once the UTC day has ended; the same one only once."""
        if wake not in self._at_day_end:
            self._at_day_end.append(wake)
        if self._day_end is None:
            self._day_end = asyncio.get_running_loop().call_later(_day_left_s(), self._end_day)

    def stop(self) -> None:
        """No call waits any more."""
        if self._day_end is not None:
            self._day_end.cancel()
            self._day_end = None
        self._at_day_end.clear()

    def _end_day(self) -> None:
        self._day_end = None
        wakes, self._at_day_end = self._at_day_end, []
        for wake in wakes:
            wake()

    def _wake_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for more in waiting:
            if not more.done():
                more.set_result(None)

    def _used(self, tenant_id: TenantId) -> Today:
        today = self._today.get(tenant_id)
        if today is None or today.day != _day():
            today = self._today[tenant_id] = Today(_day())
        return today


def _day() -> int:
    return floor(runtime.wall_time_s() / DAY_S)


def _day_left_s() -> float:
    return (_day() + 1) * DAY_S - runtime.wall_time_s()
