"""A job file is read whole before anything is sent; its local files become uploads."""

import hashlib
from pathlib import Path

import pytest

from marlaas.cli.submit import read_submission
from marlaas.errors import InvalidRequest

REWARD = "def reward(prompt, reply):\n    return 1.0\n"


@pytest.fixture
def jobs(tmp_path) -> Path:
    (tmp_path / "my reward.py").write_text(REWARD)
    return tmp_path / "jobs.yaml"


def test_jobs_without_a_tenant_are_the_keys(jobs):
    jobs.write_text(
        "jobs: [{name: a, env: {family: math}}, {tenant: b, name: a, env: {family: math}}]"
    )
    specs = read_submission(jobs, default_tenant="acme").specs
    assert [spec.job_id for spec in specs] == ["acme/a", "b/a"]


def test_a_job_without_a_tenant_is_refused_where_nobody_is_the_default(jobs):
    jobs.write_text("jobs: [{name: a, env: {family: math}}]")
    with pytest.raises(InvalidRequest, match="has no `tenant`"):
        read_submission(jobs)


def test_the_run_section_is_noticed(jobs):
    jobs.write_text("run: {base: tiny}\njobs: [{tenant: a, name: b, env: {family: math}}]")
    submission = read_submission(jobs)
    assert (len(submission.specs), submission.has_run) == (1, True)


def test_a_local_file_becomes_its_digest_and_is_named_after_the_file(jobs):
    jobs.write_text(
        "defaults:\n"
        "  tenant: a\n"
        "  env: {family: custom, environment: ./my reward.py, prompts: words}\n"
        "jobs: [{name: b}]"
    )
    submission = read_submission(jobs)
    (spec,) = submission.specs
    (file,) = submission.files_of(spec)
    assert spec.env["environment"] == hashlib.sha256(REWARD.encode()).hexdigest() == file.digest
    assert spec.env["prompts"] == "words"
    assert file.name == "my-reward"
    (jobs.parent / "my reward.py").unlink()
    again = read_submission(jobs, digests={file.written: file.digest})
    assert (again.specs, again.files) == ((spec,), ())


def test_files_that_are_missing_are_reported_with_every_other_fault(jobs):
    jobs.write_text(
        "jobs:\n"
        "  - {tenant: a, name: b, env: {family: custom, environment: no.py, prompts: words}}\n"
        "  - {tenant: a, name: c, env: {family: math}, steps: 0}\n"
    )
    with pytest.raises(InvalidRequest) as raised:
        read_submission(jobs)
    missing, steps = raised.value.problems
    assert missing.startswith("jobs[0].env.environment: ") and missing.endswith("(line 2)")
    assert "no.py cannot be read" in missing
    assert steps.startswith("jobs[1].steps: got 0")
