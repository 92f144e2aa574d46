"""The doctor finds what is there and says what to do about what is not."""

import argparse

from marlaas.cli import doctor


def test_a_machine_that_runs_these_tests_lacks_nothing_essential(capsys):
    assert doctor.command(argparse.Namespace()) == 0
    out = capsys.readouterr().out
    for name in ("python", "torch", "cores", "memory", "disk", "sandbox", "base tiny", "peft"):
        assert f"{name} " in out


def test_a_missing_package_comes_with_what_to_do():
    finding = doctor._package("no_such_package", is_essential=True)
    assert finding.status is doctor.Status.MISSING
    assert "pip install no_such_package" in finding.advice
    assert doctor._package("no_such_package").status is doctor.Status.ABSENT


def test_a_broken_torch_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, "_TORCH_PROBE", "raise ImportError('libgomp is gone')")
    (finding,) = doctor._torch()
    assert finding.status is doctor.Status.MISSING
    assert finding.detail == "ImportError: libgomp is gone"


def test_the_share_of_cores_of_a_container_is_read(tmp_path):
    path = tmp_path / "cpu.max"
    path.write_text("150000 100000\n")
    assert doctor._cpu_quota(path) == 1.5
    path.write_text("max 100000\n")
    assert doctor._cpu_quota(path) is None
    assert doctor._cpu_quota(tmp_path / "absent") is None
