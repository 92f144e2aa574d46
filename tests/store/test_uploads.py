"""Uploads: stored by content, found by name, kept while a job needs them."""

import hashlib

import pytest

from marlaas.errors import InvalidRequest, NotFound, StoreUnavailable
from marlaas.store.db import Store
from marlaas.types import JobState, UploadKind
from tests.store.records import ACME, OTHER, spec_of

PROMPTS, ENVIRONMENT = UploadKind.PROMPTS, UploadKind.ENVIRONMENT
ONE, TWO = b'{"prompt": "1"}\n', b'{"prompt": "2"}\n'


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def files_of(store: Store, tenant: str = ACME) -> set[str]:
    return {path.name for path in (store.files.root / "uploads" / tenant).iterdir()}


def test_an_upload_is_found_by_name_and_by_digest(store: Store) -> None:
    upload = store.put_upload(ACME, PROMPTS, "mine", ONE, 1)
    assert (upload.digest, upload.size_bytes, upload.num_lines) == (digest_of(ONE), len(ONE), 1)
    assert store.upload(ACME, PROMPTS, "mine") == upload
    assert store.upload(ACME, PROMPTS, upload.digest) == upload
    assert store.uploads(ACME) == [upload]
    assert store.read_upload(ACME, upload.digest) == ONE
    for find in (
        lambda: store.upload(ACME, ENVIRONMENT, "mine"),
        lambda: store.upload(OTHER, PROMPTS, "mine"),
        lambda: store.upload(OTHER, PROMPTS, upload.digest),
        lambda: store.read_upload(OTHER, upload.digest),
        lambda: store.read_upload(ACME, "../../store.db"),
        lambda: store.delete_upload(OTHER, PROMPTS, "mine"),
    ):
        with pytest.raises(NotFound):
            find()


def test_a_content_is_stored_once_a_tenant(store: Store) -> None:
    for name in ("a", "b", "a"):
        store.put_upload(ACME, PROMPTS, name, ONE, 1)
    store.put_upload(OTHER, PROMPTS, "a", ONE, 1)
    assert [upload.name for upload in store.uploads(ACME)] == ["a", "b"]
    assert files_of(store) == files_of(store, OTHER) == {digest_of(ONE)}
    assert store.stored_bytes(ACME) == len(ONE)
    store.delete_upload(ACME, PROMPTS, "a")
    assert files_of(store) == {digest_of(ONE)}
    store.delete_upload(ACME, PROMPTS, "b")
    assert files_of(store) == set()
    assert store.stored_bytes(ACME) == 0
    assert files_of(store, OTHER) == {digest_of(ONE)}


def test_a_name_goes_on_to_a_new_content_and_the_old_one_goes(store: Store) -> None:
    store.put_upload(ACME, PROMPTS, "mine", ONE, 1)
    newer = store.put_upload(ACME, PROMPTS, "mine", TWO, 1)
    assert store.uploads(ACME) == [newer]
    assert files_of(store) == {digest_of(TWO)}


def test_a_job_keeps_the_content_that_it_names(store: Store) -> None:
    upload = store.put_upload(ACME, PROMPTS, "mine", ONE, 1)
    env = {"family": "custom", "prompts": upload.digest}
    store.add_job(ACME, spec_of(env=env))
    store.add_job(ACME, spec_of(name="again", env=env))
    store.put_upload(ACME, PROMPTS, "mine", TWO, 1)
    store.delete_upload(ACME, PROMPTS, "mine")
    assert store.uploads(ACME) == []
    assert store.read_upload(ACME, upload.digest) == ONE
    assert store.upload(ACME, PROMPTS, upload.digest).name == "mine"
    for name in ("sums", "again"):
        assert files_of(store) == {digest_of(ONE)}
        store.set_job_state(ACME, name, JobState.CANCELLED)
        store.delete_job(ACME, name)
    assert files_of(store) == set()


def test_a_job_that_names_no_upload_of_its_tenant_is_refused(store: Store) -> None:
    upload = store.put_upload(OTHER, PROMPTS, "mine", ONE, 1)
    with pytest.raises(NotFound, match="upload it first"):
        store.add_job(ACME, spec_of(env={"family": "custom", "prompts": upload.digest}))
    assert store.jobs(ACME) == [] and store.events(ACME) == []


def test_the_same_content_may_be_of_two_kinds(store: Store) -> None:
    for kind in (PROMPTS, ENVIRONMENT):
        store.put_upload(ACME, kind, "mine", b"", 0)
    store.delete_upload(ACME, PROMPTS, "mine")
    assert store.read_upload(ACME, store.upload(ACME, ENVIRONMENT, "mine").digest) == b""


def test_a_damaged_file_is_found_out(store: Store) -> None:
    upload = store.put_upload(ACME, PROMPTS, "mine", ONE, 1)
    path = store.files.upload(ACME, upload.digest)
    path.write_bytes(TWO)
    with pytest.raises(StoreUnavailable, match="is damaged: upload it again"):
        store.read_upload(ACME, upload.digest)
    path.unlink()
    with pytest.raises(StoreUnavailable, match="No such file"):
        store.read_upload(ACME, upload.digest)
    store.put_upload(ACME, PROMPTS, "mine", ONE, 1)
    assert store.read_upload(ACME, upload.digest) == ONE


@pytest.mark.parametrize("name", ["", "../x", "a b"])
def test_names_of_uploads_are_plain(store: Store, name: str) -> None:
    with pytest.raises(InvalidRequest):
        store.put_upload(ACME, PROMPTS, name, ONE, 1)
