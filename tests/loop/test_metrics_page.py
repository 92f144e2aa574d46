"""`docs/metrics.md` names every column of a row, and no column that does not exist."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from marlaas.loop import metrics
from marlaas.types import DatumOutput, Objective, TrajectoryEnd
from tests.driving import datum
from tests.loop.test_training import batch_of, group, trajectory

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ADDED_BY_TRAIN = {"grad_norm", "lr"}


def test_the_page_names_every_column_and_no_other() -> None:
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    named |= {"gap_mean", "gap_max", "reference_kl"}
    judged = group(0, trajectory(0, 1.0, format=1.0), trajectory(1, 0.0, format=0.0))
    computed = {
        *metrics.of_groups([judged], version=0, dropped={}),
        *metrics.of_outputs([], []),
        *metrics.of_gap([]),
        *ADDED_BY_TRAIN,
        *of_a_pass(),
    }
    computed = {re.sub("^env/.*", "env/NAME", name) for name in computed} | {"failed/KIND"}
    assert named == computed
    assert batch_of("grpo", judged).data


def of_a_pass() -> dict[str, float]:
    """Return the row of a client's pass under an objective that counts all there is to count."""
    counts = {"clipped": 0.0, "masked": 0.0, "capped": 0.0}
    output = replace(DatumOutput(logprobs=np.zeros(3, np.float32), loss=0.0), counts=counts)
    return metrics.of_pass([datum()], [output], Objective(name="ppo"), is_forward_only=False)


def test_the_page_names_every_kind_of_failure() -> None:
    text = PAGE.read_text()
    for end in TrajectoryEnd:
        assert end.is_trainable or f"`{end.value}`" in text
