"""What must hold after any simulated history, whatever went wrong in it."""

from collections import Counter
from itertools import pairwise

from marlaas.loop.controller import Mode
from marlaas.store.db import GroupState, Store
from marlaas.types import JOB_MOVES, EventKind, JobSpec, JobState, TenantId, Usage
from tests.sim.simulation import Outcome, Plan


def check(plan: Plan, outcome: Outcome) -> None:
    """Check every job of a plan that was run to its end."""
    for spec in outcome.specs:
        stored = outcome.store.job(spec.tenant, spec.name)
        assert stored.state.is_terminal
        if stored.state is JobState.CANCELLED:
            assert plan.acts
        elif stored.state is not JobState.DONE:
            # Environments may fail so often that a job gives up, and for no other reason.
            assert spec.env["fail_rate"] and "no verdict" in stored.reason, stored.reason
        check_versions(outcome.store, spec)
        check_groups(outcome.store, spec)
        check_staleness(plan, outcome.store, spec)
        check_hashes(outcome.store, spec)
        check_evaluations(outcome.store, spec)
        check_files(outcome.store, spec)
        check_usage(outcome, spec)
        check_moves(outcome.store, spec)
        check_fork(outcome, spec)
    for tenant_id in {spec.tenant for spec in plan.specs}:
        check_events(outcome.store, tenant_id)
    check_nothing_is_left(outcome)


def check_versions(store: Store, spec: JobSpec) -> None:
    """Versions go up by one, without a gap, and stop where the job says."""
    steps = [record.step for record in store.steps(spec.tenant, spec.name)]
    assert steps == list(range(1, len(steps) + 1))
    stored = store.job(spec.tenant, spec.name)
    assert stored.step == len(steps) <= spec.steps
    if stored.state is JobState.DONE and not spec.stop_at_success:
        assert len(steps) == spec.steps
    versions = [row.version for row in store.versions(spec.tenant, spec.name)]
    never_began = stored.state is JobState.CANCELLED and versions == []
    assert versions == [0, *steps] or never_began


def check_groups(store: Store, spec: JobSpec) -> None:
    """Every group that a step consumed was trained on once, or dropped with a reason."""
    records = store.steps(spec.tenant, spec.name)
    consumed = Counter(index for record in records for index in record.group_indices)
    assert all(count == 1 for count in consumed.values())
    for record in records:
        assert len(record.group_indices) == spec.prompts_per_step
    rows = {row.index: row for row in store.groups(spec.tenant, spec.name)}
    for index in consumed:
        row = rows[index]
        assert row.state in (GroupState.TRAINED, GroupState.DROPPED)
        assert bool(row.reason) == (row.state is GroupState.DROPPED)
        assert row.step is not None and index in records[row.step - 1].group_indices
        assert len(row.group.trajectories) == spec.group_size
    for index, row in rows.items():
        if index not in consumed:
            assert row.state in (GroupState.OPEN, GroupState.FINISHED)
    if len(records) == spec.steps:
        assert sorted(consumed) == list(range(spec.steps * spec.prompts_per_step))


def check_staleness(plan: Plan, store: Store, spec: JobSpec) -> None:
    """No token is older than the bound when it is trained on; seeded lags are exact."""
    bound = 0 if plan.mode is Mode.LOCKSTEP else spec.max_staleness
    for row in store.groups(spec.tenant, spec.name):
        if row.step is None:
            continue
        trained_at = row.step - 1
        for trajectory in row.group.trajectories:
            if trajectory.min_version is not None:
                assert 0 <= trained_at - trajectory.min_version <= bound
                sampled = trajectory.versions[trajectory.loss_mask]
                assert (sampled >= trajectory.min_version).all()
        if spec.is_seeded:
            assert trained_at == row.index // spec.prompts_per_step
            assert row.version == max(0, trained_at - bound)


def check_hashes(store: Store, spec: JobSpec) -> None:
    """Every turn names the adapter that the store says its version is."""
    hashes = {row.version: row.adapter_hash for row in store.versions(spec.tenant, spec.name)}
    for row in store.groups(spec.tenant, spec.name):
        for trajectory in row.group.trajectories if row.group else ():
            for turn in trajectory.turns:
                assert turn.adapter_hash == hashes[turn.version]


