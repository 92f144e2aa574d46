"""What a model name stands for: the base, or a kept version of a job.

| model          | is                                                                  |
|----------------|---------------------------------------------------------------------|
| `base`         | the base model without adapter                                      |
| `JOB`          | the job's promoted version, or else its newest one                  |
| `JOB@promoted` | the version that the tenant chose                                   |
| `JOB@best`     | the one with the most success, the oldest among equals              |
| `JOB@latest`   | the newest one                                                      |
| `JOB@7`        | version 7, if it is kept                                            |
"""

from marlaas.errors import InvalidRequest, NotFound
from marlaas.loop.shelf import ServedVersion
from marlaas.store.db import Store
from marlaas.types import TenantId

BASE_MODEL = "base"
"""Name of the base model; a job of that name is served as `base@latest` and so on."""

MAX_VERSION_DIGITS = 20
"""Python refuses to read numbers of thousands of digits; no version has as many as this."""


def find_version(store: Store, tenant_id: TenantId, model: str) -> ServedVersion | None:
    """Return the version that a model name stands for now; None for the base.

    Raises:
        NotFound: this tenant has no such job, or the job no such version (any more).
        InvalidRequest: no name of a model.
    """
    if model == BASE_MODEL:
        return None
    job, at, which = model.partition("@")
    is_number = which.isascii() and which.isdigit() and len(which) <= MAX_VERSION_DIGITS
    if not job or (at and not is_number and which not in ("best", "promoted", "latest")):
        raise InvalidRequest(
            f"model {model!r}; expected base, JOB, JOB@NUMBER, JOB@best, JOB@promoted or JOB@latest"
        )
    store.job(tenant_id, job)  # NotFound, also if it is another tenant's
    kept = {row.version: row for row in store.versions(tenant_id, job) if row.has_adapter}
    number = int(which) if is_number else _number(store, tenant_id, job, which, set(kept))
    if number not in kept:
        there = ", ".join(map(str, sorted(kept))) or "none"
        raise NotFound(f"version {number} of job {job!r} is not kept; kept: {there}")
    return ServedVersion(
        tenant_id=tenant_id,
        job=job,
        version=number,
        adapter_hash=kept[number].adapter_hash,
        folder=store.files.version(tenant_id, job, number).adapter,
    )


def _number(store: Store, tenant_id: TenantId, job: str, which: str, kept: set[int]) -> int:
    """Return which version a word stands for; "" is the promoted one, or else the newest."""
    if not kept:
        raise NotFound(f"job {job!r} has no version yet")
    if which == "best":
        judged = {
            record.version: record.success
            for record in store.evaluations(tenant_id, job)
            if record.version in kept
        }
        if not judged:
            raise NotFound(f"no kept version of job {job!r} has been evaluated")
        return max(judged, key=lambda version: (judged[version], -version))
    if which != "latest":
        promoted = store.promoted(tenant_id, job)
        if promoted is not None:
            return promoted
        if which:
            raise NotFound(f"no version of job {job!r} is promoted")
    return max(kept)
