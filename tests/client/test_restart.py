"""Clients outlive the service they talk to: it is killed, comes back, and nobody starts anew."""

import threading
from pathlib import Path

import pytest

from marlaas.cli.main import main
from marlaas.types import EventKind, JobState
from tests.client.running import Running

pytestmark = pytest.mark.slow

JOB = {
    "env": {"family": "math"},
    "steps": 12,
    "prompts_per_step": 2,
    "group_size": 4,
    "eval_prompts": 8,
}


def test_a_client_that_waits_and_listens_outlives_a_killed_service(service: Running):
    with service.client() as operator:
        operator.tenants.create("acme")
        acme = operator.acting_for("acme")
        job = acme.jobs.create(name="sums", **JOB)
        ends: list[JobState] = []
        waiting = threading.Thread(
            target=lambda: ends.append(acme.jobs.get("sums").wait(timeout_s=120).state)
        )
        waiting.start()
        events = []
        for event in job.events(follow=True):
            events.append(event)
            if event.kind is EventKind.STEP and event.data["step"] == 3:
                service.kill()
                service.start()
        waiting.join()
    assert ends == [JobState.DONE]
    seqs = [event.seq for event in events]
    assert seqs == list(range(1, len(seqs) + 1))
    steps = [event.data["step"] for event in events if event.kind is EventKind.STEP]
    assert steps == list(range(1, 13))
    assert events[-1].data["state"] == "done"


def test_a_service_is_backed_up_while_it_runs_and_restored_elsewhere(
    service: Running, tmp_path: Path, capsys
):
    backup, data = tmp_path / "backup", tmp_path / "elsewhere"
    assert main(["backup", str(backup), "--data", str(service.data)]) == 0
    assert main(["restore", str(backup), "--data", str(data)]) == 0
    assert f"marlaas serve --data {data}" in capsys.readouterr().out
    assert main(["backup", str(tmp_path / "x"), "--data", str(tmp_path / "nothing")]) == 2
    assert "holds no service" in capsys.readouterr().err
    restored = Running(tmp_path)
    (tmp_path / "data").symlink_to(data)
    (tmp_path / "home").symlink_to(service.folder / "home")
    restored.start()
    with restored.client(tenant="acme") as client:
        job = client.jobs.get("sums")
        assert (job.state, len(job.metrics())) == (JobState.DONE, 12)
        job.adapter("latest").download(tmp_path / "adapter")
    assert restored.stop() == 0
