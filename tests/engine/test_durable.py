"""What a rename promises, and what is synced before a name may be relied on."""

import os
from pathlib import Path

import pytest

from marlaas.engine.durable import beside, put_file, put_folder


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the order in which files are synced and names given; both still happen."""
    log: list[str] = []
    sync, replace, rename = os.fsync, os.replace, os.rename

    def noting_sync(descriptor: int) -> None:
        log.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def noting_replace(source: Path, target: Path) -> None:
        log.append(f"name {target.name}")
        replace(source, target)

    def noting_rename(source: Path, target: Path) -> None:
        log.append(f"name {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(os, "replace", noting_replace)
    monkeypatch.setattr(os, "rename", noting_rename)
    return log


def test_contents_reach_the_disk_before_the_name_and_the_names_above_before_the_return(
    log: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "versions" / "v1" / "state"
    file.parent.mkdir(parents=True)
    beside(file, "new").write_text("weights")
    put_file(beside(file, "new"), file, is_synced=True)
    assert log[:4] == ["sync .state.new", "name state", "sync v1", "sync versions"]

    log.clear()
    folder = file.parent / "adapter"
    beside(folder, "new").mkdir()
    (beside(folder, "new") / "weights").write_text("weights")
    put_folder(beside(folder, "new"), folder, is_synced=True)
    assert log[:4] == ["sync weights", "sync .adapter.new", "name adapter", "sync v1"]
    assert "sync versions" in log


def test_without_power_loss_in_mind_nothing_is_synced(log: list[str], tmp_path: Path) -> None:
    for text in ("old", "new"):
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "weights").write_text(text)
        put_folder(tmp_path / "made", tmp_path / "adapter", is_synced=False)
        (tmp_path / "file").write_text(text)
        put_file(tmp_path / "file", tmp_path / "state", is_synced=False)
    assert not [entry for entry in log if entry.startswith("sync")]
    assert (tmp_path / "adapter" / "weights").read_text() == "new"
    assert (tmp_path / "state").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "state"]