def check_evaluations(store: Store, spec: JobSpec) -> None:
    """First and last version are judged on every held-out prompt."""
    evaluations = store.evaluations(spec.tenant, spec.name)
    stored = store.job(spec.tenant, spec.name)
    versions = [record.version for record in evaluations]
    assert versions == sorted(set(versions))
    if stored.state is JobState.DONE:
        assert {0, stored.step} <= set(versions)
    for record in evaluations:
        assert record.num_prompts == spec.eval_prompts


def check_files(store: Store, spec: JobSpec) -> None:
    """What the store says is kept is on disk, and nothing else."""
    folder = store.files.job(spec.tenant, spec.name) / "versions"
    newest = store.job(spec.tenant, spec.name).step
    for row in store.versions(spec.tenant, spec.name):
        on_disk = folder / f"v{row.version:06d}"
        assert (on_disk / "adapter").is_dir() >= row.has_adapter
        assert (on_disk / "state").is_file() >= row.has_state
        assert row.has_state == (row.version == newest and newest > 0)
    kept = {row.version for row in store.versions(spec.tenant, spec.name) if row.has_adapter}
    is_whole = store.job(spec.tenant, spec.name).state is not JobState.CANCELLED
    assert {0, newest} <= kept or not is_whole


def check_usage(outcome: Outcome, spec: JobSpec) -> None:
    """What a job is charged for is what its stored groups hold, to the token."""
    store = outcome.store
    usage = store.usage_by_job(spec.tenant).get(spec.name, Usage())
    groups = [row for row in store.groups(spec.tenant, spec.name) if row.group is not None]
    sampled = sum(int(t.loss_mask.sum()) for row in groups for t in row.group.trajectories)
    trained = sum(
        len(t.tokens)
        for row in groups
        if row.state is GroupState.TRAINED
        for t in row.group.trajectories
    )
    assert (usage.sampled_tokens, usage.trained_tokens) == (sampled, trained)
    assert bool(usage.evaluated_tokens) >= bool(store.evaluations(spec.tenant, spec.name))
    # Device seconds are written after the step: a crash in between takes those of one step.
    is_done = store.job(spec.tenant, spec.name).state is JobState.DONE
    assert usage.device_s > 0 or not is_done or outcome.num_lives > 1


def check_moves(store: Store, spec: JobSpec) -> None:
    """States follow each other as `JOB_MOVES` allows; the last one is the one that is stored."""
    events = store.events(spec.tenant, job=spec.name, limit=10**6)
    states = [JobState(event.data["state"]) for event in events if event.kind is EventKind.STATE]
    assert states[0] is JobState.QUEUED
    for before, after in pairwise(states):
        assert after is before or after in JOB_MOVES[before]
    assert states[-1] is store.job(spec.tenant, spec.name).state


def check_events(store: Store, tenant_id: TenantId) -> None:
    """A tenant's history is numbered without a gap and has every step and evaluation."""
    events = store.events(tenant_id, limit=10**6)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    for stored in store.jobs(tenant_id):
        name = stored.spec.name
        steps = [e.data["step"] for e in events if e.job == name and e.kind is EventKind.STEP]
        assert steps == list(range(1, stored.step + 1))


def check_fork(outcome: Outcome, spec: JobSpec) -> None:
    """A fork begins with the weights of the version that it names."""
    store, fork = outcome.store, spec.fork
    own = store.versions(spec.tenant, spec.name)
    if fork is None or not own:
        return
    if any(other.name == fork.job for other in outcome.specs):
        source = store.versions(spec.tenant, fork.job)[fork.version]
        assert own[0].adapter_hash == source.adapter_hash


def check_nothing_is_left(outcome: Outcome) -> None:
    """Workers hold no policy and no sequence once every job has ended."""
    for worker in outcome.workers:
        assert worker.policies == {}
        assert worker.kept_sequences == set()
        assert worker.num_decoding == 0
