"""What is wrong with a store after many kills: `audit` of `bench crash`.

It is compared with itself, with what the client was told, and seeded jobs with a service that
nobody touched.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from marlaas.bench.crash_client import Job, Told
from marlaas.bench.crash_trial import Trial
from marlaas.loop.usage import sampled_tokens, trained_tokens
from marlaas.store.codec import encode
from marlaas.store.db import GroupState, Store
from marlaas.types import EventKind, JobState, TenantId, Usage


@dataclass(kw_only=True)
class Findings:
    """What is wrong with a store that a trial has left."""

    steps: dict[str, int] = field(default_factory=dict)
    """Of every job, as tenant/name."""
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    num_regenerated: int = 0
    num_compared: int = 0
    """Seeded jobs that were compared with an undisturbed one."""
    unlike: list[str] = field(default_factory=list)
    """Those that differ."""

    @property
    def is_seeded_identical(self) -> bool:
        return self.num_compared > 0 and not self.unlike

    @property
    def is_clean(self) -> bool:
        bad = [*self.lost, *self.doubled, *self.faults, *self.unlike]
        return not bad and not self.num_regenerated


def audit(struck: Trial, whole: Trial) -> Findings:
    """Compare what a trial left with what its client was told, and with an undisturbed trial."""
    findings = Findings(
        doubled=list(struck.told.doubled), faults=[*whole.told.faults, *struck.told.faults]
    )
    with suppress(FileNotFoundError):
        findings.num_regenerated = len(struck.server.record_file.read_text().splitlines())
    store, other = Store.open(struck.server.data), Store.open(whole.server.data)
    try:
        curves = {job.name: _curve(other, job) for job in whole.jobs}
        for job in struck.jobs:
            _check_job(findings, store, struck.told, job)
            if job.words["seeded"]:
                findings.num_compared += 1
                if _curve(store, job) != curves[job.name]:
                    findings.unlike.append(str(job))
        for tenant in {job.tenant for job in struck.jobs}:
            _check_events(findings, store, TenantId(tenant))
    finally:
        store.close()
        other.close()
    return findings


def _check_job(findings: Findings, store: Store, told: Told, job: Job) -> None:
    tenant_id, name = TenantId(job.tenant), job.name
    stored = store.job(tenant_id, name)
    if stored.state is not JobState.DONE:
        findings.faults.append(f"{job} is {stored.state}: {stored.reason}")
    records = {record.step: record for record in store.steps(tenant_id, name)}
    findings.steps[str(job)] = len(records)
    if sorted(records) != list(range(1, job.words["steps"] + 1)):
        findings.faults.append(f"{job} has steps {sorted(records)}")
    for (tenant, other, step), data in told.steps.items():
        if (tenant, other) == (job.tenant, name) and (
            step not in records or records[step].elapsed_s != data["elapsed_s"]
        ):
            findings.lost.append(f"{job} step {step}")
    trained = Counter(index for record in records.values() for index in record.group_indices)
    findings.doubled += [f"{job} group {index}" for index, n in trained.items() if n > 1]
    _check_groups(findings, store, job, trained)


def _check_groups(findings: Findings, store: Store, job: Job, trained: Mapping[int, int]) -> None:
    """Check that each trained group is there, and that usage is what is stored, to the token."""
    tenant_id, name = TenantId(job.tenant), job.name
    rows = [(row, row.group) for row in store.groups(tenant_id, name) if row.group is not None]
    done = {row.index for row, _ in rows if row.step is not None}
    if done != set(trained):
        findings.faults.append(f"{job}: groups {sorted(done ^ set(trained))} and steps disagree")
    sampled = sum(sampled_tokens(group) for _, group in rows)
    dropped = {row.index: row.reason for row, _ in rows if row.state is not GroupState.TRAINED}
    tokens = trained_tokens([group for _, group in rows], dropped)
    usage = store.usage_by_job(tenant_id).get(name, Usage())
    if (usage.sampled_tokens, usage.trained_tokens) != (sampled, tokens):
        findings.faults.append(f"{job}: usage {usage}, stored are {sampled} and {tokens} tokens")


def _check_events(findings: Findings, store: Store, tenant_id: TenantId) -> None:
    """Check that a tenant's history has no gap and each step once, in order."""
    events = store.events(tenant_id, limit=10**6)
    if [event.seq for event in events] != list(range(1, len(events) + 1)):
        findings.faults.append(f"{tenant_id}: events are not numbered 1, 2, 3, ...")
    steps: dict[str, list[object]] = {}
    for event in events:
        if event.kind is EventKind.STEP:
            steps.setdefault(event.job, []).append(event.data["step"])
    for job, numbers in steps.items():
        if numbers != list(range(1, len(numbers) + 1)):
            findings.faults.append(f"{tenant_id}/{job}: history has steps {numbers}")


def _curve(store: Store, job: Job) -> list[bytes]:
    """Return all that a seed decides of a job, as bytes: a metric may be NaN."""
    key = (TenantId(job.tenant), job.name)
    records = [*store.steps(*key), *store.evaluations(*key)]
    return [encode(replace(record, elapsed_s=0.0)) for record in records]
