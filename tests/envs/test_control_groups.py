"""Control groups are used where they are delegated, and nobody else's is touched."""

import os
import subprocess
from pathlib import Path

import pytest

from marlaas.envs import control_groups
from marlaas.envs.control_groups import ContainerGroup, delegated


def tree(tmp_path: Path, *, controllers: str = "cpu memory pids", enabled: str = "") -> tuple:
    """Make what a service with a delegated group sees. Returns (own, mount, parent)."""
    parent = tmp_path / "system.slice" / "marlaas.service"
    (parent / "server").mkdir(parents=True)
    (parent / "cgroup.controllers").write_text(controllers)
    (parent / "cgroup.subtree_control").write_text(enabled)
    (parent / "cgroup.procs").write_text("")
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/other\n0::/system.slice/marlaas.service/server\n")
    return own, tmp_path, parent


def mark(folder: Path) -> None:
    try:
        os.setxattr(folder, "user.delegate", b"1")
    except OSError:
        pytest.skip("this file system has no extended attributes")


def test_a_delegated_parent_is_used_and_its_controllers_are_switched_on(tmp_path):
    own, mount, parent = tree(tmp_path, enabled="pids")
    mark(parent)
    assert delegated(own, mount) == parent
    assert (parent / "cgroup.subtree_control").read_text() == "+memory"


def test_without_the_controllers_or_the_right_there_is_none(tmp_path):
    own, mount, parent = tree(tmp_path, controllers="cpu")
    mark(parent)
    assert delegated(own, mount) is None
    (parent / "cgroup.controllers").write_text("memory pids")
    assert delegated(own, mount) == parent
    os.removexattr(parent, "user.delegate")
    assert delegated(own, mount) == (None if os.geteuid() == 0 else parent)
    own.write_text("0::/\n")
    assert delegated(own, mount) is None
    own.write_text("4:memory:/old\n")
    assert delegated(own, mount) is None
    assert delegated(tmp_path / "absent", mount) is None


def test_a_group_bounds_a_container_and_is_entered_before_it_starts(tmp_path):
    group = ContainerGroup.make(tmp_path, "one", memory_bytes=1 << 28, max_processes=3)
    assert int((group.folder / "memory.max").read_text()) > 1 << 28
    assert int((group.folder / "pids.max").read_text()) == 3 + control_groups.NUM_MACHINERY
    with subprocess.Popen(group.entering(["/bin/cat"]), stdin=subprocess.PIPE) as process:
        process.communicate(b"")
    assert int((group.folder / "cgroup.procs").read_text()) == process.pid
    assert not group.remove(), "a folder with files in it stands for one with processes"
    for file in group.folder.iterdir():
        file.unlink()
    assert group.remove() and group.remove() and not group.folder.exists()


def test_what_holds_is_said_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(control_groups, "delegated_here", lambda: None)
    assert control_groups.in_words() == "memory and processes are bounded by resource limits"
    monkeypatch.setattr(control_groups, "delegated_here", lambda: tmp_path)
    assert control_groups.in_words().endswith(f"and control groups in {tmp_path}")
