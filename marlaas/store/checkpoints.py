"""Checkpoints: versions of runs that clients saved, by name; the newest unnamed ones for sampling.

    folder written ─► add_checkpoint ─► use_checkpoint* ─► delete_checkpoint | expired | pruned
                                                                └─► folder deleted, after the commit

- The folder is complete before the row is there, and never changes. One that is overwritten leaves
  its folder when the row already names the other.
- Whoever is about to read the files says so in the call that finds them (`use_checkpoint`): what
  was used just now is never pruned.
- Another tenant's checkpoint is found when it is published, by a path that names no tenant: run ids
  are unique. Otherwise it looks like nothing.
- An expired one is found by nobody, though its files may still be there.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam, func

from marlaas import runtime
from marlaas.errors import Conflict, InvalidRequest, NotFound, StoreUnavailable
from marlaas.store.columns import clean_text, encode_json
from marlaas.store.files import check_checkpoint_name, size_of
from marlaas.store.operations import Operations
from marlaas.store.runs import no_run, no_sampler
from marlaas.store.schema import checkpoints, runs, samplers, sessions
from marlaas.types import Checkpoint, CheckpointKind, Sampler, TenantId

_PATH = re.compile(
    r"tinker://(?P<run>[^/]+)/(?P<kind>weights|sampler_weights|external_weights)/(?P<name>[^/]+)"
)

UNUSED_S = 3600.0
"""Unnamed checkpoints that were not used for so long may be pruned."""

_HAS_RUN = sa.select(runs.c.run_id).where(
    runs.c.tenant_id == bindparam("tenant"), runs.c.run_id == bindparam("run")
)
_OF_RUN = (checkpoints.c.tenant_id == bindparam("tenant"), checkpoints.c.run_id == bindparam("run"))
_THIS = (
    *_OF_RUN,
    checkpoints.c.kind == bindparam("of_kind"),
    checkpoints.c.name == bindparam("of_name"),
)
_IS_KEPT = checkpoints.c.expires_s.is_(None) | (checkpoints.c.expires_s > bindparam("now"))
_ADD = sa.insert(checkpoints)
_ANY = sa.select(checkpoints).where(*_THIS)
_ONE = _ANY.where(_IS_KEPT)
_OF_ANYBODY = (
    sa.select(checkpoints)
    .join(
        runs,
        (runs.c.tenant_id == checkpoints.c.tenant_id) & (runs.c.run_id == checkpoints.c.run_id),
    )
    .where(
        runs.c.run_id == bindparam("run"),
        checkpoints.c.kind == bindparam("of_kind"),
        checkpoints.c.name == bindparam("of_name"),
        (checkpoints.c.tenant_id == bindparam("tenant")) | (checkpoints.c.is_public == 1),
        _IS_KEPT,
    )
)
_USE = sa.update(checkpoints).where(*_THIS).values(used_s=bindparam("now"))
_DELETE = sa.delete(checkpoints).where(*_THIS)
_DELETE_UNUSED = _DELETE.where(checkpoints.c.used_s <= bindparam("since"))
_DELETE_EXPIRED = _DELETE.where(checkpoints.c.expires_s <= bindparam("now"))
_PUBLISH = sa.update(checkpoints).where(*_THIS, _IS_KEPT).values(is_public=bindparam("public"))
_SET_EXPIRY = sa.update(checkpoints).where(*_THIS, _IS_KEPT).values(expires_s=bindparam("until"))
_NEWEST_FIRST = (checkpoints.c.created_s.desc(), checkpoints.c.generation.desc())
_EPHEMERAL = (
    sa.select(checkpoints).where(*_OF_RUN, checkpoints.c.is_ephemeral == 1).order_by(*_NEWEST_FIRST)
)
_EXPIRED = sa.select(checkpoints).where(checkpoints.c.expires_s <= bindparam("now"))
_ABANDONED = (
    sa.select(checkpoints)
    .join(
        runs,
        (runs.c.tenant_id == checkpoints.c.tenant_id) & (runs.c.run_id == checkpoints.c.run_id),
    )
    .join(
        sessions,
        (sessions.c.tenant_id == runs.c.tenant_id) & (sessions.c.session_id == runs.c.session_id),
    )
    .where(
        checkpoints.c.is_ephemeral == 1,
        checkpoints.c.used_s <= bindparam("since"),
        sessions.c.finished_s.is_not(None) | (sessions.c.seen_s <= bindparam("since")),
    )
)
_STATE_PATHS = sa.select(runs.c.state_path).where(runs.c.state_path.is_not(None))
_FOLDERS = sa.select(
    checkpoints.c.tenant_id,
    checkpoints.c.run_id,
    checkpoints.c.kind,
    checkpoints.c.name,
    checkpoints.c.generation,
)
_USE_SAMPLER = (
    sa.update(samplers)
    .where(
        samplers.c.tenant_id == bindparam("tenant"), samplers.c.sampler_id == bindparam("sampler")
    )
    .values(used_s=bindparam("now"))
    .returning(samplers.c.checkpoint_path)
)


class Checkpoints(Operations):
    """The part of `Store` that keeps saved versions."""

    def add_checkpoint(
        self, tenant_id: TenantId, checkpoint: Checkpoint, *, overwrite: bool = False
    ) -> Checkpoint:
        """Store a checkpoint whose folder is complete; return it with its size. The very same again
        changes nothing.

        Raises:
            NotFound: this tenant has no such run.
            Conflict: there is one of that name, and it is not to be overwritten.
            StoreUnavailable: its folder is not on the disk.
        """
        size = size_of(checkpoint.folder)
        if size == 0:
            raise StoreUnavailable(f"{checkpoint.folder} is not there: it was not written")
        row = self._checkpoint_row(tenant_id, checkpoint, size)
        key = _key(tenant_id, checkpoint.run_id, checkpoint.kind, checkpoint.name)
        with self._transaction() as db:
            if db.execute(_HAS_RUN, key).first() is None:
                raise no_run(checkpoint.run_id)
            before = db.execute(_ANY, key).first()
            old = None if before is None else self._checkpoint(before)
            if old is not None:
                if _is_same(old, checkpoint):
                    return old
                is_over = old.expires_s is not None and old.expires_s <= key["now"]
                if not (overwrite or is_over):
                    raise Conflict(
                        f"there is a checkpoint {checkpoint.path}: choose another name, or "
                        "overwrite it"
                    )
                db.execute(_DELETE, key)
            db.execute(_ADD, row)
        if old is not None and old.folder != checkpoint.folder:
            self.files.delete_checkpoint(old.folder)
        return self.checkpoint(tenant_id, checkpoint.run_id, checkpoint.kind, checkpoint.name)

    def checkpoint(
        self, tenant_id: TenantId, run_id: str, kind: CheckpointKind, name: str
    ) -> Checkpoint:
        """Return a checkpoint.

        Raises:
            NotFound: this tenant has no such checkpoint, or it has expired.
        """
        row = self._row(_ONE, _key(tenant_id, run_id, kind, name))
        if row is None:
            raise _no_checkpoint(run_id, kind, name)
        return self._checkpoint(row)

    def find_checkpoint(self, tenant_id: TenantId, path: str) -> tuple[TenantId, Checkpoint]:
        """Return a checkpoint by its path with its owner: this tenant, or another one who has
        published it.

        Raises:
            InvalidRequest: this is no path of a checkpoint.
            NotFound: there is none that this tenant may read.
        """
        run_id, kind, name = split_path(path)
        row = self._row(_OF_ANYBODY, _key(tenant_id, run_id, kind, name))
        if row is None:
            raise _no_checkpoint(run_id, kind, name)
        return TenantId(row.tenant_id), self._checkpoint(row)

    def use_checkpoint(self, tenant_id: TenantId, path: str) -> tuple[TenantId, Checkpoint]:
        """Return what `find_checkpoint` does, and note that it is used: its files are not pruned
        for as long as `prune_ephemeral` leaves alone what was used."""
        run_id, kind, name = split_path(path)
        key = _key(tenant_id, run_id, kind, name)
        with self._transaction() as db:
            row = db.execute(_OF_ANYBODY, key).first()
            if row is not None:
                row = row if db.execute(_USE, {**key, "tenant": row.tenant_id}).rowcount else None
            if row is None:  # or deleted in between, on a database with many writers
                raise _no_checkpoint(run_id, kind, name)
        return TenantId(row.tenant_id), self._checkpoint(row)

    def use_sampler(self, tenant_id: TenantId, sampler_id: str) -> Sampler:
        """Return a sampler, and note that it, and its checkpoint, is used.

        Raises:
            NotFound: this tenant has no such sampler.
        """
        values = {
            "tenant": tenant_id,
            "sampler": clean_text(sampler_id),
            "now": runtime.wall_time_s(),
        }
        with self._transaction() as db:
            row = db.execute(_USE_SAMPLER, values).first()
            if row is None:
                raise no_sampler(sampler_id)
            if row.checkpoint_path is not None:
                key = _key(tenant_id, *split_path(row.checkpoint_path))
                found = db.execute(_OF_ANYBODY, key).first()
                if found is not None:
                    db.execute(_USE, {**key, "tenant": found.tenant_id})
        return self.sampler(tenant_id, sampler_id)

    def checkpoints(
        self,
        tenant_id: TenantId,
        run_id: str | None = None,
        *,
        limit: int = 100,
        offset: int = 0,
    ) -> tuple[list[Checkpoint], int]:
        """Return a tenant's named checkpoints, newest first, of one run or all; and how many there
        are."""
        conditions = [
            checkpoints.c.tenant_id == tenant_id,
            checkpoints.c.is_ephemeral == 0,
            _IS_KEPT,
        ]
        if run_id is not None:
            conditions.append(checkpoints.c.run_id == clean_text(run_id))
        order = (*_NEWEST_FIRST, checkpoints.c.run_id, checkpoints.c.kind, checkpoints.c.name)
        page = sa.select(checkpoints).where(*conditions).order_by(*order)
        total = sa.select(func.count()).select_from(checkpoints).where(*conditions)
        now = {"now": runtime.wall_time_s()}
        rows = self._rows(page.limit(limit).offset(offset), now)
        return [self._checkpoint(row) for row in rows], self._row(total, now)[0]

    def delete_checkpoint(
        self, tenant_id: TenantId, run_id: str, kind: CheckpointKind, name: str
    ) -> None:
        """Delete a checkpoint. Runs that began from it have files of their own.

        Raises:
            NotFound: this tenant has no such checkpoint.
        """
        key = _key(tenant_id, run_id, kind, name)
        with self._transaction() as db:
            row = db.execute(_ONE, key).first()
            if row is None:
                raise _no_checkpoint(run_id, kind, name)
            db.execute(_DELETE, key)
        self.files.delete_checkpoint(self._checkpoint(row).folder)

    def publish_checkpoint(
        self,
        tenant_id: TenantId,
        run_id: str,
        kind: CheckpointKind,
        name: str,
        *,
        is_public: bool = True,
    ) -> None:
        """Let every tenant read a checkpoint, or nobody else any more.

        Raises:
            NotFound: this tenant has no such checkpoint.
        """
        key = _key(tenant_id, run_id, kind, name)
        self._change_checkpoint(_PUBLISH, key, public=int(is_public))

    def set_checkpoint_ttl(
        self,
        tenant_id: TenantId,
        run_id: str,
        kind: CheckpointKind,
        name: str,
        *,
        expires_s: float | None,
    ) -> None:
        """Keep a checkpoint until a time since the epoch; None keeps it for ever.

        Raises:
            NotFound: this tenant has no such checkpoint.
        """
        key = _key(tenant_id, run_id, kind, name)
        self._change_checkpoint(_SET_EXPIRY, key, until=expires_s)

    def prune_ephemeral(
        self,
        tenant_id: TenantId,
        run_id: str,
        *,
        keep_newest: int = 8,
        unused_for_s: float = UNUSED_S,
    ) -> int:
        """Delete unnamed checkpoints of a run, but for the newest, and those that were used lately;
        return how many."""
        since_s = runtime.wall_time_s() - unused_for_s
        with self._transaction() as db:
            rows = db.execute(_EPHEMERAL, {"tenant": tenant_id, "run": run_id}).all()
            old = [row for row in rows[keep_newest:] if row.used_s <= since_s]
            gone = self._forget(db, _DELETE_UNUSED, old, since_s)
        self._delete_folders(gone)
        return len(gone)

    def copy_checkpoint(
        self,
        tenant_id: TenantId,
        path: str,
        run_id: str,
        *,
        name: str | None = None,
        expires_s: float | None = None,
    ) -> Checkpoint:
        """Make a checkpoint that this tenant may read one of its run `run_id`, with files of its
        own; again changes nothing.

        Raises:
            InvalidRequest: this is no path of a checkpoint.
            NotFound: there is none that this tenant may read, or no such run.
            Conflict: the run has another one of that name.
        """
        _, source = self.use_checkpoint(tenant_id, path)
        name = source.name if name is None else check_checkpoint_name(name)
        files = self.files.checkpoint(tenant_id, run_id, source.kind, name)
        self.run(tenant_id, run_id)
        copy = replace(
            source,
            run_id=run_id,
            name=name,
            folder=files.folder,
            is_public=False,
            created_s=0.0,
            used_s=0.0,
            expires_s=expires_s,
        )
        if self._row(_ANY, _key(tenant_id, run_id, source.kind, name)) is None:
            if not source.folder.exists():
                raise NotFound(f"no checkpoint {path}")
            self.files.link(source.folder, files.folder)
        return self.add_checkpoint(tenant_id, copy)

    # --------------------------------------------------------------------------------------

    def _drop_expired_checkpoints(self) -> int:
        """Delete checkpoints whose time is over, and unnamed ones of sessions that are over, of all
        tenants; return how many."""
        now_s = runtime.wall_time_s()
        since_s = now_s - UNUSED_S
        with self._transaction() as db:
            expired = db.execute(_EXPIRED, {"now": now_s}).all()
            gone = self._forget(db, _DELETE_EXPIRED, expired, since_s)
            abandoned = db.execute(_ABANDONED, {"since": since_s}).all()
            gone += self._forget(db, _DELETE_UNUSED, abandoned, since_s)
        self._delete_folders(gone)
        return len(gone)

    def _delete_strays(self) -> None:
        """Delete files of runs that no row names: what kills have left behind."""
        states, folders = self._rows(_STATE_PATHS, {}), self._rows(_FOLDERS, {})
        named = {self.files.root / row.state_path for row in states}
        named |= {self._folder(row) for row in folders}
        self.files.delete_strays(named, before_s=runtime.wall_time_s() - UNUSED_S)

    def _forget(
        self, db: sa.Connection, statement: sa.Executable, rows: Sequence[sa.Row], since_s: float
    ) -> list[sa.Row]:
        """Delete rows, unless what the statement asks for is not true any more; return which."""
        gone = []
        for row in rows:
            key = _key(TenantId(row.tenant_id), row.run_id, CheckpointKind(row.kind), row.name)
            if db.execute(statement, {**key, "since": since_s}).rowcount == 1:
                gone.append(row)
        return gone

    def _delete_folders(self, rows: Sequence[sa.Row]) -> None:
        for row in rows:
            self.files.delete_checkpoint(self._folder(row))

    def _change_checkpoint(
        self, statement: sa.Executable, key: dict[str, Any], **values: object
    ) -> None:
        with self._transaction() as db:
            if db.execute(statement, {**key, **values}).rowcount != 1:
                raise _no_checkpoint(key["run"], key["of_kind"], key["of_name"])

    def _checkpoint_row(
        self, tenant_id: TenantId, checkpoint: Checkpoint, size: int
    ) -> dict[str, Any]:
        generation = generation_of(checkpoint)
        place = self.files.checkpoint(
            tenant_id,
            checkpoint.run_id,
            checkpoint.kind,
            checkpoint.name,
            generation=generation,
        )
        assert place.folder == checkpoint.folder, f"{checkpoint.path} in {checkpoint.folder}"
        now_s = checkpoint.created_s or runtime.wall_time_s()
        return {
            "tenant_id": tenant_id,
            "run_id": checkpoint.run_id,
            "kind": CheckpointKind(checkpoint.kind).value,
            "name": checkpoint.name,
            "generation": generation,
            "version": checkpoint.version,
            "adapter_hash": checkpoint.adapter_hash,
            "has_optimizer": int(checkpoint.has_optimizer),
            "size_bytes": size,
            "is_public": int(checkpoint.is_public),
            "is_ephemeral": int(checkpoint.is_ephemeral),
            "metadata": encode_json(checkpoint.metadata),
            "created_s": now_s,
            "used_s": now_s,
            "expires_s": checkpoint.expires_s,
        }

    def _folder(self, row: sa.Row) -> Path:
        files = self.files.checkpoint(
            TenantId(row.tenant_id),
            row.run_id,
            CheckpointKind(row.kind),
            row.name,
            generation=row.generation,
        )
        return files.folder

    def _checkpoint(self, row: sa.Row) -> Checkpoint:
        return Checkpoint(
            run_id=row.run_id,
            kind=CheckpointKind(row.kind),
            name=row.name,
            version=row.version,
            adapter_hash=row.adapter_hash,
            folder=self._folder(row),
            has_optimizer=bool(row.has_optimizer),
            size_bytes=row.size_bytes,
            is_public=bool(row.is_public),
            metadata=msgspec.json.decode(row.metadata),
            created_s=row.created_s,
            used_s=row.used_s,
            expires_s=row.expires_s,
        )


def split_path(path: str) -> tuple[str, CheckpointKind, str]:
    """Return run id, kind and name of a path.

    Raises:
        InvalidRequest: this is no path of a checkpoint.
    """
    found = _PATH.fullmatch(path)
    if found is None:
        raise InvalidRequest(
            f"path {path!r}: a checkpoint is tinker://RUN/KIND/NAME, where KIND is weights, "
            "sampler_weights or external_weights"
        )
    return found["run"], CheckpointKind(found["kind"]), found["name"]


def generation_of(checkpoint: Checkpoint) -> int:
    """Return which of the folders under its name a checkpoint has."""
    return int(checkpoint.folder.name.rpartition("@")[2])


def _is_same(stored: Checkpoint, new: Checkpoint) -> bool:
    return (
        stored.folder == new.folder
        and stored.version == new.version
        and stored.adapter_hash == new.adapter_hash
    )


def _key(tenant_id: TenantId, run_id: str, kind: CheckpointKind, name: str) -> dict[str, Any]:
    return {
        "tenant": tenant_id,
        "run": clean_text(run_id),
        "of_kind": CheckpointKind(kind).value,
        "of_name": clean_text(name),
        "now": runtime.wall_time_s(),
    }


def _no_checkpoint(run_id: object, kind: object, name: object) -> NotFound:
    return NotFound(f"no checkpoint tinker://{run_id}/{kind}/{name}")
