"""The command line answers every mistake with what would be right, and never with a traceback."""

import pytest

from marlaas import __version__
from marlaas.cli.main import benchmarks, main

GOOD = "jobs: [{tenant: a, name: b, env: {family: math}}]"


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"marlaas {__version__}\n"


def test_no_command_prints_help(capsys):
    assert main([]) == 2
    out = capsys.readouterr().out
    for command in ("run", "report", "chat", "doctor", "bench"):
        assert f"\n    {command}" in out


def test_every_problem_of_a_job_file_is_printed_and_the_exit_code_is_2(tmp_path, capsys):
    path = tmp_path / "jobs.yaml"
    path.write_text("jobs:\n  - {tenant: a/b, name: c, env: {family: math}, steps: 0}\n")
    assert main(["run", str(path), "--out", str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "marlaas: 2 problems"
    assert lines[1].startswith("  jobs[0].tenant: got 'a/b'; expected ")
    assert lines[2] == "  jobs[0].steps: got 0; expected a whole number from 1 to 100000 (line 2)"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "0"], "--workers: got 0"),
        (["--base", "no-such-base"], "no-such-base"),
        (["--resume"], "--resume: got no folder"),
        (["--resume", "nowhere"], "holds no run"),
    ],
)
def test_flags_that_cannot_be_honoured_are_refused(tmp_path, capsys, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.yaml").write_text(GOOD)
    assert main(["run", "jobs.yaml", *flags]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.yaml"]


def test_an_unknown_benchmark_is_refused_with_the_known_ones(capsys):
    assert main(["bench", "nothing"]) == 2
    assert "bench: got 'nothing'; expected one of " in capsys.readouterr().err


def test_benchmarks_are_listed_with_their_purpose(capsys):
    assert main(["bench"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(benchmarks())


def test_a_report_of_nothing_fails_without_a_traceback(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none")]) == 1
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [["--temperature", "-1"], ["--top-p", "0"], ["--max-tokens", "0"], ["--top-k", "-1"]]
)
def test_chat_refuses_sampling_that_means_nothing(flags, capsys):
    assert main(["chat", *flags]) == 2
    assert f"{flags[0]}: got" in capsys.readouterr().err
