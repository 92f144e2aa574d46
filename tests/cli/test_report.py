"""A run folder's readable files say what the store holds, and can be made again at any time."""

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from marlaas.cli import report
from marlaas.errors import NotFound
from marlaas.loop.jobspec import read_jobs
from marlaas.store.db import Store
from marlaas.types import JobState, TenantId, TrajectoryEnd
from tests.cli.records import make_eval, make_group, make_spec, make_step, make_trajectory

ACME = TenantId("acme")


def fill_store(out: Path) -> None:
    """One job that learned, with two steps and a dropped group, and one that never began."""
    store = Store(out)
    store.add_job(ACME, make_spec())
    store.add_job(ACME, make_spec("idle"))
    store.add_first_version(ACME, "sums", "hash-0")
    store.add_evaluation(ACME, "sums", make_eval(0, 0.25))
    groups = [
        make_group(0),
        make_group(
            1,
            make_trajectory(0, versions=(2, 3, 3)),
            make_trajectory(1, end=TrajectoryEnd.TOOL_TIMEOUT),
        ),
    ]
    for group in groups:
        store.open_group(ACME, "sums", group.index, version=0)
        store.finish_group(ACME, "sums", group)
    store.open_group(ACME, "sums", 2, version=1)
    store.commit_step(ACME, "sums", make_step(1, grad_norm=float("nan")), dropped={})
    store.commit_step(ACME, "sums", make_step(2), dropped={1: "zero_variance"})
    store.add_evaluation(ACME, "sums", make_eval(2, 0.75))
    store.set_job_state(ACME, "sums", JobState.RUNNING)
    store.set_job_state(ACME, "sums", JobState.DONE)
    store.close()


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """A run folder with its report."""
    folder = tmp_path_factory.mktemp("run")
    fill_store(folder)
    report.write_report(folder)
    return folder


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_curve_has_one_row_a_step(out):
    rows = rows_of(out / "jobs/acme/sums/curve.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0] == {
        "step": 1,
        "elapsed_s": 2.0,
        "reward_mean": 0.5,
        "success": 0.5,
        "staleness_mean": 1.5,
        "grad_norm": None,
        "is_vetoed": False,
        "is_empty": False,
        "adapter_hash": "hash-1",
        "groups": [0],
    }


def test_evaluations_are_listed_by_version(out):
    rows = rows_of(out / "jobs/acme/sums/evaluations.jsonl")
    assert [(row["version"], row["success"]) for row in rows] == [(0, 0.25), (2, 0.75)]


def test_a_trajectory_is_readable_and_exact(out):
    rows = rows_of(out / "jobs/acme/sums/trajectories.jsonl")
    assert len(rows) == 4
    first = rows[0]
    assert first["messages"][1] == {"role": "assistant", "content": "It is 7 ✓."}
    assert first["tokens"] == [5, 6, 7, 8, 9, 10]
    assert (first["reward"], first["is_success"], first["end"]) == (1.0, True, "done")
    assert (first["group_state"], first["step"]) == ("trained", 1)
    (turn,) = first["turns"]
    assert (turn["start"], turn["end"], turn["version"]) == (3, 6, 2)
    assert (turn["adapter_hash"], turn["stop_reason"]) == ("ab12", "stop_token")
    original = make_trajectory(0).sampling_logprobs[3:]
    assert np.array_equal(np.array(turn["sampling_logprobs"], np.float32), original)
    assert "versions" not in turn


def test_a_trajectory_without_a_verdict_has_no_reward(out):
    row = rows_of(out / "jobs/acme/sums/trajectories.jsonl")[3]
    assert (row["reward"], row["is_success"], row["end"]) == (None, None, "tool_timeout")
    assert row["detail"] == "the tool took too long"
    assert (row["group_state"], row["group_reason"]) == ("dropped", "zero_variance")


def test_versions_are_listed_where_a_turn_has_several(out):
    row = rows_of(out / "jobs/acme/sums/trajectories.jsonl")[2]
    assert row["turns"][0]["versions"] == [2, 3, 3]


def test_the_summary_has_success_before_and_after(out):
    jobs = report.write_report(out)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["mean_gain"] == 0.5
    assert (summary["num_jobs"], summary["num_done"]) == (2, 1)
    job = summary["jobs"][0]
    assert (job["success_before"], job["success_after"], job["gain"]) == (0.25, 0.75, 0.5)
    assert (job["num_groups"], job["num_trajectories"], job["num_sampled_tokens"]) == (2, 4, 12)
    assert job["ends"] == {"done": 3, "tool_timeout": 1}
    assert job["dropped_groups"] == {"zero_variance": 1}
    assert jobs[1].gain is None


def test_a_job_that_was_only_judged_before_training_has_no_gain(tmp_path):
    store = Store(tmp_path)
    store.add_job(ACME, make_spec())
    store.add_evaluation(ACME, "sums", make_eval(0, 0.25))
    store.set_job_state(ACME, "sums", JobState.RUNNING)
    store.close()
    (job,) = report.write_report(tmp_path)
    assert (job.success_before, job.success_after, job.gain) == (0.25, None, None)
    console = Console(width=80, record=True)
    report.print_report(console, tmp_path, [job])
    text = console.export_text()
    assert " 25% " in text and "unfinished" in text


def test_the_settings_in_a_jobs_file_read_back_as_the_job(out):
    record = json.loads((out / "jobs/acme/sums/job.json").read_text())
    assert read_jobs({"jobs": [record["settings"]]}).jobs == (make_spec(),)
    assert (record["state"], record["steps"]) == ("done", 2)


def test_pictures_are_written_for_every_job_and_the_run(out):
    pictures = [*out.rglob("*.png")]
    assert len(pictures) == 3
    assert all(picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for picture in pictures)


def test_a_report_made_again_is_the_same_without_leftovers(out):
    files = {path: path.read_bytes() for path in out.rglob("*.json*")}
    report.write_report(out)
    assert {path: path.read_bytes() for path in out.rglob("*.json*")} == files
    assert not [*out.rglob("*.tmp")]


def test_a_folder_without_a_run_is_not_found_and_not_touched(tmp_path):
    with pytest.raises(NotFound):
        report.write_report(tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("width", [80, 140])
def test_the_final_table_fits_and_says_what_was_learned(out, width):
    console = Console(width=width, record=True)
    report.print_report(console, out, report.write_report(out))
    text = console.export_text()
    assert "25% →  75%  +50" in text
    table = [line for line in text.splitlines() if str(out) not in line]
    assert max(map(len, table)) <= width
