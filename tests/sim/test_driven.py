"""Random histories of runs that clients drive; a failing seed says how to replay it."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from marlaas.loop.operations import LoadWeights, SaveForSampler, SaveWeights
from marlaas.loop.runner import RunnerSettings
from marlaas.types import TenantId
from tests.driving import STEP, train
from tests.fakes import Speed
from tests.sim.driven import DrivenPlan, Script, check, drive
from tests.sim.simulation import Crash

NUM_SEEDS = 50
ACME = TenantId("acme")


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_every_operation_has_one_outcome_and_weights_are_those_of_doing_them_in_turn(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = DrivenPlan.draw(seed)
    try:
        check(*drive(plan, tmp_path))
        for record in caplog.records:  # a crash of the process is no fault of the server
            is_crash = record.exc_info is not None and record.exc_info[0] is Crash
            assert record.levelno < logging.ERROR or is_crash, record.getMessage()
    except BaseException as error:
        error.add_note(f"replay with: python -m tests.sim.driven {seed}")
        raise


def test_a_crash_at_any_durable_write_changes_no_outcome(tmp_path: Path) -> None:
    """Kill the process at every write in turn, before and after it."""
    bodies = (
        train("ab"), train("abb"), STEP, SaveWeights(name="u"), train("ac"),
        LoadWeights(path="tinker://s-acme:train:0/weights/u", with_optimizer=True),
        SaveForSampler(sampler_seq=0),
    )  # fmt: skip
    order = tuple(range(1, len(bodies) + 1))
    script = Script(tenant=ACME, seq=0, bodies=bodies, order=order, waits=(0.0,) * len(order))
    plan = DrivenPlan(
        scripts=(script,), num_workers=1, settings=RunnerSettings(), speed=Speed(), store_s=0.0,
        crashes=(), kills=(),
    )  # fmt: skip
    store, clients = drive(plan, tmp_path / "whole")
    check(store, clients)
    num_writes = store.num_writes
    assert num_writes > 20
    for write in range(1, num_writes + 1):
        for is_before in (True, False):
            crashed = replace(plan, crashes=((write, is_before),))
            store, clients = drive(crashed, tmp_path / f"{write}-{is_before}")
            check(store, clients)
            store.close()
