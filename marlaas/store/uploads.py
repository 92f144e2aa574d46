"""Uploads: files of a tenant, stored by content and found by name.

    put_upload ─► content (digest) ◄── name          a name may go on to another content
                        ▲
                        └── job names it by digest   the content stays as long as the job does

- The file is on the disk before its row is; a file without a row is taken up by the same upload.
- A content goes when no name and no job is left that has it.
"""

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import bindparam

from marlaas import runtime
from marlaas.errors import NotFound, StoreUnavailable
from marlaas.store.database import insert_into
from marlaas.store.files import check_segment, disk_errors, is_digest
from marlaas.store.schema import job_uploads, upload_names, uploads
from marlaas.store.usage import UsageRecords
from marlaas.types import TenantId, Upload, UploadKind


@cache
def _add_content(dialect: str) -> sa.Executable:
    insert = insert_into(dialect, uploads)
    return insert.on_conflict_do_update(
        index_elements=["tenant_id", "kind", "digest"], set_={"name": insert.excluded.name}
    )


@cache
def _set_name(dialect: str) -> sa.Executable:
    insert = insert_into(dialect, upload_names)
    return insert.on_conflict_do_update(
        index_elements=["tenant_id", "kind", "name"], set_={"digest": insert.excluded.digest}
    )


_CONTENT = (
    uploads.c.kind,
    uploads.c.digest,
    uploads.c.size_bytes,
    uploads.c.num_lines,
    uploads.c.created_s,
)
_NAMED = (
    sa.select(upload_names.c.name, *_CONTENT)
    .join(
        uploads,
        (uploads.c.tenant_id == upload_names.c.tenant_id)
        & (uploads.c.kind == upload_names.c.kind)
        & (uploads.c.digest == upload_names.c.digest),
    )
    .where(upload_names.c.tenant_id == bindparam("tenant"))
    .order_by(upload_names.c.kind, upload_names.c.name)
)
_BY_NAME = _NAMED.where(
    upload_names.c.kind == bindparam("of_kind"), upload_names.c.name == bindparam("of_name")
)
_BY_DIGEST = sa.select(uploads.c.name, *_CONTENT).where(
    uploads.c.tenant_id == bindparam("tenant"),
    uploads.c.kind == bindparam("of_kind"),
    uploads.c.digest == bindparam("of_digest"),
)
_HAS_FILE = sa.select(uploads.c.digest).where(
    uploads.c.tenant_id == bindparam("tenant"), uploads.c.digest == bindparam("of_digest")
)
_DELETE_NAME = sa.delete(upload_names).where(
    upload_names.c.tenant_id == bindparam("tenant"),
    upload_names.c.kind == bindparam("of_kind"),
    upload_names.c.name == bindparam("of_name"),
)
_DROP_UNUSED = sa.delete(uploads).where(
    uploads.c.tenant_id == bindparam("tenant"),
    uploads.c.digest == bindparam("of_digest"),
    ~sa.exists().where(
        upload_names.c.tenant_id == uploads.c.tenant_id,
        upload_names.c.kind == uploads.c.kind,
        upload_names.c.digest == uploads.c.digest,
    ),
    ~sa.exists().where(
        job_uploads.c.tenant_id == uploads.c.tenant_id,
        job_uploads.c.digest == uploads.c.digest,
    ),
)


