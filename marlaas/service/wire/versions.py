"""Schemas of policy versions and uploads."""

from collections.abc import Mapping

from marlaas.service.wire.common import Answer, Number, finite
from marlaas.store.db import StoredVersion
from marlaas.types import (
    Upload,
)


class VersionInfo(Answer):
    """A policy version and what is kept of it."""

    version: int
    adapter_hash: str
    has_adapter: bool
    """It can be downloaded, served, forked, judged."""
    has_state: bool
    success: Number
    created_s: float
    expires_s: float | None
    is_latest: bool
    is_best: bool
    is_promoted: bool

    @classmethod
    def of(cls, row: StoredVersion, named: Mapping[str, int | None]) -> "VersionInfo":
        return cls(
            version=row.version,
            adapter_hash=row.adapter_hash,
            has_adapter=row.has_adapter,
            has_state=row.has_state,
            success=None if row.success is None else finite(row.success),
            created_s=row.created_s,
            expires_s=row.expires_s,
            is_latest=row.version == named["latest"],
            is_best=row.version == named["best"],
            is_promoted=row.version == named["promoted"],
        )


class VersionList(Answer):
    versions: list[VersionInfo]


class UploadInfo(Answer):
    """A file of a tenant."""

    kind: str
    name: str
    digest: str
    size_bytes: int
    num_lines: int
    created_s: float

    @classmethod
    def of(cls, upload: Upload) -> "UploadInfo":
        return cls(
            kind=upload.kind.value,
            name=upload.name,
            digest=upload.digest,
            size_bytes=upload.size_bytes,
            num_lines=upload.num_lines,
            created_s=upload.created_s,
        )


class UploadList(Answer):
    uploads: list[UploadInfo]
