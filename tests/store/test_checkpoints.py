"""Checkpoints: whole before they are there, read by whom they are for, gone when they should be."""

import os
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from marlaas.errors import Conflict, InvalidRequest, NotFound, StoreUnavailable
from marlaas.store.checkpoints import split_path
from marlaas.store.db import Store
from marlaas.store.files import Files
from marlaas.types import CheckpointKind
from tests.store.records import (
    ACME,
    OTHER,
    RUN,
    all_rows,
    checkpoint_of,
    run_of,
    sampler_of,
    session_of,
    take_run_step,
    with_run,
)
from tests.store.test_runs import Clock, clock  # noqa: F401, a fixture

SAMPLER, WEIGHTS = CheckpointKind.SAMPLER, CheckpointKind.WEIGHTS


def folders_on_disk(store: Store, kind: CheckpointKind = SAMPLER) -> list[str]:
    folder = store.files.run(ACME, RUN) / kind.value
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def names(store: Store, *args: str) -> list[str]:
    return [one.name for one in store.checkpoints(ACME, *args)[0]]


def test_a_checkpoint_comes_back_with_its_size(store: Store, clock: Clock) -> None:  # noqa: F811
    with_run(store)
    new = checkpoint_of(
        store, kind=WEIGHTS, generation=4, has_optimizer=True, metadata={"a": "b"}, expires_s=9e9
    )
    store.files.link(take_run_step(store, 1, 1).state_path or "", new.folder / "state")
    stored = store.add_checkpoint(ACME, new)
    assert stored == replace(new, size_bytes=12, created_s=clock.now_s, used_s=clock.now_s)
    assert store.checkpoint(ACME, RUN, WEIGHTS, "final") == stored
    assert stored.path == f"tinker://{RUN}/weights/final"
    assert store.find_checkpoint(ACME, stored.path) == (ACME, stored)
    assert store.stored_bytes(ACME) == 5 + len(b"stepped") + 12
    take_run_step(store, 2, 2)
    assert (stored.folder / "state").read_bytes() == b"sssss"
    before = all_rows(store)
    assert store.add_checkpoint(ACME, new) == stored
    assert all_rows(store) == before


