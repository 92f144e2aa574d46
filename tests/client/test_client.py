"""The client against a real service, engine and all: what a tenant and an operator do."""

import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

import marlaas
from marlaas.client import Client, Job
from marlaas.errors import Conflict, Forbidden, InvalidRequest, NotFound, Unauthorized
from marlaas.types import EventKind, JobState, Role, UploadKind
from tests.client.running import Running

pytestmark = pytest.mark.slow

SUMS = {
    "env": {"family": "math"},
    "steps": 4,
    "prompts_per_step": 2,
    "group_size": 4,
    "eval_prompts": 8,
}
LONG = {**SUMS, "steps": 2000, "eval_prompts": 0}


@pytest.fixture(scope="module")
def operator(service: Running) -> Iterator[Client]:
    with service.client() as client:
        yield client


@pytest.fixture(scope="module")
def acme(service: Running, operator: Client) -> Iterator[Client]:
    operator.tenants.create("acme")
    with service.client(operator.tenants.add_key("acme").secret) as client:
        yield client


@pytest.fixture(scope="module")
def done(acme: Client) -> Job:
    return acme.jobs.create(name="done", **SUMS).wait(timeout_s=120)


# ---------------------------------------------------------------------------------------------
# Jobs


def test_a_job_is_handed_over_waited_for_and_found_again(acme: Client, done: Job):
    assert (done.state, done.step, done.info.usage.sampled_tokens > 0) == (JobState.DONE, 4, True)
    assert acme.jobs.get("done").info == done.refresh().info
    assert "done" in [job.name for job in acme.jobs.list(state="done")]
    assert repr(done) == "Job('done', done, step 4 of 4)"


def test_the_same_job_twice_is_one_job_and_another_of_its_name_a_conflict(acme: Client, done: Job):
    assert acme.jobs.create(name="done", **SUMS).step == 4
    with pytest.raises(Conflict):
        acme.jobs.create(name="done", **{**SUMS, "steps": 5})


def test_every_problem_of_a_job_is_told_at_once(acme: Client):
    with pytest.raises(InvalidRequest) as raised:
        acme.jobs.create(name="bad", env={"family": "maths"}, steps=0, colour="red")
    words = "\n".join(raised.value.problems)
    assert len(raised.value.problems) >= 3
    assert "maths" in words and "steps" in words and "colour" in words


def test_the_curve_is_rows_of_plain_numbers(done: Job):
    rows = done.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert {"reward_mean", "success", "elapsed_s", "is_empty"} <= rows[0].keys()
    assert all(isinstance(value, int | float | None) for row in rows for value in row.values())
    assert [row["step"] for row in done.metrics(after=2)] == [3, 4]
    assert {0, 4} <= {evaluation.version for evaluation in done.evaluations()}


def test_events_tell_the_whole_story_in_order_and_end_with_the_job(done: Job):
    events = list(done.events())
    assert list(done.events(follow=True)) == events
    seqs = [event.seq for event in events]
    assert seqs == sorted(set(seqs))
    steps = [event.data["step"] for event in events if event.kind is EventKind.STEP]
    assert steps == [1, 2, 3, 4]
    states = [event.data["state"] for event in events if event.kind is EventKind.STATE]
    assert states[-1] == "done"
    assert list(done.logs()) == list(done.logs(follow=True))


def test_rollouts_can_be_listed_by_step_and_reward_and_read(done: Job):
    rows = list(done.groups(step=1))
    assert len(rows) == 2 and all(row.step == 1 for row in rows)
    good = list(done.groups(min_reward=0.5))
    assert all(row.reward_mean is not None and row.reward_mean >= 0.5 for row in good)
    group = done.group(rows[0].index, tokens=True)
    assert len(group.trajectories) == 4
    rollout = group.trajectories[0]
    assert [message.role for message in rollout.messages] == ["user", "assistant"]
    assert rollout.tokens is not None and len(rollout.tokens.ids) == rollout.num_tokens
    assert done.group(rows[0].index).trajectories[0].tokens is None
    with pytest.raises(NotFound):
        done.group(10_000)


