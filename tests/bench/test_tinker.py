"""The benchmark of Tinker servers sums up and compares what it measured, and measures ours."""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from marlaas.bench import tinker, tinker_client
from marlaas.bench.processes import descendants
from marlaas.bench.tinker_client import QUICK, Plan, Row
from marlaas.cli.main import benchmarks
from marlaas.errors import InvalidRequest


def row(name: str, tenants: int = 1, **changes) -> dict:
    return Row(name=name, tenants=tenants, **changes).as_json()


def test_a_row_has_the_median_and_the_tokens_a_second_of_it():
    measured = row("sample", seconds=(4.0, 1.0, 2.0), tokens=100, first_s=9.0)
    assert measured["median_s"] == 2.0
    assert measured["tokens_per_s"] == 50.0
    assert row("save", seconds=(1.0,))["tokens_per_s"] is None
    assert row("load", error="refused")["median_s"] is None


def test_start_up_and_warm_up_stand_apart_from_what_is_measured():
    rows = [
        row("create", first_s=30.0, seconds=(0.5, 0.5)),
        row("sample", first_s=100.0, seconds=(1.0,), tokens=10),
        row("save", seconds=(0.1,)),
        row("load", error="refused"),
    ]
    summary = tinker.summarize({"bench": "x", "rows": rows}, start_s=10.0, memory_gb=2.0)
    assert summary["ready_s"] == 40.0
    assert summary["warm_up_s"] == 130.0
    assert summary["failed"] == ["load, 1"]
    assert "bench" not in summary


def test_nothing_is_said_of_the_start_of_a_server_that_ran_already():
    summary = tinker.summarize({"rows": []}, start_s=None, memory_gb=None)
    assert summary["start_s"] is summary["ready_s"] is None


def test_two_servers_are_compared_by_tokens_where_there_are_some_and_by_seconds_elsewhere():
    ours = [
        row("sample", seconds=(1.0,), tokens=100),
        row("save", seconds=(0.1,)),
        row("load", seconds=(0.1,)),
        row("sample", 8, seconds=(1.0,), tokens=100),
    ]
    others = [
        row("sample", seconds=(2.0,), tokens=50),  # its answers ended early
        row("save", seconds=(0.3,)),
        row("load", error="refused"),
    ]
    ratios = tinker.times_as_fast(ours, others)
    assert ratios == pytest.approx({"sample, 1": 4.0, "save, 1": 3.0})


def test_what_was_measured_with_another_plan_is_not_compared(tmp_path):
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"bench": "tinker", "plan": asdict(QUICK), "rows": []}))
    assert tinker._read_other(file, QUICK)["rows"] == []
    with pytest.raises(InvalidRequest, match="was measured with"):
        tinker._read_other(file, replace(QUICK, samples=3))


def test_a_plan_goes_through_flags_unchanged():
    plan = Plan(tenants=3, samples=5, limit_s=7.5)
    parser = argparse.ArgumentParser()
    tinker_client.add_flags(parser)
    assert tinker_client.plan_of(parser.parse_args(tinker_client.flags_of(plan))) == plan
    assert tinker_client.plan_of(parser.parse_args(["--quick"])) == QUICK


def test_only_the_benchmark_is_one_by_name_not_its_client():
    assert "tinker" in benchmarks()
    assert "tinker_client" not in benchmarks()


def test_log_likelihoods_are_compared_where_both_are_known():
    assert tinker.difference(2.0, 2.5) == 0.5
    assert tinker.difference(None, 2.5) is None


@pytest.mark.slow
@pytest.mark.skipif(find_spec("tinker") is None, reason="needs the tinker SDK")
def test_every_verb_of_our_service_is_measured_and_none_is_refused(tmp_path, capfd):
    file = tmp_path / "ours.json"
    flags = ["--quick", "--tenants", "2", "--rl-steps", "1", "--out", str(file)]
    assert tinker.main(flags) == 0
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result == json.loads(file.read_text())
    assert result["failed"] == []
    assert result["base_model"] == "tiny"
    assert {(row["name"], row["tenants"]) for row in result["rows"]} == {
        *((name, 1) for name in ("create", "forward_backward", "optim_step", "publish")),
        *((name, 1) for name in ("save", "load")),
        *((name, number) for name in ("train step", "sample", "rl loop") for number in (1, 2)),
    }
    assert all(row["median_s"] > 0 for row in result["rows"])
    assert next(row for row in result["rows"] if row["name"] == "sample")["tokens"] == 16
    assert 0 < result["nll"] < 20
    assert result["start_s"] < result["ready_s"]
    assert result["memory_gb"] > 0.1


def test_a_server_ends_with_the_benchmark_that_is_told_to_end(tmp_path):
    """Told while it waits for a server that never answers."""
    ready_file = tmp_path / "ready"
    script = f"import time; open({str(ready_file)!r}, 'w').write('1'); time.sleep(600)"
    program = (
        "from marlaas.bench.tinker import _started\n"
        f"with _started([{sys.executable!r}, '-c', {script!r}], 1, [], ''): pass"
    )
    bench = subprocess.Popen([sys.executable, "-c", program])
    try:
        while not (ready_file.exists() and ready_file.read_text()):
            assert bench.poll() is None
            time.sleep(0.05)
        (server,) = descendants(bench.pid)
        bench.terminate()
        assert bench.wait(60) == 143
        assert not server.is_alive
    finally:
        bench.kill()


def test_without_the_sdk_it_says_how_to_get_it(tmp_path):
    """Also: the client needs nothing of this package, and is not misled by the file beside it."""
    numpy_only = tmp_path / "site"
    numpy_only.mkdir()
    numpy = find_spec("numpy")
    assert numpy is not None
    assert numpy.origin is not None
    for path in Path(numpy.origin).parents[1].glob("numpy*"):
        (numpy_only / path.name).symlink_to(path)
    done = subprocess.run(
        [sys.executable, "-S", tinker_client.__file__, "--server", "http://127.0.0.1:1"],
        env={"PYTHONPATH": str(numpy_only)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "pip install tinker" in done.stderr