def test_a_link_that_is_made_again_leaves_nothing_beside_it(tmp_path: Path) -> None:
    files = Files(tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/weights").write_bytes(b"w")
    for _ in range(2):
        files.link(tmp_path / "adapter", tmp_path / "to/adapter")
        files.link(tmp_path / "adapter/weights", tmp_path / "to/state")
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["adapter", "state"]
    assert (tmp_path / "adapter/weights").stat().st_nlink == 3


def test_a_checkpoint_without_files_is_none(store: Store) -> None:
    with_run(store)
    new = checkpoint_of(store)
    (new.folder / "adapter/adapter_model.safetensors").unlink()
    with pytest.raises(StoreUnavailable, match="it was not written"):
        store.add_checkpoint(ACME, new)
    with pytest.raises(AssertionError):
        store.add_checkpoint(ACME, replace(checkpoint_of(store), name="other"))
    with pytest.raises(NotFound):
        store.add_checkpoint(ACME, checkpoint_of(store, run_id="s-1:train:5"))
    assert names(store) == []


def test_a_name_is_taken_until_it_is_overwritten(store: Store, clock: Clock) -> None:  # noqa: F811
    with_run(store)
    store.add_checkpoint(ACME, checkpoint_of(store, generation=1))
    new = checkpoint_of(store, generation=2, size=9)
    with pytest.raises(Conflict, match="there is a checkpoint tinker://"):
        store.add_checkpoint(ACME, new)
    assert store.add_checkpoint(ACME, new, overwrite=True).size_bytes == 9
    assert folders_on_disk(store) == ["final@2"]
    store.add_checkpoint(ACME, checkpoint_of(store, kind=WEIGHTS))
    store.set_checkpoint_ttl(ACME, RUN, SAMPLER, "final", expires_s=clock.now_s)
    assert store.add_checkpoint(ACME, checkpoint_of(store, generation=3)).size_bytes == 7
    assert folders_on_disk(store) == ["final@3"]


def test_checkpoints_come_in_pages_newest_first_without_unnamed_ones(
    store: Store,
    clock: Clock,  # noqa: F811
) -> None:
    with_run(store)
    store.add_run(ACME, run_of(1))
    for number, name in enumerate(["a", "#1", "b", "c"]):
        run_id = run_of(1).run_id if name == "c" else RUN
        store.add_checkpoint(ACME, checkpoint_of(store, name, generation=number, run_id=run_id))
        clock.now_s += 1.0
    assert names(store) == ["c", "b", "a"]
    assert names(store, RUN) == ["b", "a"]
    page, total = store.checkpoints(ACME, limit=1, offset=1)
    assert ([one.name for one in page], total) == (["b"], 3)
    assert store.checkpoints(OTHER) == ([], 0)
    assert store.checkpoint(ACME, RUN, SAMPLER, "#1").is_ephemeral


def test_another_tenant_reads_what_is_published_and_nothing_else(store: Store) -> None:
    with_run(store)
    stored = store.add_checkpoint(ACME, checkpoint_of(store))
    before = all_rows(store)
    calls = (
        lambda: store.checkpoint(OTHER, RUN, SAMPLER, "final"),
        lambda: store.delete_checkpoint(OTHER, RUN, SAMPLER, "final"),
        lambda: store.publish_checkpoint(OTHER, RUN, SAMPLER, "final"),
        lambda: store.set_checkpoint_ttl(OTHER, RUN, SAMPLER, "final", expires_s=None),
    )
    reads = (
        lambda: store.find_checkpoint(OTHER, stored.path),
        lambda: store.use_checkpoint(OTHER, stored.path),
        lambda: store.copy_checkpoint(OTHER, stored.path, "s-2:train:0"),
    )
    for call in (*calls, *reads):
        with pytest.raises(NotFound) as foreign:
            call()
        assert str(foreign.value) == f"no checkpoint {stored.path}"
    assert store.prune_ephemeral(OTHER, RUN, keep_newest=0, unused_for_s=-1.0) == 0
    assert store.checkpoints(OTHER, RUN) == ([], 0)
    assert all_rows(store) == before
    store.publish_checkpoint(ACME, RUN, SAMPLER, "final")
    assert store.find_checkpoint(OTHER, stored.path)[0] == ACME
    for call in calls:
        with pytest.raises(NotFound):
            call()
    store.publish_checkpoint(ACME, RUN, SAMPLER, "final", is_public=False)
    with pytest.raises(NotFound):
        store.find_checkpoint(OTHER, stored.path)


def test_a_copy_has_files_of_its_own(store: Store) -> None:
    with_run(store)
    stored = store.add_checkpoint(ACME, checkpoint_of(store, metadata={"a": "b"}))
    store.publish_checkpoint(ACME, RUN, SAMPLER, "final")
    store.add_session(OTHER, session_of("s-2"))
    with pytest.raises(NotFound, match="no run 's-2:train:0'"):
        store.copy_checkpoint(OTHER, stored.path, "s-2:train:0")
    store.add_run(OTHER, run_of(session_id="s-2"))
    copy = store.copy_checkpoint(OTHER, stored.path, "s-2:train:0", expires_s=9e9)
    assert store.copy_checkpoint(OTHER, stored.path, "s-2:train:0") == copy
    assert (copy.is_public, copy.metadata, copy.expires_s) == (False, {"a": "b"}, 9e9)
    store.delete_checkpoint(ACME, RUN, SAMPLER, "final")
    assert (copy.folder / "adapter/adapter_model.safetensors").read_bytes() == b"a" * 7
    assert store.stored_bytes(OTHER) == 7
    with pytest.raises(NotFound):
        store.copy_checkpoint(OTHER, stored.path, "s-2:train:0")


def test_an_expired_checkpoint_is_found_by_nobody_and_goes(
    store: Store,
    clock: Clock,  # noqa: F811
) -> None:
    with_run(store)
    stored = store.add_checkpoint(ACME, checkpoint_of(store))
    store.add_checkpoint(ACME, checkpoint_of(store, "kept"))
    store.set_checkpoint_ttl(ACME, RUN, SAMPLER, "final", expires_s=clock.now_s + 5.0)
    store.set_checkpoint_ttl(ACME, RUN, SAMPLER, "kept", expires_s=clock.now_s + 5.0)
    store.set_checkpoint_ttl(ACME, RUN, SAMPLER, "kept", expires_s=None)
    assert store.drop_expired() == 0
    clock.now_s += 5.0
    for call in (
        lambda: store.find_checkpoint(ACME, stored.path),
        lambda: store.use_checkpoint(ACME, stored.path),
        lambda: store.checkpoint(ACME, RUN, SAMPLER, "final"),
        lambda: store.set_checkpoint_ttl(ACME, RUN, SAMPLER, "final", expires_s=None),
    ):
        with pytest.raises(NotFound):
            call()
    assert names(store) == ["kept"]
    assert store.drop_expired() == 1
    assert folders_on_disk(store) == ["kept@0"]


def test_unnamed_checkpoints_go_but_the_newest_and_those_in_use(
    store: Store,
    clock: Clock,  # noqa: F811
) -> None:
    with_run(store)
    for number in range(6):
        store.add_checkpoint(ACME, checkpoint_of(store, f"#{number}", generation=number))
        clock.now_s += 1.0
    store.add_checkpoint(ACME, checkpoint_of(store, "named"))
    path = f"tinker://{RUN}/sampler_weights/"
    store.add_sampler(ACME, sampler_of(checkpoint_path=f"{path}#1"))
    assert store.prune_ephemeral(ACME, RUN, keep_newest=2) == 0
    clock.now_s += 3600.0
    store.use_checkpoint(ACME, f"{path}#0")
    store.use_sampler(ACME, sampler_of().sampler_id)
    assert store.prune_ephemeral(ACME, RUN, keep_newest=2) == 2
    assert folders_on_disk(store) == ["#0@0", "#1@1", "#4@4", "#5@5", "named@0"]
    store.touch_session(ACME, "s-1")
    assert store.drop_expired() == 0
    store.finish_session(ACME, "s-1", "success")
    assert store.drop_expired() == 2
    clock.now_s += 3600.0
    assert store.drop_expired() == 2
    assert folders_on_disk(store) == ["named@0"]
    assert store.use_sampler(ACME, sampler_of().sampler_id).used_s == clock.now_s


def test_what_was_found_for_use_is_not_pruned_meanwhile(store: Store, url: str | None) -> None:
    """One thread makes unnamed checkpoints and prunes all that nobody used, another uses them."""
    with_run(store)
    other = Store.open(store.files.root, url=url)
    stop = threading.Event()
    used: list[Path] = []

    def use() -> None:
        while not stop.is_set():
            for number in range(40):
                path = f"tinker://{RUN}/sampler_weights/#{number}"
                with suppress(NotFound):
                    used.append(other.use_checkpoint(OTHER, path)[1].folder)

    using = threading.Thread(target=use)
    using.start()
    try:
        for number in range(40):
            new = checkpoint_of(store, f"#{number}", is_public=True, created_s=1.0)
            store.add_checkpoint(ACME, new)
            store.prune_ephemeral(ACME, RUN, keep_newest=0)
    finally:
        stop.set()
        using.join()
        other.close()
    assert all((folder / "adapter/adapter_model.safetensors").exists() for folder in used)


def test_what_a_kill_left_without_a_row_goes_later(store: Store) -> None:
    with_run(store)
    take_run_step(store, 1, 1)
    store.add_checkpoint(ACME, checkpoint_of(store, generation=1))
    strays = [
        checkpoint_of(store, generation=2).folder,
        checkpoint_of(store, run_id="s-1:train:9").folder,
        Path(store.files.run_state(ACME, RUN, 7)),
    ]
    strays[2].write_bytes(b"s")
    writing = checkpoint_of(store, "writing").folder
    for path in (*strays, store.run(ACME, RUN).state_path or "", store.files.run(ACME, RUN)):
        os.utime(path, (1.0, 1.0))
    store.drop_expired()
    assert not any(path.exists() for path in strays)
    assert writing.exists()
    assert store.checkpoint(ACME, RUN, SAMPLER, "final").folder.exists()
    assert Path(store.run(ACME, RUN).state_path or "").exists()


@pytest.mark.parametrize(
    "path",
    [
        "",
        "final",
        "tinker://a/weights",
        "tinker://a/other/b",
        "tinker://a/weights/b/c",
        "/etc/passwd",
    ],
)
def test_what_is_no_path_is_said(store: Store, path: str) -> None:
    with pytest.raises(InvalidRequest, match="a checkpoint is tinker://RUN/KIND/NAME"):
        store.find_checkpoint(ACME, path)


def test_a_path_names_run_kind_and_name() -> None:
    assert split_path("tinker://s-1:train:0/weights/a.b") == ("s-1:train:0", WEIGHTS, "a.b")


@pytest.mark.parametrize("name", ["..", "#..", "##", "a" * 300, "\0"])
def test_strange_names_find_nothing(store: Store, name: str) -> None:
    with pytest.raises((NotFound, InvalidRequest)):
        store.find_checkpoint(ACME, f"tinker://{RUN}/weights/{name}")