def test_an_adapter_comes_home_as_a_peft_folder(done: Job, tmp_path: Path):
    folder = done.adapter("latest").download(tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    weights = load_file(folder / "adapter_model.safetensors")
    assert config["r"] == 8
    assert any("lora_A" in name for name in weights)
    with pytest.raises(NotFound):
        done.adapter(99).download(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_version_is_promoted_and_the_base_merged_with_it(done: Job, tmp_path: Path):
    assert done.adapter("promoted").model == "done@promoted"
    assert done.adapter(4).promote().is_promoted
    assert done.refresh().info.promoted == 4
    assert [row.version for row in done.versions() if row.is_promoted] == [4]
    folder = done.adapter("promoted").merged(tmp_path / "merged")
    assert folder == tmp_path / "merged"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() > 0
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]
    with pytest.raises(InvalidRequest, match="not empty"):
        done.adapter("promoted").merged(folder)


def test_a_kept_version_is_judged_when_asked_for(done: Job):
    last = max(event.seq for event in done.events())
    assert done.evaluate(3) == 3
    told = (event for event in done.follow(after=last) if event is not None)
    judged = next(event for event in told if event.kind is EventKind.EVALUATION)
    assert judged.data["version"] == 3
    assert done.evaluate("latest") == 4
    assert [evaluation.version for evaluation in done.evaluations()] == [0, 3, 4]
    with pytest.raises(NotFound):
        done.evaluate(77)


def test_a_job_is_paused_goes_on_is_cancelled_and_deleted(acme: Client):
    job = acme.jobs.create(name="long", **LONG)
    with pytest.raises(TimeoutError, match="after 0 s"):
        job.wait(timeout_s=0)
    with pytest.raises(Conflict):
        job.delete()
    assert job.pause().state is JobState.PAUSED
    assert job.pause().state is JobState.PAUSED
    assert job.wait().state is JobState.PAUSED
    assert job.resume().state.is_active
    assert job.cancel().state is JobState.CANCELLED
    job.delete()
    with pytest.raises(NotFound):
        acme.jobs.get("long")


def test_waiting_ends_when_somebody_else_cancels(acme: Client, capsys):
    job = acme.jobs.create(name="watched", **LONG)
    cancelling = threading.Timer(2.0, acme.jobs.get("watched").cancel)
    cancelling.start()
    assert job.wait(progress=True, timeout_s=60).state is JobState.CANCELLED
    cancelling.join()
    shown = capsys.readouterr().err
    assert "watched  step" in shown and "cancelled by the tenant" in shown


def test_a_sweep_compares_its_jobs(acme: Client):
    sweep = acme.sweep("rates", SUMS, {"learning_rate": [1e-3, 2e-3]})
    assert repr(sweep).startswith("Sweep('rates' over learning_rate: ")
    assert [row.job for row in sweep.wait(timeout_s=120).rows]
    assert {row.values["learning_rate"] for row in sweep.rows} == {1e-3, 2e-3}
    assert all(row.state is JobState.DONE and row.best_success is not None for row in sweep.rows)
    assert acme.get_sweep("rates").info == sweep.info


# ---------------------------------------------------------------------------------------------
# Uploads and chat


def test_prompts_are_uploaded_from_rows_and_from_a_file(acme: Client, tmp_path: Path):
    rows = [{"prompt": "Say: ä", "word": "ä"}, {"prompt": "Say: b", "word": "b"}]
    upload = acme.upload_prompts("words", rows)
    assert (upload.kind, upload.num_lines) == (UploadKind.PROMPTS, 2)
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    assert acme.upload_prompts("words", path).digest == upload.digest
    assert [row.name for row in acme.uploads()] == ["words"]
    acme.delete_upload(UploadKind.PROMPTS, "words")
    assert acme.uploads() == []


def test_prompts_with_faults_are_refused_with_their_lines(acme: Client):
    with pytest.raises(InvalidRequest) as raised:
        acme.upload_prompts("bad", [{}, {"prompt": "fine"}, {}])
    assert [problem for problem in raised.value.problems if "line 1" in problem]
    assert [problem for problem in raised.value.problems if "line 3" in problem]


def test_a_trained_version_and_the_base_reply(acme: Client, done: Job):
    question = "What is 3 + 4? End with “Answer: ” and the number."
    trained = acme.chat(done.adapter(4).model, question, temperature=0, max_tokens=30)
    base = acme.chat("base", [{"role": "user", "content": question}], temperature=0, max_tokens=30)
    assert trained and base
    with pytest.raises(NotFound):
        acme.chat("nobody@3", "Hello")


# ---------------------------------------------------------------------------------------------
# Tenants and operators


def test_a_key_says_whose_it_is_and_a_wrong_one_nothing(service, acme, operator):
    assert (acme.whoami().tenant, acme.whoami().role) == ("acme", Role.TENANT)
    assert operator.whoami().role is Role.OPERATOR
    with service.client("tml-wrong") as stranger, pytest.raises(Unauthorized):
        stranger.jobs.list()
    with pytest.raises(Forbidden):
        acme.tenants.list()


def test_a_tenant_is_changed_in_what_is_named_only(operator: Client):
    operator.tenants.create("birch", weight=2.0, max_running_jobs=3)
    changed = operator.tenants.change("birch", tokens_a_day=1000)
    assert (changed.weight, changed.quotas.max_running_jobs) == (2.0, 3)
    assert operator.tenants.change("birch", tokens_a_day=None).quotas.tokens_a_day is None
    assert operator.tenants.get("birch") in operator.tenants.list()
    with pytest.raises(Conflict):
        operator.tenants.create("birch")
    operator.tenants.purge("birch")
    with pytest.raises(NotFound):
        operator.tenants.get("birch")
    assert [entry.action for entry in operator.tenants.audit() if entry.tenant == "birch"]


def test_a_revoked_key_opens_nothing(service: Running, operator: Client, acme: Client):
    for owner in ("acme", None):
        key = operator.tenants.add_key(owner, label="short-lived")
        with service.client(key.secret) as client:
            assert client.whoami().key_id == key.key_id
            operator.tenants.revoke_key(owner, key.key_id)
            with pytest.raises(Unauthorized):
                client.whoami()
        kept = next(row for row in operator.tenants.keys(owner) if row.key_id == key.key_id)
        assert kept.revoked_s is not None and kept.label == "short-lived"


def test_an_operator_acts_for_a_tenant(service: Running, operator: Client, done: Job):
    assert operator.acting_for("acme").jobs.get("done").info == done.refresh().info
    with service.client(tenant="acme") as acting:
        assert acting.usage().by_job["done"] == done.info.usage
        assert acting.tenants.get("acme").tenant == "acme"
    with pytest.raises(InvalidRequest, match="acts for a tenant"):
        operator.jobs.list()


def test_usage_and_the_machine_are_told(acme: Client, operator: Client, done: Job):
    report = acme.usage(days=1)
    (today,) = report.by_day.values()
    assert report.total.sampled_tokens >= done.info.usage.sampled_tokens > 0
    assert dataclasses.astuple(today) == dataclasses.astuple(report.today)
    machine = operator.machine()
    assert machine.base == "tiny" and machine.workers[0].busy_s
    assert operator.trace(seconds=5)["traceEvents"]


def test_the_package_hands_out_the_client():
    assert marlaas.Client is Client
    with pytest.raises(AttributeError):
        _ = marlaas.Server  # pyright: ignore
