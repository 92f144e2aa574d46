"""What can be said of an active job now: why it waits, its place, when it starts and ends.

Everything is read from memory. A running job's end is judged by the pace of its steps, before the
first by its predicted device time; a waiting job starts when a place comes free, in the order of
the roster. A job that stands still has no end that could be foretold, nor has what waits for its
place. Estimates of the whole queue are made anew at most once a second, however many ask.
"""

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isinf

from marlaas import runtime
from marlaas.loop.fairness import TokenCounts
from marlaas.loop.job import Job
from marlaas.loop.jobs import Roster, Seat
from marlaas.loop.policies import Placement
from marlaas.loop.usage import Tenants
from marlaas.loop.watchdog import Watchdog
from marlaas.types import JobId, JobSpec, JobStatus, TenantId

REFRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class Span:
    """When a job is expected to start and end, in seconds from when it was estimated; infinite if
    that is behind a job that stands still."""

    starts_in_s: float
    ends_in_s: float


class StatusBoard:
    """Answers for every active job; a job that is not active has nothing to say.

    board = StatusBoard(roster, jobs, placement, tenants, watchdog)
    board.status("acme/sums").waits_for          # "the server runs 64 jobs, as many as it may"
    """

    def __init__(
        self,
        roster: Roster,
        jobs: Mapping[JobId, Job],
        placement: Placement,
        tenants: Tenants,
        watchdog: Watchdog,
    ) -> None:
        self._roster = roster
        self._jobs = jobs
        self._placement = placement
        self._tenants = tenants
        self._watchdog = watchdog
        self._spans: dict[JobId, Span] = {}
        self._spans_s = -REFRESH_S

    def status(self, job_id: JobId) -> JobStatus:
        """Return what there is to say of a job."""
        seat = self._roster.get(job_id)
        if seat is None:
            return JobStatus()
        job = self._jobs.get(job_id)
        if job is not None and seat.end is not None:
            stuck = self._why_stuck(job)
            return JobStatus(
                waits_for="it is being ended" if seat.is_ending else stuck,
                ends_in_s=None if stuck else self._left_s(job),
                device_s=job.meter.device_s,
            )
        if seat.end is not None:
            words = "it is being ended" if seat.is_ending else "it is being started"
            return JobStatus(waits_for=words, device_s=seat.used.device_s)
        span = self._span(job_id)
        return JobStatus(
            waits_for=self._roster.why_waits(seat),
            place=self._roster.places()[job_id],
            starts_in_s=None if span is None else _finite(span.starts_in_s),
            ends_in_s=None if span is None else _finite(span.ends_in_s),
            device_s=seat.used.device_s,
        )

    def _why_stuck(self, job: Job) -> str:
        """Return why a running job makes no progress, or nothing if it does."""
        spent = self._tenants.why_spent(job.spec.tenant, job.next_tokens)
        if spent:
            return f"{spent}; it goes on at 00:00 UTC"
        notices = self._watchdog.notices(job.spec.job_id)
        if not notices and not job.is_open:
            return f"its policy is being loaded on {job.policy.station.worker.name}"
        return "; ".join(f"{one.stage}: {one.cause}, for {one.since_s:.0f} s" for one in notices)

    def _stands_still(self, job: Job) -> bool:
        """Return whether a running job waits for something of which nobody knows when it comes."""
        is_spent = bool(self._tenants.why_spent(job.spec.tenant, job.next_tokens))
        return is_spent or bool(self._watchdog.notices(job.spec.job_id))

    # Estimates --------------------------------------------------------------------------------

    def _left_s(self, job: Job) -> float | None:
        """Return how long a running job is expected to run on."""
        steps_left = job.spec.steps - job.buffer.version
        if job.pace_s is not None:
            since_s = runtime.now_s() - job.stepped_s
            return max(0.0, steps_left * job.pace_s - since_s)
        costs = job.policy.station.costs
        if not costs.is_measured:
            return None
        group_s = costs.predict_s(job.spec.job_id)
        return steps_left * job.spec.prompts_per_step * group_s * self._num_sharing()

    def _length_s(self, seat: Seat) -> float | None:
        """Return how long a waiting job is expected to run."""
        costs = self._placement.stations[0].costs
        if not costs.is_measured:
            return None
        group_s = costs.seconds(TokenCounts.guess(seat.spec, max_turns=1))
        steps_left = seat.spec.steps - seat.step
        return steps_left * seat.spec.prompts_per_step * group_s * self._num_sharing()

    def _num_sharing(self) -> float:
        """Return how many jobs share one worker."""
        return max(1.0, self._roster.num_running / len(self._placement.stations))

    def _span(self, job_id: JobId) -> Span | None:
        if runtime.now_s() - self._spans_s >= REFRESH_S:
            self._spans, self._spans_s = self._estimate(), runtime.now_s()
        return self._spans.get(job_id)

    def _estimate(self) -> dict[JobId, Span]:
        """Let the waiting jobs start in order, each as soon as a running one has ended, and one of
        its own tenant where its quota asks for that; without an estimate for one, for none."""
        ends: list[float] = []
        ends_of: dict[TenantId, list[float]] = {}
        for seat in self._roster.running():
            job = self._jobs.get(seat.spec.job_id)
            left_s = self._length_s(seat) if job is None else self._left_s(job)
            if job is not None and self._stands_still(job):
                left_s = inf
            if left_s is None:
                return {}
            heapq.heappush(ends, left_s)
            heapq.heappush(ends_of.setdefault(seat.spec.tenant, []), left_s)
        spans: dict[JobId, Span] = {}
        num_running = Counter({tenant: len(own) for tenant, own in ends_of.items()})
        for seat in self._roster.queued():
            length_s = self._length_s(seat)
            if length_s is None:
                return {}
            starts_s = self._earliest(seat.spec, ends, ends_of, num_running)
            if starts_s is None:
                continue
            ends_s = starts_s + length_s
            if self._tenants.why_spent(seat.spec.tenant):
                ends_s = inf
            heapq.heappush(ends, ends_s)
            heapq.heappush(ends_of.setdefault(seat.spec.tenant, []), ends_s)
            spans[seat.spec.job_id] = Span(starts_s, ends_s)
        return spans

    def _earliest(
        self,
        spec: JobSpec,
        ends: list[float],
        ends_of: dict[TenantId, list[float]],
        num_running: Counter[TenantId],
    ) -> float | None:
        """Return when a place comes free for the next waiting job, and take it; None: never."""
        quota = self._tenants.quotas(spec.tenant).max_running_jobs
        if quota == 0:
            return None
        starts_s = heapq.heappop(ends) if len(ends) >= self._roster.max_running else 0.0
        if quota is None:
            return starts_s
        if num_running[spec.tenant] < quota:
            num_running[spec.tenant] += 1
            return starts_s
        return max(starts_s, heapq.heappop(ends_of[spec.tenant]))


def _finite(seconds: float) -> float | None:
    return None if isinf(seconds) else seconds
