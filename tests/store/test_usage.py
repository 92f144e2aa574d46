"""Usage by job and UTC day."""

import pytest

from marlaas import runtime
from marlaas.store.db import Store
from marlaas.types import JobSpec, JobState, TenantId, Usage
from tests.store.records import ACME, OTHER, spec_of, with_finished

DAY_S = 86400.0
DECEMBER_1 = 1796083200.0
"""2026-12-01T00:00:00Z."""


def test_usage_adds_up_by_job_and_by_day(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add_job(ACME, spec_of())
    for day, (job, tokens) in enumerate([("sums", 1), ("", 10), ("sums", 100)]):
        at_s = DECEMBER_1 + day * DAY_S + (DAY_S - 0.001 if day == 0 else 0)
        monkeypatch.setattr(runtime, "wall_time_s", lambda at_s=at_s: at_s)
        store.add_usage(ACME, job, Usage(served_tokens=tokens, device_s=0.5))
    store.add_usage(OTHER, "", Usage(served_tokens=1000))
    assert store.usage(ACME) == Usage(served_tokens=111, device_s=1.5)
    assert store.usage(ACME, since_day="2026-12-02").served_tokens == 110
    assert store.usage_by_job(ACME)["sums"] == Usage(served_tokens=101, device_s=1.0)
    assert store.usage_by_job(ACME)[""].served_tokens == 10
    assert {day: used.served_tokens for day, used in store.usage_by_day(ACME).items()} == {
        "2026-12-01": 1, "2026-12-02": 10, "2026-12-03": 100,
    }  # fmt: skip
    assert list(store.usage_by_day(ACME, days=2)) == ["2026-12-02", "2026-12-03"]
    stored = store.job(ACME, "sums")
    assert (stored.usage.served_tokens, stored.device_s, stored.created_s > 0) == (101, 1.0, True)
    assert [row.usage.served_tokens for row in store.jobs(ACME)] == [101]


def test_a_tenant_that_did_nothing_used_nothing(store: Store) -> None:
    assert store.usage(ACME) == Usage()
    assert store.usage_by_day(ACME) == store.usage_by_job(ACME) == {}
    assert store.stored_bytes(ACME) == 0


def test_stored_bytes_count_the_groups(store: Store) -> None:
    store.add_job(ACME, spec_of())
    with_finished(store, ACME, 0, 1)
    blobs = store._connection.exec_driver_sql("SELECT record FROM group_records").scalars().all()
    said = len('{"state":"queued","reason":""}')
    assert store.stored_bytes(ACME) == sum(len(blob) for blob in blobs) + said


def test_what_a_deleted_job_used_afterwards_is_not_a_later_ones(store: Store) -> None:
    later = JobSpec(tenant=TenantId("acme"), name="later", env={})
    store.add_job(later.tenant, later)
    store.set_job_state(later.tenant, later.name, JobState.CANCELLED)
    store.delete_job(later.tenant, later.name)
    store.add_usage(later.tenant, later.name, Usage(device_s=100.0))
    store.add_job(later.tenant, later)
    assert store.job(later.tenant, later.name).usage == Usage()
    assert store.usage_by_job(later.tenant)[""].device_s == 100.0
