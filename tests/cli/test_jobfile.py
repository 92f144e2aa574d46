"""A job file is YAML with few surprises, and its faults carry line numbers."""

from pathlib import Path

import pytest

from marlaas.cli.jobfile import load_jobs
from marlaas.errors import InvalidRequest
from marlaas.loop.jobspec import JobFile


def load(folder: Path, text: str | bytes) -> JobFile:
    path = folder / "jobs.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_jobs(path)


def problems_of(folder: Path, text: str | bytes) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        load(folder, text)
    return list(caught.value.problems)


def test_the_demo_is_a_valid_job_file():
    jobs = load_jobs(Path(__file__).parents[2] / "examples" / "demo.yaml").jobs
    assert len(jobs) == 8
    assert len({spec.tenant for spec in jobs}) == 4
    assert {spec.env["family"] for spec in jobs} == {"math", "code", "search"}


def test_a_number_may_have_a_bare_exponent(tmp_path):
    text = "jobs: [{tenant: a, name: b, env: {family: math}, learning_rate: 1e-3}]"
    assert load(tmp_path, text).jobs[0].learning_rate == 1e-3


def test_no_is_a_name_and_a_leading_zero_is_no_octal(tmp_path):
    text = "jobs: [{tenant: no, name: 2026-01-01, env: {family: math}, rank: 010}]"
    assert problems_of(tmp_path, text) == [
        "jobs[0].rank: got '010'; expected a whole number from 1 to 64, without quotes (line 1)"
    ]


def test_faults_carry_the_line_of_the_value(tmp_path):
    text = """\
defaults:
  steps: 0
jobs:
  - tenant: a
    name: b
    env:
      family: math
      terms: 99
    lerning_rate: 1
"""
    problems = problems_of(tmp_path, text)
    assert [problem.rpartition("(")[2] for problem in problems] == ["line 2)", "line 9)", "line 8)"]


def test_a_key_given_twice_is_a_fault(tmp_path):
    text = "jobs:\n  - {tenant: a, name: b, env: {family: math}, seed: 1, seed: 2}"
    assert problems_of(tmp_path, text) == ["jobs[0].seed: is given twice (line 2)"]


def test_anchors_and_merges_work(tmp_path):
    text = """\
jobs:
  - &first {tenant: a, name: b, env: {family: math}, steps: 3}
  - {<<: *first, name: c}
"""
    assert [(spec.name, spec.steps) for spec in load(tmp_path, text).jobs] == [("b", 3), ("c", 3)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "jobs: [",
        "jobs: *nowhere",
        "jobs: &a [*a]",
        "a: &a {<<: *a}",
        "jobs: !!python/object:os.system {}",
        "? [a, b]\n: c",
        "---\njobs: []\n---\njobs: []",
        "\tjobs: []",
        b"\xff\xfe\x00jobs",
        b"jobs: \x00",
        "n: " + "9" * 5000,
        "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + "".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 10)}]\n"
            for i in range(7)
        ),
        "#" * (2 << 20),
    ],
    ids=range(14),
)
def test_what_is_no_job_file_is_refused_without_a_traceback(tmp_path, text):
    assert problems_of(tmp_path, text)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InvalidRequest, match=r"missing\.yaml"):
        load_jobs(tmp_path / "missing.yaml")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        load_jobs(tmp_path)
