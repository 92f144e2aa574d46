"""The commands against a real service, as a shell has them: what they print, and how they exit."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from marlaas.cli.main import main
from tests.client.running import ROOT, Running

pytestmark = pytest.mark.slow

JOBS = """\
run: {base: tiny}
defaults: {steps: 3, prompts_per_step: 2, group_size: 4, eval_prompts: 8}
jobs:
  - {name: sums, env: {family: math}}
  - {name: lookup, env: {family: search}, replicate: 2}
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory):
    running = Running(tmp_path_factory.mktemp("service"))
    running.start()
    with running.client() as operator:
        operator.tenants.create("acme")
    yield running
    assert running.stop() == 0


@pytest.fixture
def ask(service: Running, monkeypatch, capsys):
    """Return a function that runs a command as the operator and returns code and output."""
    monkeypatch.setenv("HOME", str(service.folder / "home"))
    monkeypatch.delenv("MARLAAS_URL", raising=False)
    monkeypatch.delenv("MARLAAS_API_KEY", raising=False)

    def ask(*argv: str) -> tuple[int, str]:
        code = main(argv)
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return ask


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("jobs") / "jobs.yaml"
    path.write_text(JOBS)
    return path


def test_a_job_file_is_handed_over_watched_and_read(ask, jobs: Path, tmp_path: Path):
    code, words = ask("submit", str(jobs), "--tenant", "acme")
    assert code == 0
    assert all(f"acme/{name}" in words for name in ("sums", "lookup-0", "lookup-1"))
    code, words = ask("watch", "sums", "--tenant", "acme")
    assert code == 0
    assert "acme/sums  done" in words
    code, words = ask("watch")
    assert code == 0
    assert ask("submit", str(jobs), "--tenant", "acme")[0] == 0

    code, words = ask("jobs", "--json")
    rows = {row["name"]: row for row in json.loads(words)}
    assert {row["state"] for row in rows.values()} == {"done"}
    assert rows["sums"]["tenant"] == "acme"
    assert len(ask("jobs")[1].splitlines()) == 4

    code, words = ask("rollouts", "sums", "--tenant", "acme", "--step", "1", "--json")
    groups = json.loads(words)
    assert len(groups) == 2
    shown = ask("rollouts", "sums", "--tenant", "acme", "--show", str(groups[0]["index"]))[1]
    assert "assistant" in shown and "trained on in step 1" in shown
    assert "sums --show" in ask("rollouts", "sums", "--tenant", "acme")[1]

    assert "latest" in ask("adapters", "sums", "--tenant", "acme")[1]
    out = tmp_path / "adapter"
    assert ask(
        "adapters", "sums", "download", "--version", "3", "--out", str(out), "--tenant", "acme"
    ) == (0, f"PEFT folder: {out}\n")
    assert (out / "adapter_config.json").is_file()
    words = ask("adapters", "sums", "promote", "--version", "3", "--tenant", "acme")[1]
    assert words == "sums@promoted is now version 3\n"
    assert ask("logs", "sums", "--tenant", "acme") == (0, "")

    code, words = ask("chat", "Hello", "--job", "sums@promoted", "--tenant", "acme")
    assert (code, bool(words.strip())) == (0, True)
    code, words = ask("usage", "--json")
    assert json.loads(words)["acme"]["total"]["sampled_tokens"] > 0
    assert "sums" in ask("usage", "--tenant", "acme")[1]
    assert "stored" in ask("usage")[1]
    assert "max runs" in ask("tenants")[1]
    assert ask("runs")[1].startswith("No runs.")


def test_a_file_of_another_tenant_is_refused_and_so_is_another_job_of_a_name(
    ask, service: Running, jobs: Path, tmp_path: Path, monkeypatch
):
    other = tmp_path / "other.yaml"
    other.write_text("jobs: [{tenant: birch, name: a, env: {family: math}}]")
    with service.client() as operator:
        monkeypatch.setenv("MARLAAS_API_KEY", operator.tenants.add_key("acme").secret)
    code, words = ask("submit", str(other))
    assert code == 2 and "is for birch; the key is acme's" in words
    ask("submit", str(jobs))
    other.write_text(JOBS.replace("steps: 3", "steps: 4"))
    code, words = ask("submit", str(other))
    assert code == 2 and "marlaas: 3 problems" in words and "acme/sums: " in words
    assert "state" not in words.split("marlaas:")[0]


