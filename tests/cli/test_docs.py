"""The page on job files names every knob, with the default that the code has."""

from pathlib import Path

import pytest

from marlaas.config import ServeSettings
from marlaas.loop import jobspec
from marlaas.loop.jobspec import describe_job, read_jobs

PAGE = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text(encoding="utf-8")
ROWS = {
    line.split("|")[1].strip().strip("`"): [cell.strip() for cell in line.split("|")[2:-1]]
    for line in PAGE.split("## A job")[1].split("##")[0].splitlines()
    if line.startswith("| `")
}


@pytest.mark.parametrize("name", ServeSettings.__slots__)
def test_the_page_on_operations_names_every_setting(name: str):
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    assert any(f"`{name}`" in line.split("|")[1] for line in page.splitlines() if line[:1] == "|")


def test_every_knob_has_a_row_and_every_row_a_knob():
    assert list(ROWS) == list(jobspec._JOB_KNOBS)


@pytest.mark.parametrize("knob", [name for name, row in ROWS.items() if row[0] != "required"])
def test_the_default_in_the_page_is_the_one_in_the_code(knob):
    spec = read_jobs({"jobs": [{"tenant": "a", "name": "b", "env": {"family": "math"}}]}).jobs[0]
    settings = describe_job(spec)
    stated = ROWS[knob][0].strip("`")
    if stated == "none":
        assert settings.get(knob) in (None, {"median_s": 0.0, "sigma": 0.0})
    elif knob == "algorithm":
        assert settings[knob] == {"preset": stated}
    elif knob == "targets":
        assert "[" + ", ".join(settings[knob]) + "]" == stated
    elif isinstance(settings[knob], int | float) and not isinstance(settings[knob], bool):
        assert settings[knob] == float(stated)
    else:
        assert str(settings[knob]).lower() == stated
