"""The benchmark of publishing measures each phase between a step and its first token."""

import asyncio

import pytest

from marlaas.bench import publish
from marlaas.config import Placement


def test_phases_add_up_and_neighbours_decode_while_the_worker_is_busy(tmp_path) -> None:
    plan = publish.Plan(rounds=3, batch=4)
    idle, busy = asyncio.run(publish.measure(Placement.REPLICATED, plan, tmp_path))
    assert idle.decode_step_s == 0 < busy.decode_step_s
    for measured in (idle, busy):
        assert len(measured.rounds) == 3
        for one in measured.rounds:
            assert sum(one[phase] for phase in publish.PHASES[:-1]) == pytest.approx(one["all"])
    assert publish.as_markdown([idle, busy]).count("\n") == 3
