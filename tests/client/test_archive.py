"""An adapter's archive becomes a folder of plain files, or nothing at all."""

import io
import tarfile
from pathlib import Path

import pytest

from marlaas.client.archive import MAX_MEMBERS, unpack
from marlaas.errors import InvalidRequest


def pack(path: Path, *members: tuple[str, bytes] | tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            tar.addfile(info, io.BytesIO(member[1]))
    return path


def link(name: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info


@pytest.fixture
def place(tmp_path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def test_plain_files_land_in_a_new_folder(tmp_path, place):
    archive = pack(tmp_path / "a.tar.gz", ("adapter_config.json", b"{}"), ("more/x", b"12"))
    folder = unpack(archive, place / "deep" / "adapter")
    assert (folder / "adapter_config.json").read_bytes() == b"{}"
    assert (folder / "more" / "x").read_bytes() == b"12"
    assert [path.name for path in folder.parent.iterdir()] == ["adapter"]


def test_a_model_comes_as_a_plain_tar(tmp_path, place):
    with tarfile.open(tmp_path / "model.tar", "w") as tar:
        info = tarfile.TarInfo("config.json")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"{}"))
    folder = unpack(tmp_path / "model.tar", place / "model")
    assert (folder / "config.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (("/tmp/x", b""), "outside"),
        (("a/../../x", b""), "outside"),
        ((r"..\x", b""), "outside"),
        (link("x", tarfile.SYMTYPE), "not a plain file"),
        (link("x", tarfile.LNKTYPE), "not a plain file"),
        (link("x", tarfile.FIFOTYPE), "not a plain file"),
        (("big", b"0" * 2000), "more than 1000 bytes"),
    ],
)
def test_what_is_not_an_adapter_is_refused_whole(tmp_path, place, member, words):
    archive = pack(tmp_path / "a.tar.gz", ("first", b"1"), member)
    with pytest.raises(InvalidRequest, match=words):
        unpack(archive, place / "adapter", max_bytes=1000)
    assert list(place.iterdir()) == []


def test_a_name_that_comes_twice_is_refused(tmp_path, place):
    archive = pack(tmp_path / "a.tar.gz", ("x", b"1"), ("x", b"2"))
    with pytest.raises(InvalidRequest, match="cannot be unpacked"):
        unpack(archive, place / "adapter")
    assert list(place.iterdir()) == []


def test_more_members_than_an_adapter_has_are_refused(tmp_path, place):
    archive = pack(tmp_path / "a.tar.gz", *[(str(n), b"") for n in range(MAX_MEMBERS + 1)])
    with pytest.raises(InvalidRequest, match="members"):
        unpack(archive, place / "adapter")


def test_a_cut_off_archive_is_refused(tmp_path, place):
    archive = pack(tmp_path / "a.tar.gz", ("x", bytes(range(256)) * 1000))
    archive.write_bytes(archive.read_bytes()[:-200])
    with pytest.raises(InvalidRequest, match="cannot be unpacked"):
        unpack(archive, place / "adapter")
    assert list(place.iterdir()) == []


def test_a_folder_with_content_is_not_written_into(tmp_path, place):
    (place / "letter.txt").write_text("dear")
    with pytest.raises(InvalidRequest, match="not empty"):
        unpack(pack(tmp_path / "a.tar.gz", ("x", b"1")), place)
