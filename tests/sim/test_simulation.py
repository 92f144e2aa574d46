"""Random histories of the whole loop; a failing seed says how to replay it."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from marlaas.store.db import Store
from marlaas.types import JobSpec, JobState
from tests.sim.checks import check
from tests.sim.simulation import Plan, simulate

NUM_SEEDS = 50


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_every_history_keeps_the_contracts(seed: int, tmp_path: Path) -> None:
    plan = Plan.draw(seed)
    try:
        check(plan, simulate(plan, tmp_path))
    except BaseException as error:
        error.add_note(f"replay with: python -m tests.sim.simulation {seed}")
        raise


def curve_of(store: Store, spec: JobSpec) -> list:
    """Return all that a seed decides of a job: steps, evaluations and adapters, without times."""
    records = [
        *store.steps(spec.tenant, spec.name),
        *store.evaluations(spec.tenant, spec.name),
    ]
    return [asdict(replace(record, elapsed_s=0.0)) for record in records]


@pytest.mark.parametrize("seed", range(1000, 1020))
def test_a_seeded_job_does_not_notice_neighbours_crashes_or_lost_workers(
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
    )
    disturbed = simulate(plan, tmp_path / "disturbed")
    check(plan, disturbed)
    alone = simulate(plan.alone(spec), tmp_path / "alone")
    assert (
        alone.store.job(spec.tenant, spec.name).state is JobState.DONE
        or drawn.specs[0].env["fail_rate"]
    )
    np.testing.assert_equal(curve_of(disturbed.store, spec), curve_of(alone.store, spec))