def test_a_job_is_named_as_the_tables_show_it(ask, service: Running, jobs: Path, monkeypatch):
    assert ask("submit", str(jobs), "--tenant", "acme")[0] == 0
    for command in (("logs",), ("rollouts",), ("adapters",), ("watch",)):
        assert ask(*command, "acme/sums")[0] == 0, command
        code, words = ask(*command, "sums")
        assert code == 2 and "expected --tenant NAME, or NAME/sums" in words
        code, words = ask(*command, "birch/sums", "--tenant", "acme")
        assert code == 2 and "is not of --tenant acme" in words
    assert ask("chat", "Hello", "--job", "acme/sums@latest")[0] == 0
    with service.client() as operator:
        monkeypatch.setenv("MARLAAS_API_KEY", operator.tenants.add_key("acme").secret)
    assert ask("logs", "acme/sums")[0] == 0
    code, words = ask("logs", "birch/sums")
    assert code == 2 and "the key is acme's; expected acme/sums" in words
    assert "acme/" not in ask("jobs")[1] and "sums" in ask("jobs")[1]


def test_jobs_are_moved_by_name(ask):
    with_steps = {"env": {"family": "math"}, "steps": 5000, "eval_prompts": 0}
    code = ask("jobs", "--tenant", "acme")[0]
    assert code == 0
    from marlaas.client import Client

    with Client(tenant="acme") as client:
        client.jobs.create(name="long", **with_steps)
    assert ask("pause", "long", "--tenant", "acme") == (0, "long: paused (paused by the tenant)\n")
    assert ask("resume", "long", "--tenant", "acme")[0] == 0
    following = threading.Timer(1.0, lambda: _cancel("long"))
    following.start()
    assert ask("logs", "long", "-f", "--tenant", "acme") == (0, "")
    following.join()
    assert ask("watch", "long", "--tenant", "acme")[0] == 1
    assert ask("delete", "long", "--tenant", "acme") == (0, "long: deleted\n")
    code, words = ask("delete", "long", "--tenant", "acme")
    assert code == 1 and "no job" in words


def _cancel(name: str) -> None:
    from marlaas.client import Client

    with Client(tenant="acme") as client:
        client.jobs.get(name).cancel()


def test_an_operator_keeps_tenants_and_keys(ask, monkeypatch):
    assert "birch" in ask("tenants", "add", "birch", "--tokens-a-day", "1000")[1]
    assert "no limit" in ask("tenants", "set", "birch", "--tokens-a-day", "none")[1]
    rows = json.loads(ask("tenants", "--json")[1])
    assert {row["tenant"] for row in rows} == {"acme", "birch"}
    key = json.loads(ask("keys", "add", "--tenant", "birch", "--label", "ci", "--json")[1])
    assert "ci" in ask("keys", "--tenant", "birch")[1]
    with monkeypatch.context() as patch:
        patch.setenv("MARLAAS_API_KEY", key["secret"])
        assert ask("jobs")[1].startswith("No jobs.")
        code, words = ask("top")
        assert code == 1 and "operator" in words
    assert ask("keys", "revoke", key["key_id"], "--tenant", "birch")[0] == 0
    assert "revoked" in ask("keys", "--tenant", "birch")[1]
    assert "first" in ask("keys", "--operator")[1]
    code, words = ask("tenants", "purge", "birch")
    assert code == 2 and "--yes" in words
    assert ask("tenants", "purge", "birch", "--yes")[0] == 0


def test_the_machine_is_shown(ask):
    code, words = ask("top")
    assert code == 0
    assert "engine-0" in words and "acme" in words
    assert json.loads(ask("top", "--json")[1])["machine"]["base"] == "tiny"


def test_the_examples_run_as_they_stand(service: Running, tmp_path: Path):
    with service.client() as operator:
        operator.tenants.create("reader")
        key = operator.tenants.add_key("reader").secret
    env = {**service.env, "MARLAAS_API_KEY": key}
    out = tmp_path / "adapter"
    words = run_example("train_math.py", "--steps", "2", "--out", str(out), env=env)
    assert "sums is done after 2 steps" in words
    assert "held-out success of version 2" in words
    assert (out / "adapter_model.safetensors").is_file()
    words = run_example("custom_env.py", "--steps", "2", env=env)
    assert "version 2: held-out reward" in words and "brief-sums@latest: " in words


def run_example(name: str, *arguments: str, env: dict[str, str]) -> str:
    path = ROOT / "examples" / name
    assert len(path.read_text().splitlines()) < 60
    ended = subprocess.run(
        [sys.executable, str(path), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
