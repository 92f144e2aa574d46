"""What an operator watches: Prometheus metrics by stage and tenant, and a trace for Perfetto.

    loop ─► Telemetry (a JobObserver) ─┬─► counters, histograms ─► GET /metrics
    workers ─► WorkerStats ────────────┤
    requests ─► RequestLog ────────────┘─► ring of spans ─► GET /v1/trace

- Label sets are bounded: after `MAX_TENANTS` tenants the next ones are counted as "other"; a route
  is its template, never a path.
- What the store knows (jobs by state) is asked when somebody scrapes, not kept twice.
"""

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from marlaas import runtime
from marlaas.types import (
    EvalRecord,
    Group,
    JobId,
    JobSpec,
    JobState,
    Notice,
    StepRecord,
    WorkerStats,
)

MAX_TENANTS = 200
"""Tenants with label values of their own."""

REQUEST_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
STAGE_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
ENVIRONMENT_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


# ---------------------------------------------------------------------------------------------
# The trace


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, on the clock of the event loop."""

    name: str
    """The stage: `rollout`, `train`, `publish`, `request`, ..."""
    process: str
    """Row group in the viewer: a worker, or the server."""
    thread: str
    """Row in it: a tenant's job."""
    began_s: float
    ended_s: float
    detail: Mapping[str, object]


class Trace:
    """The newest spans, as a ring: adding one costs nothing that grows."""

    def __init__(self, max_spans: int) -> None:
        self._spans: deque[Span] = deque(maxlen=max_spans)

    def add(self, span: Span) -> None:
        self._spans.append(span)

    def last(self, seconds: float) -> list[Span]:
        """Return the spans that ended in the last seconds."""
        since_s = runtime.now_s() - seconds
        return [span for span in self._spans if span.ended_s >= since_s]

    @staticmethod
    def document(spans: Sequence[Span]) -> bytes:
        """Return spans in Chrome's trace format.

        Source: the Trace Event Format, complete events ("X") and metadata events ("M"), which
        Perfetto and chrome://tracing open.
        """
        processes: dict[str, int] = {}
        threads: dict[tuple[str, str], int] = {}
        events: list[dict[str, object]] = []
        for span in spans:
            pid = processes.setdefault(span.process, len(processes) + 1)
            tid = threads.setdefault((span.process, span.thread), len(threads) + 1)
            events.append(
                {
                    "name": span.name,
                    "ph": "X",
                    "ts": round(span.began_s * 1e6),
                    "dur": max(1, round((span.ended_s - span.began_s) * 1e6)),
                    "pid": pid,
                    "tid": tid,
                    "args": dict(span.detail),
                }
            )
        events += [_named("process_name", pid, 0, name) for name, pid in processes.items()]
        events += [
            _named("thread_name", processes[process], tid, thread)
            for (process, thread), tid in threads.items()
        ]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


# ---------------------------------------------------------------------------------------------
# Metrics and the observer


