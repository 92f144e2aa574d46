"""Random histories of the whole loop; a failing seed says how to replay it."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from marlaas.loop.controller import Mode
from marlaas.store.db import Store
from marlaas.types import JobSpec, JobState
from tests.fakes import Speed
from tests.sim.checks import check
from tests.sim.simulation import Act, Plan, simulate

NUM_SEEDS = 50


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_every_history_keeps_the_contracts(seed: int, tmp_path: Path) -> None:
    plan = Plan.draw(seed)
    try:
        check(plan, simulate(plan, tmp_path))
    except BaseException as error:
        error.add_note(f"replay with: python -m tests.sim.simulation {seed}")
        raise


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_every_history_of_a_service_keeps_the_contracts(seed: int, tmp_path: Path) -> None:
    plan = Plan.draw_service(seed)
    try:
        check(plan, simulate(plan, tmp_path))
    except BaseException as error:
        error.add_note(f"replay with: python -m tests.sim.simulation service {seed}")
        raise


def curve_of(store: Store, spec: JobSpec) -> list:
    """Return all that a seed decides of a job: steps, evaluations and adapters, without times."""
    records = [
        *store.steps(spec.tenant, spec.name),
        *store.evaluations(spec.tenant, spec.name),
    ]
    return [asdict(replace(record, elapsed_s=0.0)) for record in records]


@pytest.mark.parametrize("seed", range(1000, 1020))
def test_a_seeded_job_does_not_notice_neighbours_pauses_crashes_or_lost_workers(
    seed: int, tmp_path: Path
) -> None:
    drawn = Plan.draw(seed)
    spec = replace(drawn.specs[0], is_seeded=True, is_in_flight=False, name="watched", steps=6)
    plan = replace(
        drawn,
        specs=(spec, *drawn.specs[1:]),
        crashes=((9, True), (25, False), (14, True), (40, False)),
        kills=((2.0, 0), (9.0, 0)),
        mode=drawn.alone(spec).mode,
        acts=tuple(
            Act(after_s=0.1 * gap**2, verb=verb, target=gap, number=gap, is_awaited=gap % 3 > 0)
            for gap, verb in enumerate(("pause", "resume", "lose_worker") * 4, start=seed % 5)
        ),
    )
    disturbed = simulate(plan, tmp_path / "disturbed")
    check(plan, disturbed)
    alone = simulate(plan.alone(spec), tmp_path / "alone")
    assert (
        alone.store.job(spec.tenant, spec.name).state is JobState.DONE
        or drawn.specs[0].env["fail_rate"]
    )
    np.testing.assert_equal(curve_of(disturbed.store, spec), curve_of(alone.store, spec))


def test_a_crash_at_any_durable_write_leaves_no_trace(tmp_path: Path) -> None:
    """Kill the process at every write in turn, before and after it; the curve stays the same."""
    spec = JobSpec(
        tenant="acme", name="watched", env={"family": "scripted", "max_turns": 2, "tool_s": 0.2},
        steps=3, prompts_per_step=2, group_size=2, max_staleness=1, max_tokens=4, eval_every=1,
        eval_prompts=2, is_seeded=True, learning_rate=5.0, keep_versions=0,
    )  # fmt: skip
    plan = Plan(specs=(spec,), num_workers=1, speed=Speed())
    whole = simulate(plan, tmp_path / "whole")
    expected = curve_of(whole.store, spec)
    num_writes = whole.store.num_writes
    assert num_writes > 25
    for write in range(1, num_writes + 1):
        for is_before in (True, False):
            crashed = replace(plan, crashes=((write, is_before),))
            outcome = simulate(crashed, tmp_path / f"{write}-{is_before}")
            assert outcome.num_lives == 2
            check(crashed, outcome)
            np.testing.assert_equal(curve_of(outcome.store, spec), expected)
            outcome.store.close()


@pytest.mark.parametrize("seed", range(2000, 2020))
def test_a_lone_job_is_never_slower_than_in_lockstep(seed: int, tmp_path: Path) -> None:
    drawn = Plan.draw(seed)
    # In flight the tokens themselves depend on timing, so the two runs do different work.
    spec = replace(drawn.specs[0], is_in_flight=False, stop_at_success=0.0)
    plan = drawn.alone(spec)
    overlapped = simulate(plan, tmp_path / "async").makespan_s
    in_steps = simulate(replace(plan, mode=Mode.LOCKSTEP), tmp_path / "lockstep").makespan_s
    assert overlapped <= in_steps * 1.001
