"""Jobs from submission to their end, on fake workers under virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from marlaas import runtime
from marlaas.envs.base import EnvStep
from marlaas.errors import Conflict, EnvironmentFailure, FailureKind, InvalidRequest
from marlaas.loop.controller import Controller, LoopSettings, Mode
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import GroupState, Store
from marlaas.types import EventKind, JobSpec, JobState, Latency, Prompt, TrajectoryEnd
from tests.fakes import (
    ByteTokenizer,
    FakeWorker,
    Recorder,
    ScriptedEnv,
    ScriptedFamily,
    Speed,
    family_of,
    job,
)

Script = Callable[["Run"], Coroutine[None, None, None]]


class Run:
    """One controller over fake workers on a store, run to its end under virtual time."""

    def __init__(
        self,
        root: Path,
        *specs: JobSpec,
        workers: Callable[[], list[FakeWorker]] = lambda: [FakeWorker()],
        script: Script | None = None,
        mode: Mode = Mode.ASYNC,
        settings: LoopSettings | None = None,
        make_family: Callable[[JobSpec], ScriptedFamily] = family_of,
    ) -> None:
        self._make_family = make_family
        self.store = Store(root)
        self.recorder = Recorder()
        self.elapsed_s = 0.0
        self._specs, self._script, self._mode, self._settings = specs, script, mode, settings
        runtime.run_virtual(self._main(workers))

    async def _main(self, workers: Callable[[], list[FakeWorker]]) -> None:
        self.workers = workers()
        self.controller = Controller(
            AsyncStore(self.store, is_threaded=False), self.workers, ByteTokenizer(),
            make_family=self._make_family, observer=self.recorder, mode=self._mode,
            settings=self._settings,
        )  # fmt: skip
        for spec in self._specs:
            await self.controller.submit(spec)
        script = asyncio.create_task(self._script(self)) if self._script else None
        async with asyncio.timeout(1e6):
            await self.controller.run()
        self.elapsed_s = runtime.now_s()
        if script is not None:
            await script

    def state(self, spec: JobSpec) -> tuple[JobState, str]:
        stored = self.store.job(spec.tenant, spec.name)
        return stored.state, stored.reason

    def steps(self, spec: JobSpec) -> list:
        return self.store.steps(spec.tenant, spec.name)

    def evaluations(self, spec: JobSpec) -> list:
        return self.store.evaluations(spec.tenant, spec.name)

    def trajectories(self, spec: JobSpec) -> list:
        rows = self.store.groups(spec.tenant, spec.name)
        return [t for row in rows if row.group for t in row.group.trajectories]


class EndlessFamily(ScriptedFamily):
    """Its environments take all of their time limit and are cut."""

    def make(self, prompt: Prompt, num_envs: int) -> list[ScriptedEnv]:
        return [EndlessEnv(self, prompt, index) for index in range(num_envs)]


class EndlessEnv(ScriptedEnv):
    async def step(self, reply: str, *, is_last: bool) -> EnvStep:
        await asyncio.sleep(5.0)
        raise EnvironmentFailure(FailureKind.TIMEOUT, "reward took longer than 5 s")


def timing_out(spec: JobSpec) -> ScriptedFamily:
    return EndlessFamily() if spec.name == "endless" else family_of(spec)


# ---------------------------------------------------------------------------------------------
# Learning


def test_a_job_learns_to_its_end(tmp_path: Path) -> None:
    spec = job(steps=30)
    run = Run(tmp_path, spec)
    assert run.state(spec) == (JobState.DONE, "")
    records = run.steps(spec)
    assert [record.step for record in records] == list(range(1, 31))
    assert [record.version for record in run.evaluations(spec)] == [0, 30]
    rewards = [record.metrics["reward_mean"] for record in records]
    assert np.mean(rewards[-8:]) > np.mean(rewards[:8]) + 0.1


def test_observers_hear_every_event_in_order(tmp_path: Path) -> None:
    spec = job(steps=3, eval_every=1)
    heard = Run(tmp_path, spec).recorder
    assert [state for _, state, _ in heard.states] == [JobState.RUNNING, JobState.DONE]
    assert [record.step for _, record in heard.steps] == [1, 2, 3]
    assert sorted(record.version for _, record in heard.evaluations) == [0, 1, 2, 3]
    assert sorted(group.index for _, group in heard.groups) == list(range(6))


def test_a_kl_term_gets_reference_logprobs(tmp_path: Path) -> None:
    """The fake trainer refuses data without references under a KL term, and with them otherwise."""
    spec = job(algorithm={"preset": "grpo", "kl_coef": 0.1}, steps=2)
    run = Run(tmp_path, spec)
    assert run.state(spec) == (JobState.DONE, "")


def test_jobs_that_cannot_be_made_are_refused_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        store = Store(tmp_path)
        controller = Controller(
            AsyncStore(store, is_threaded=False), [FakeWorker()], ByteTokenizer(),
            make_family=family_of,
        )  # fmt: skip
        with pytest.raises(InvalidRequest, match="unknown preset"):
            await controller.submit(job(algorithm={"preset": "magic"}))
        await controller.submit(job())
        await controller.submit(job())
        with pytest.raises(Conflict):
            await controller.submit(job(steps=7))
        assert len(store.all_jobs()) == 1

    runtime.run_virtual(main())


def test_a_job_may_be_submitted_while_others_run(tmp_path: Path) -> None:
    late = job("late", steps=2)

    async def script(run: Run) -> None:
        await asyncio.sleep(1.0)
        await run.controller.submit(late)

    run = Run(tmp_path, job(steps=20), script=script)
    assert run.state(late) == (JobState.DONE, "")


# ---------------------------------------------------------------------------------------------
# Stages that do not wait for each other

SLOW_TOOL = {"tool_s": 2.0}


def test_other_tenants_fill_the_hole_that_a_tool_leaves(tmp_path: Path) -> None:
    specs = [job(f"j{i}", tenant=f"t{i}", env=SLOW_TOOL, max_staleness=0) for i in range(8)]
    one = Run(tmp_path / "one", specs[0]).elapsed_s
    eight = Run(tmp_path / "eight", *specs).elapsed_s
    assert eight < 2 * one


def test_lockstep_runs_one_job_after_another_on_policy(tmp_path: Path) -> None:
    specs = [job(f"j{i}", env=SLOW_TOOL, eval_every=2) for i in range(3)]
    together = Run(tmp_path / "lockstep", *specs, mode=Mode.LOCKSTEP)
    alone = Run(tmp_path / "alone", specs[0], mode=Mode.LOCKSTEP)
    assert together.elapsed_s == pytest.approx(3 * alone.elapsed_s, rel=0.1)
    order = [job_id for job_id, _ in together.recorder.steps]
    assert order == sorted(order)
    for spec in specs:
        assert all(record.metrics["staleness_max"] == 0 for record in together.steps(spec))
    events = [job_id for job_id, _ in together.recorder.evaluations]
    assert len(events) == 3 * 4


@pytest.mark.parametrize("tail", [0.0, 1.1])
@pytest.mark.parametrize("turns", [1, 3])
def test_a_lone_job_is_not_slower_than_lockstep(tmp_path: Path, tail: float, turns: int) -> None:
    spec = job(env={"tool_s": 0.5, "tail": tail, "max_turns": turns}, steps=20)
    lockstep = Run(tmp_path / "lockstep", spec, mode=Mode.LOCKSTEP).elapsed_s
    overlapped = Run(tmp_path / "async", spec).elapsed_s
    assert overlapped < lockstep


def test_jobs_spread_over_workers(tmp_path: Path) -> None:
    specs = [job(f"j{i}", steps=10) for i in range(4)]
    speed = Speed(max_decoding=4)
    one = Run(tmp_path / "1", *specs, workers=lambda: [FakeWorker(speed=speed)])
    two = Run(
        tmp_path / "2", *specs,
        workers=lambda: [FakeWorker(name, speed=speed) for name in ("a", "b")],
    )  # fmt: skip
    assert two.elapsed_s < 0.65 * one.elapsed_s


def test_evaluation_does_not_block_training(tmp_path: Path) -> None:
    spec = job(eval_every=1, eval_prompts=200, steps=6)
    heard = Run(tmp_path, spec).recorder
    first_eval_s = heard.evaluations[0][1].elapsed_s
    assert heard.steps[2][1].elapsed_s < first_eval_s
    assert {record.version for _, record in heard.evaluations} == set(range(7))


def test_latency_of_the_job_is_waited_for(tmp_path: Path) -> None:
    quick = Run(tmp_path / "quick", job(steps=2)).elapsed_s
    slow = Run(tmp_path / "slow", job(steps=2, latency=Latency(median_s=30.0, sigma=0.1)))
    assert slow.elapsed_s > quick + 30.0


def test_tenants_share_by_device_time_and_weight(tmp_path: Path) -> None:
    """Groups four times as large bring a tenant no more tokens; a double weight brings double."""
    specs = [
        job("small", tenant="a", steps=200, group_size=2, max_tokens=4, eval_prompts=1),
        job("large", tenant="b", steps=200, group_size=8, max_tokens=4, eval_prompts=1),
        job("heavy", tenant="c", steps=200, group_size=4, max_tokens=4, eval_prompts=1),
    ]
    sampled: dict[str, int] = {}

    async def script(run: Run) -> None:
        await asyncio.sleep(60.0)
        for spec in specs:
            groups = [g for job_id, g in run.recorder.groups if job_id == spec.job_id]
            sampled[spec.tenant] = sum(
                int(t.loss_mask.sum()) for group in groups for t in group.trajectories
            )
        run.controller.stop()

    Run(
        tmp_path, *specs, script=script, settings=LoopSettings(weights={"c": 2.0}),
        workers=lambda: [FakeWorker(speed=Speed(max_decoding=4, train_s=1e-5, token_s=0.02))],
    )  # fmt: skip
    assert sampled["a"] == pytest.approx(sampled["b"], rel=0.25)
    assert sampled["c"] == pytest.approx(2 * sampled["b"], rel=0.25)


# ---------------------------------------------------------------------------------------------
# Versions


def test_pinned_rollouts_keep_the_version_they_began_with(tmp_path: Path) -> None:
    spec = job(env={"tool_s": 3.0, "tail": 1.1, "max_turns": 3}, steps=10)
    for trajectory in Run(tmp_path, spec).trajectories(spec):
        assert len(set(trajectory.versions[trajectory.loss_mask])) <= 1


def test_in_flight_rollouts_take_newer_versions_at_token_boundaries(tmp_path: Path) -> None:
    spec = job(env={"tool_s": 3.0, "tail": 1.1, "max_turns": 3}, steps=10, is_in_flight=True)
    trajectories = Run(tmp_path, spec).trajectories(spec)
    sampled = [t.versions[t.loss_mask] for t in trajectories]
    assert any(len(set(versions)) > 1 for versions in sampled)
    assert all((np.diff(versions) >= 0).all() for versions in sampled)


def test_old_versions_are_retired_while_the_job_runs(tmp_path: Path) -> None:
    spec = job(steps=12, max_staleness=1)
    most_live = 0

    async def script(run: Run) -> None:
        nonlocal most_live
        while not run.recorder.evaluations or run.recorder.evaluations[-1][1].version != 12:
            policy = run.workers[0].policies.get(spec.policy_id)
            most_live = max(most_live, len(policy.live) if policy else 0)
            await asyncio.sleep(0.005)

    Run(tmp_path, spec, script=script)
    assert most_live <= spec.max_staleness + 2


def test_first_best_and_newest_adapters_are_kept(tmp_path: Path) -> None:
    spec = job(steps=12, keep_versions=2, eval_every=3)
    run = Run(tmp_path, spec)
    best = max(run.evaluations(spec), key=lambda record: record.success).version
    kept = {row.version for row in run.store.versions("acme", "say-y") if row.has_adapter}
    assert kept == {0, best, 11, 12}


# ---------------------------------------------------------------------------------------------
# Evaluation


def test_a_job_stops_once_an_evaluation_is_good_enough(tmp_path: Path) -> None:
    spec = job(steps=60, eval_every=1, stop_at_success=0.8, eval_prompts=32, learning_rate=10.0)
    run = Run(tmp_path, spec)
    assert run.state(spec) == (JobState.DONE, "")
    steps = len(run.steps(spec))
    assert steps < 60
    evaluations = run.evaluations(spec)
    assert max(record.success for record in evaluations) >= 0.8
    assert evaluations[-1].version == steps, "the version that it ends with is judged too"


def test_failed_held_out_prompts_are_counted_apart(tmp_path: Path) -> None:
    spec = job(env={"fail_rate": 0.5}, steps=2, eval_prompts=40)
    for record in Run(tmp_path, spec).evaluations(spec):
        assert 5 < record.num_failed < 35
        assert record.num_prompts == 40


# ---------------------------------------------------------------------------------------------
# The four fates


def test_a_gap_past_its_bound_holds_the_job_and_not_its_neighbour(tmp_path: Path) -> None:
    spec, neighbour = job("skewed"), job("fine")

    def workers() -> list[FakeWorker]:
        return [FakeWorker("a", skew=0.01), FakeWorker("b")]

    run = Run(tmp_path, spec, neighbour, workers=workers)
    state, reason = run.state(spec)
    assert state is JobState.HELD
    assert reason.startswith("gap 1.00e-02 is past its bound 1e-03")
    assert run.state(neighbour) == (JobState.DONE, "")
    assert run.steps(spec) == []


def test_the_gap_bound_is_the_operators(tmp_path: Path) -> None:
    spec = job(steps=2)
    run = Run(
        tmp_path, spec, workers=lambda: [FakeWorker(skew=0.01)],
        settings=LoopSettings(gap_bound=0.05),
    )  # fmt: skip
    assert run.state(spec) == (JobState.DONE, "")
    assert run.steps(spec)[0].metrics["gap_max"] == pytest.approx(0.01, rel=1e-3)


def test_a_vetoed_step_moves_the_clock_and_changes_nothing(tmp_path: Path) -> None:
    spec = job(steps=4)
    run = Run(tmp_path, spec, workers=lambda: [FakeWorker(is_vetoed=lambda _, v: v == 2)])
    records = run.steps(spec)
    assert [record.is_vetoed for record in records] == [False, True, False, False]
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert records[1].adapter_hash == records[0].adapter_hash != records[2].adapter_hash
    assert run.state(spec) == (JobState.DONE, "")


def test_three_vetoes_in_a_row_hold_the_job(tmp_path: Path) -> None:
    spec = job(steps=9)
    run = Run(tmp_path, spec, workers=lambda: [FakeWorker(is_vetoed=lambda _, v: v >= 3)])
    assert run.state(spec) == (JobState.HELD, "3 updates in a row were not finite")
    assert len(run.steps(spec)) == 5


def test_failed_environments_are_typed_data_and_no_rewards(tmp_path: Path) -> None:
    spec = job(env={"fail_rate": 0.3}, steps=10)
    run = Run(tmp_path, spec)
    failed = [t for t in run.trajectories(spec) if not t.end.is_trainable]
    assert {t.end for t in failed} >= {TrajectoryEnd.SANDBOX_LIMIT, TrajectoryEnd.TOOL_TIMEOUT}
    assert all(t.detail for t in failed)
    counted = sum(
        value
        for record in run.steps(spec)
        for name, value in record.metrics.items()
        if name.startswith("failed/")
    )
    assert counted == len(failed)


@pytest.mark.parametrize("where", ["prompt", "step"])
def test_an_environment_that_never_works_fails_its_job_with_the_error(
    tmp_path: Path, where: str
) -> None:
    broken, fine = job("broken", env={"crash": where}, steps=20), job("fine")
    run = Run(tmp_path, broken, fine)
    state, reason = run.state(broken)
    assert state is JobState.FAILED
    assert "no verdict in 3 steps" in reason and "ValueError: a bug in" in reason
    assert all(record.is_empty for record in run.steps(broken))
    assert run.state(fine) == (JobState.DONE, "")


@pytest.mark.parametrize(
    ("lost_starts", "state"), [(1, JobState.DONE), (2, JobState.DONE), (3, JobState.FAILED)]
)
def test_a_sandbox_that_dies_while_it_starts_is_started_again(
    tmp_path: Path, lost_starts: int, state: JobState
) -> None:
    spec = job(env={"lost_starts": lost_starts})
    found, reason = Run(tmp_path, spec).state(spec)
    assert found is state
    assert (reason == "") == (state is JobState.DONE)


def test_a_job_of_few_steps_without_a_verdict_is_not_done_but_failed(tmp_path: Path) -> None:
    broken = job("broken", env={"crash": "step"}, steps=1)
    run = Run(tmp_path, broken)
    state, reason = run.state(broken)
    assert state is JobState.FAILED
    assert "no verdict in any step" in reason and "ValueError: a bug in" in reason
    logged = [e.data["text"] for e in run.store.events("acme") if e.kind is EventKind.LOG]
    assert logged == ["environment_error: ValueError: a bug in the environment"]


def test_one_verdict_in_an_earlier_run_is_enough_to_be_done(tmp_path: Path) -> None:
    """The last run of this job sees failures only."""
    spec = job(steps=3)

    async def stop(run: Run) -> None:
        while not run.steps(spec):
            await asyncio.sleep(0.01)
        run.controller.stop()

    assert 1 <= len(Run(tmp_path, spec, script=stop).steps(spec)) < 3
    broken = replace(spec, env={"family": "scripted", "crash": "step"})
    again = Run(tmp_path, make_family=lambda _: family_of(broken))
    assert again.state(spec) == (JobState.DONE, "")


def test_a_job_whose_every_call_times_out_ends_after_some_calls(tmp_path: Path) -> None:
    endless = job("endless", steps=100, prompts_per_step=64)
    fine = job("fine")
    run = Run(tmp_path, endless, fine, make_family=timing_out)
    state, reason = run.state(endless)
    assert state is JobState.FAILED
    assert "timed out before there was any verdict" in reason and "took longer" in reason
    assert 0 < len(run.trajectories(endless)) < 64, "of a step's 256"
    assert run.state(fine) == (JobState.DONE, "")


def test_a_straggler_is_cut_and_its_finished_siblings_are_trained_on(tmp_path: Path) -> None:
    spec = job(
        env={"tool_s": 0.2, "tail": 0.5}, steps=30, max_staleness=1, straggler_deadline_s=2.0
    )
    run = Run(tmp_path, spec)
    assert run.state(spec) == (JobState.DONE, "")
    rows = run.store.groups("acme", "say-y")
    cut = [row for row in rows if any(t.end == "straggler" for t in row.group.trajectories)]
    assert any(row.state is GroupState.TRAINED for row in cut)


@pytest.mark.parametrize("at_s", [0.0005, 0.05, 0.3, 0.6, 1.2])
def test_work_of_a_lost_worker_is_done_again(tmp_path: Path, at_s: float) -> None:
    specs = [job("a", eval_every=1), job("b", env={"tool_s": 0.5, "max_turns": 3})]

    async def script(run: Run) -> None:
        await asyncio.sleep(at_s)
        run.workers[0].kill()

    run = Run(tmp_path, *specs, script=script)
    for spec in specs:
        assert run.state(spec) == (JobState.DONE, "")
        assert len(run.steps(spec)) == 5
        consumed = [index for record in run.steps(spec) for index in record.group_indices]
        assert sorted(consumed) == list(range(10))


def test_jobs_of_a_worker_that_does_not_come_back_move_to_another(tmp_path: Path) -> None:
    specs = [job(f"j{i}", steps=10) for i in range(4)]

    async def script(run: Run) -> None:
        await asyncio.sleep(0.5)
        run.workers[0].kill(for_good=True)

    run = Run(tmp_path, *specs, workers=lambda: [FakeWorker("a"), FakeWorker("b")], script=script)
    assert all(run.state(spec) == (JobState.DONE, "") for spec in specs)


def test_a_job_that_ends_its_worker_every_time_is_given_up(tmp_path: Path) -> None:
    class Fragile(FakeWorker):
        async def forward_backward(self, policy_id: str, data: list, objective: object) -> list:
            if policy_id == "acme/poison":
                self.kill()
            return await super().forward_backward(policy_id, data, objective)

    poison, neighbour = job("poison"), job("fine", steps=30)
    run = Run(tmp_path, poison, neighbour, workers=lambda: [Fragile(speed=Speed(restart_s=0.1))])
    state, reason = run.state(poison)
    assert state is JobState.FAILED and "lost in all of 6 attempts at step 1" in reason
    assert run.state(neighbour) == (JobState.DONE, "")


def test_without_any_worker_jobs_fail_and_say_so(tmp_path: Path) -> None:
    spec = job(steps=20)

    async def script(run: Run) -> None:
        await asyncio.sleep(0.5)
        run.workers[0].kill(for_good=True)

    run = Run(tmp_path, spec, script=script)
    assert run.state(spec) == (JobState.FAILED, "no engine worker is left")


def test_a_broken_invariant_ends_the_run(tmp_path: Path) -> None:
    class Broken(FakeWorker):
        async def publish(self, policy_id: str, version: int) -> None:
            raise AssertionError("a bug")

    with pytest.raises(BaseExceptionGroup) as error:
        Run(tmp_path, job(), workers=lambda: [Broken()])
    assert error.group_contains(AssertionError, match="a bug")
    assert Store(tmp_path).job("acme", "say-y").state is JobState.RUNNING


# ---------------------------------------------------------------------------------------------
# Stopping and resuming


@pytest.mark.parametrize("at_s", [0.0, 0.01, 0.5, 2.0, 5.0])
@pytest.mark.parametrize("mode", list(Mode))
def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, at_s: float, mode: Mode) -> None:
    specs = [job("a", steps=12, eval_every=4), job("b", env={"tool_s": 1.0}, is_seeded=True)]

    async def script(run: Run) -> None:
        await asyncio.sleep(at_s)
        run.controller.stop()

    first = Run(tmp_path, *specs, script=script, mode=mode)
    assert first.elapsed_s < at_s + 3.0
    done = {spec.name: len(first.steps(spec)) for spec in specs}
    finished = len(first.store.groups("acme", "a", GroupState.FINISHED))
    second = Run(tmp_path, mode=mode)
    for spec in specs:
        assert second.state(spec) == (JobState.DONE, "")
        assert len(second.steps(spec)) == spec.steps
        new = [record for job_id, record in second.recorder.steps if job_id == spec.job_id]
        assert len(new) == spec.steps - done[spec.name]
        elapsed = [record.elapsed_s for record in second.steps(spec)]
        assert elapsed == sorted(elapsed)
    sampled_again = sum(job_id == "acme/a" for job_id, _ in second.recorder.groups)
    assert sampled_again == 24 - 2 * done["a"] - finished


def test_a_finished_store_has_nothing_to_run(tmp_path: Path) -> None:
    Run(tmp_path, job())
    again = Run(tmp_path, job())
    assert again.elapsed_s == 0.0 and again.recorder.steps == []


def test_a_seeded_job_resumed_from_any_boundary_equals_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    """Seed-for-seed comparison over crashes lives in tests/sim; this one is a clean stop."""
    spec = job(env={"tool_s": 0.7, "tail": 1.2}, steps=8, is_seeded=True, max_staleness=2)
    whole = Run(tmp_path / "whole", spec)
    curve = [(r.adapter_hash, r.group_indices, dict(r.metrics)) for r in whole.steps(spec)]
    for part, at_s in enumerate((0.3, 1.1, 2.9, 4.2)):

        async def script(run: Run, at_s: float = at_s) -> None:
            await asyncio.sleep(at_s)
            run.controller.stop()

        Run(tmp_path / str(part), spec, script=script)
        parts = Run(tmp_path / str(part))
        resumed = [(r.adapter_hash, r.group_indices, dict(r.metrics)) for r in parts.steps(spec)]
        np.testing.assert_equal(resumed, curve)


def test_a_snapshot_that_came_back_different_holds_the_job(tmp_path: Path) -> None:
    spec = job(steps=12)

    async def script(run: Run) -> None:
        await asyncio.sleep(1.5)
        run.controller.stop()

    first = Run(tmp_path, spec, script=script)
    newest = first.store.job("acme", "say-y").step
    path = Path(first.store.files.version("acme", "say-y", newest).state)
    blob = bytearray(path.read_bytes())
    blob[20] ^= 0xFF
    path.write_bytes(bytes(blob))
    state, reason = Run(tmp_path).state(spec)
    assert state is JobState.HELD
    assert f"version {newest} came back as" in reason


# ---------------------------------------------------------------------------------------------
# Memory


def test_a_job_whose_trajectories_could_not_be_trained_on_is_refused_with_what_could(
    tmp_path: Path,
) -> None:
    def small() -> list[FakeWorker]:
        worker = FakeWorker()
        worker.capabilities = replace(worker.capabilities, max_trained_tokens=101)
        return [worker]

    long = job(max_tokens=60)
    refusal = r"2 turns may make a trajectory of 121 tokens, .* at most 101; expected at most 50"
    with pytest.raises(InvalidRequest, match=refusal):
        Run(tmp_path / "refused", long, workers=small, make_family=two_turns)
    fitting = replace(long, max_tokens=50, steps=1)
    run = Run(tmp_path / "accepted", fitting, workers=small, make_family=two_turns)
    assert run.state(fitting) == (JobState.DONE, "")


def two_turns(spec: JobSpec) -> ScriptedFamily:
    return ScriptedFamily(max_turns=2)