class Telemetry:
    """Hears of everything and remembers the sums; one a service.

    The loop calls it as a `JobObserver`, the request log calls `request_done`.
    """

    def __init__(self, *, max_spans: int = 50_000) -> None:
        self.trace = Trace(max_spans)
        self.registry = CollectorRegistry()
        self._tenants: set[str] = set()
        self._workers: tuple[WorkerStats, ...] = ()
        self._standing: dict[tuple[JobId, str], Notice] = {}
        self.requests = self._counter(
            "marlaas_http_requests", "Requests by route and status", "route", "method", "status"
        )
        self.request_seconds = Histogram(
            "marlaas_http_request_seconds",
            "Time from a request's first byte to its answer's last; streams excluded",
            ["route"],
            buckets=REQUEST_BUCKETS_S,
            registry=self.registry,
        )
        self._moves = self._counter(
            "marlaas_job_moves", "Jobs that came into a state", "tenant", "state"
        )
        self._steps = self._counter(
            "marlaas_steps", "Optimizer steps committed", "tenant", "outcome"
        )
        self._trajectories = self._counter(
            "marlaas_trajectories", "Finished trajectories by how they ended", "tenant", "end"
        )
        self._tokens = self._counter(
            "marlaas_tokens", "Tokens by stage: sampled, trained", "tenant", "stage"
        )
        self._evaluations = self._counter("marlaas_evaluations", "Versions judged", "tenant")
        self._environment_seconds = Histogram(
            "marlaas_environment_seconds",
            "Time that an environment took to answer a turn",
            ["tenant"],
            buckets=ENVIRONMENT_BUCKETS_S,
            registry=self.registry,
        )
        self._stage_seconds = Histogram(
            "marlaas_stage_seconds",
            "Time in a stage of the loop",
            ["stage", "tenant"],
            buckets=STAGE_BUCKETS_S,
            registry=self.registry,
        )
        self._notices = self._counter(
            "marlaas_notices", "Things that made no progress for too long", "stage", "tenant"
        )
        self.registry.register(_Machine(self))

    @property
    def workers(self) -> tuple[WorkerStats, ...]:
        """What the workers last said."""
        return self._workers

    @property
    def notices(self) -> list[Notice]:
        """What makes no progress now."""
        return list(self._standing.values())

    def exposition(self, gauges: Iterable[Metric] = ()) -> bytes:
        """Return everything in Prometheus' text format, with gauges measured just now."""
        beside = CollectorRegistry()
        beside.register(_Given(gauges))
        return generate_latest(self.registry) + generate_latest(beside)

    def tenant_label(self, tenant: str) -> str:
        """Return the label value for a tenant."""
        if tenant not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                return "other"
            self._tenants.add(tenant)
        return tenant

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(name, words, labels, registry=self.registry)

    # The loop's observer ----------------------------------------------------------------------

    def job_state(self, spec: JobSpec, state: JobState, reason: str) -> None:
        self._moves.labels(self.tenant_label(spec.tenant), state.value).inc()
        if state is not JobState.RUNNING:
            for key in [key for key in self._standing if key[0] == spec.job_id]:
                del self._standing[key]

    def step_done(self, spec: JobSpec, record: StepRecord) -> None:
        tenant = self.tenant_label(spec.tenant)
        outcome = "vetoed" if record.is_vetoed else "empty" if record.is_empty else "updated"
        self._steps.labels(tenant, outcome).inc()
        self._tokens.labels(tenant, "trained").inc(record.metrics.get("tokens_trained", 0.0))

    def eval_done(self, spec: JobSpec, record: EvalRecord) -> None:
        self._evaluations.labels(self.tenant_label(spec.tenant)).inc()

    def group_done(self, spec: JobSpec, group: Group) -> None:
        tenant = self.tenant_label(spec.tenant)
        for trajectory in group.trajectories:
            self._trajectories.labels(tenant, trajectory.end.value).inc()
            self._tokens.labels(tenant, "sampled").inc(int(trajectory.loss_mask.sum()))
            for turn in trajectory.turns:
                self._environment_seconds.labels(tenant).observe(turn.latency_s)

    def notice(self, spec: JobSpec, notice: Notice) -> None:
        if notice.since_s == 0:  # it goes on again
            self._standing.pop((spec.job_id, notice.stage), None)
            return
        self._standing[spec.job_id, notice.stage] = notice
        self._notices.labels(notice.stage, self.tenant_label(spec.tenant)).inc()

    def workers_seen(self, stats: Sequence[WorkerStats]) -> None:
        self._workers = tuple(stats)

    def stage_done(self, spec: JobSpec, stage: str, worker: str, began_s: float, what: str) -> None:
        """A stage of a job took from `began_s` until now. Called as a `StageListener`."""
        ended_s = runtime.now_s()
        self._stage_seconds.labels(stage, self.tenant_label(spec.tenant)).observe(ended_s - began_s)
        row = f"{spec.tenant}/{spec.name} {stage}"
        self.trace.add(Span(stage, worker, row, began_s, ended_s, {"what": what}))

    # Requests ---------------------------------------------------------------------------------

    def request_done(
        self, *, route: str, method: str, status: int, tenant: str, began_s: float, is_stream: bool
    ) -> None:
        """A request was answered."""
        ended_s = runtime.now_s()
        self.requests.labels(route, method, str(status)).inc()
        if not is_stream:
            self.request_seconds.labels(route).observe(ended_s - began_s)
            row = tenant or "no key"
            detail = {"method": method, "status": status}
            self.trace.add(Span(route, "server", row, began_s, ended_s, detail))


class _Given(Collector):
    """Hands out gauges that somebody else has measured."""

    def __init__(self, gauges: Iterable[Metric]) -> None:
        self._gauges = list(gauges)

    def collect(self) -> Iterable[Metric]:
        return self._gauges


class _Machine(Collector):
    """The workers and this process, read when somebody scrapes."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterable[Metric]:
        busy = CounterMetricFamily(
            "marlaas_worker_busy_seconds", "Time of a worker by kind", labels=["worker", "kind"]
        )
        elapsed = CounterMetricFamily(
            "marlaas_worker_elapsed_seconds", "Time since a worker's start", labels=["worker"]
        )
        tokens = CounterMetricFamily(
            "marlaas_worker_tokens", "Tokens processed by kind", labels=["worker", "kind"]
        )
        sequences = GaugeMetricFamily(
            "marlaas_worker_sequences", "Sequences by where they are", labels=["worker", "place"]
        )
        kv = GaugeMetricFamily(
            "marlaas_worker_kv_tokens", "KV tokens: used, capacity", labels=["worker", "what"]
        )
        memory = GaugeMetricFamily("marlaas_rss_bytes", "Resident memory", labels=["process"])
        memory.add_metric(["server"], runtime.rss_bytes())
        cpu = CounterMetricFamily("marlaas_server_cpu_seconds", "CPU time of the server process")
        cpu.add_metric([], runtime.cpu_s())
        for stats in self._telemetry.workers:
            for kind, seconds in stats.busy_s.items():
                busy.add_metric([stats.name, kind], seconds)
            for kind, count in stats.tokens.items():
                tokens.add_metric([stats.name, kind], count)
            elapsed.add_metric([stats.name], stats.elapsed_s)
            sequences.add_metric([stats.name, "decoding"], stats.num_decoding)
            sequences.add_metric([stats.name, "waiting"], stats.num_waiting)
            sequences.add_metric([stats.name, "parked"], stats.num_parked)
            kv.add_metric([stats.name, "used"], stats.kv_tokens)
            kv.add_metric([stats.name, "capacity"], stats.kv_capacity_tokens)
            memory.add_metric([stats.name], stats.rss_bytes)
        return [busy, elapsed, tokens, sequences, kv, memory, cpu]


def gauge(name: str, words: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a gauge with one label, measured just now."""
    family = GaugeMetricFamily(name, words, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