class Uploads(UsageRecords):
    """The part of `Store` that keeps what tenants upload."""

    def put_upload(
        self,
        tenant_id: TenantId,
        kind: UploadKind,
        name: str,
        content: bytes,
        num_lines: int,
        *,
        digest: str = "",
    ) -> Upload:
        """Store a content under a name; what had that name before stays for jobs that use it.

        Large ones are hashed and written before, on another thread (`digest_of`,
        `Files.write_upload`): then this writes the file only if it has gone since.
        """
        check_segment("upload", name)
        kind, digest = UploadKind(kind), digest or digest_of(content)
        self.files.write_upload(tenant_id, digest, content)
        key = {"tenant_id": tenant_id, "kind": kind.value, "digest": digest, "name": name}
        new = {
            **key,
            "size_bytes": len(content),
            "num_lines": num_lines,
            "created_s": runtime.wall_time_s(),
        }
        find = {"tenant": tenant_id, "of_kind": kind.value, "of_name": name}
        with self._transaction() as db:
            before = db.execute(_BY_NAME, find).first()
            db.execute(_add_content(self._dialect), new)
            db.execute(_set_name(self._dialect), key)
            stored = _upload(db.execute(_BY_NAME, find).one())
            unused = self._drop_unused_uploads(db, tenant_id, [before.digest] if before else [])
        for old in unused:
            self.files.delete_upload(tenant_id, old)
        return stored

    def uploads(self, tenant_id: TenantId) -> list[Upload]:
        """Return what a tenant has under a name, by kind and name."""
        return [_upload(row) for row in self._rows(_NAMED, {"tenant": tenant_id})]

    def upload(self, tenant_id: TenantId, kind: UploadKind, name_or_digest: str) -> Upload:
        """Return an upload by its name, or else by its digest.

        Raises:
            NotFound: this tenant has no such upload.
        """
        find = {"tenant": tenant_id, "of_kind": UploadKind(kind).value}
        row = self._row(_BY_NAME, {**find, "of_name": name_or_digest})
        if row is None:
            row = self._row(_BY_DIGEST, {**find, "of_digest": name_or_digest})
        if row is None:
            raise NotFound(f"no {UploadKind(kind).value} upload {name_or_digest!r}")
        return _upload(row)

    def read_upload(self, tenant_id: TenantId, digest: str) -> bytes:
        """Return the content of an upload.

        Raises:
            NotFound: this tenant has no such upload.
            StoreUnavailable: its file is gone, or is not what was uploaded.
        """
        return read_content(self.upload_file(tenant_id, digest))

    def upload_file(self, tenant_id: TenantId, digest: str) -> Path:
        """Return where the content of an upload is, for `read_content` on another thread.

        Raises:
            NotFound: this tenant has no such upload.
        """
        find = {"tenant": tenant_id, "of_digest": digest}
        if not is_digest(digest) or self._row(_HAS_FILE, find) is None:
            raise NotFound(f"no upload {digest!r}")
        return self.files.upload(tenant_id, digest)

    def delete_upload(self, tenant_id: TenantId, kind: UploadKind, name: str) -> None:
        """Forget a name. Its content stays for the jobs that use it, and goes with the last.

        Raises:
            NotFound: this tenant has no upload of that name.
        """
        find = {"tenant": tenant_id, "of_kind": UploadKind(kind).value, "of_name": name}
        with self._transaction() as db:
            row = db.execute(_BY_NAME, find).first()
            if row is None:
                raise NotFound(f"no {UploadKind(kind).value} upload {name!r}")
            db.execute(_DELETE_NAME, find)
            unused = self._drop_unused_uploads(db, tenant_id, [row.digest])
        for digest in unused:
            self.files.delete_upload(tenant_id, digest)

    # --------------------------------------------------------------------------------------

    def _drop_unused_uploads(
        self, db: sa.Connection, tenant_id: TenantId, digests: Iterable[str]
    ) -> list[str]:
        """Forget contents without a name and a job; return whose files are to be deleted, once
        this transaction is committed."""
        unused = []
        for digest in digests:
            find = {"tenant": tenant_id, "of_digest": digest}
            db.execute(_DROP_UNUSED, find)
            if db.execute(_HAS_FILE, find).first() is None:
                unused.append(digest)
        return unused


def digest_of(content: bytes) -> str:
    """Return what names a content."""
    return hashlib.sha256(content).hexdigest()


def read_content(path: Path) -> bytes:
    """Return what an upload's file holds.

    Raises:
        StoreUnavailable: it is gone, or is not what was uploaded.
    """
    with disk_errors(path):
        content = path.read_bytes()
    if digest_of(content) != path.name:
        raise StoreUnavailable(f"{path} is damaged: upload it again, or restore a backup")
    return content


def _upload(row: sa.Row) -> Upload:
    return Upload(
        kind=UploadKind(row.kind),
        name=row.name,
        digest=row.digest,
        size_bytes=row.size_bytes,
        num_lines=row.num_lines,
        created_s=row.created_s,
    )
