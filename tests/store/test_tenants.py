"""Tenants and keys: secrets are shown once, what is purged is gone, and the log stays."""

import re
from dataclasses import replace

import pytest

from marlaas import runtime
from marlaas.errors import Conflict, InvalidRequest, NotFound
from marlaas.store.db import Store
from marlaas.types import OPERATOR, JobState, Quotas, Role, Tenant, TenantId, UploadKind
from tests.store.records import (
    ACME,
    OTHER,
    RUN,
    all_rows,
    checkpoint_of,
    operation_of,
    sampler_of,
    spec_of,
    take_run_step,
    take_steps,
    with_finished,
    with_run,
)


def test_a_tenant_comes_back_as_it_was_taken_on(store: Store) -> None:
    quotas = Quotas(tokens_a_day=5, stored_bytes=None, requests_a_second=0.0)
    stored = store.add_tenant(Tenant(tenant_id=ACME, weight=2.5, quotas=quotas))
    assert (stored.weight, stored.quotas) == (2.5, quotas)
    assert stored.created_s > 0
    assert store.tenant(ACME) == stored
    store.add_tenant(Tenant(tenant_id=TenantId("aaa")))
    assert [tenant.tenant_id for tenant in store.tenants()] == ["aaa", ACME]
    with pytest.raises(Conflict, match="there is a tenant 'acme' already"):
        store.add_tenant(Tenant(tenant_id=ACME))
    with pytest.raises(NotFound):
        store.tenant(OTHER)


def test_weight_and_quotas_change_and_the_rest_does_not(store: Store) -> None:
    stored = store.add_tenant(Tenant(tenant_id=ACME))
    changed = replace(stored, weight=3.0, quotas=Quotas(max_running_jobs=0), created_s=1.0)
    assert store.update_tenant(changed) == replace(changed, created_s=stored.created_s)
    with pytest.raises(NotFound):
        store.update_tenant(Tenant(tenant_id=OTHER))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_is_a_positive_number(store: Store, weight: float) -> None:
    with pytest.raises(InvalidRequest, match="use a positive number"):
        store.add_tenant(Tenant(tenant_id=ACME, weight=weight))


@pytest.mark.parametrize("name", [OPERATOR, "", "a/b", "..", "a b"])
def test_some_names_are_no_tenants(store: Store, name: str) -> None:
    with pytest.raises(InvalidRequest):
        store.add_tenant(Tenant(tenant_id=TenantId(name)))


def test_a_key_opens_until_it_is_revoked(store: Store) -> None:
    store.add_tenant(Tenant(tenant_id=ACME))
    key, secret = store.add_key(ACME, role=Role.TENANT, label="laptop")
    other, other_secret = store.add_key(ACME, role=Role.TENANT)
    assert re.fullmatch(r"tml-[A-Za-z0-9_-]{43}", secret)
    assert (key.tenant_id, key.role, key.label, key.revoked_s) == (
        ACME,
        Role.TENANT,
        "laptop",
        None,
    )
    assert store.find_key(secret) == key
    assert sorted(one.key_id for one in store.keys(ACME)) == sorted([key.key_id, other.key_id])
    with pytest.raises(NotFound):
        store.revoke_key(OTHER, key.key_id)
    store.revoke_key(ACME, key.key_id)
    revoked = next(one for one in store.keys(ACME) if one.key_id == key.key_id)
    store.revoke_key(ACME, key.key_id)
    assert revoked in store.keys(ACME) and revoked.revoked_s is not None
    assert store.find_key(secret) is None
    assert store.find_key(other_secret) == other


@pytest.mark.parametrize("secret", ["", "tml-", "tml-" + "A" * 43, "\ud800", "x" * 10_000])
def test_what_is_no_key_opens_nothing(store: Store, secret: str) -> None:
    assert store.find_key(secret) is None


def test_no_secret_is_in_the_database(store: Store) -> None:
    store.add_tenant(Tenant(tenant_id=ACME))
    _, secret = store.add_key(ACME, role=Role.TENANT)
    assert secret.removeprefix("tml-") not in repr(all_rows(store))


def test_operator_keys_belong_to_operators(store: Store) -> None:
    key, secret = store.add_key(OPERATOR, role=Role.OPERATOR)
    assert store.find_key(secret) == key
    with pytest.raises(InvalidRequest, match="cannot have the role 'tenant'"):
        store.add_key(OPERATOR, role=Role.TENANT)
    store.add_tenant(Tenant(tenant_id=ACME))
    with pytest.raises(InvalidRequest, match="cannot have the role 'operator'"):
        store.add_key(ACME, role=Role.OPERATOR)
    with pytest.raises(NotFound):
        store.add_key(OTHER, role=Role.TENANT)


def test_a_purged_tenant_leaves_nothing_and_its_neighbour_everything(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tenant, session_id in ((ACME, "s-1"), (OTHER, "s-2")):
        store.add_tenant(Tenant(tenant_id=tenant))
        store.add_key(tenant, role=Role.TENANT)
        store.add_job(tenant, spec_of(tenant))
        with_finished(store, tenant, 0)
        store.put_upload(tenant, UploadKind.PROMPTS, "mine", b"{}\n", 1)
        run_id = with_run(store, tenant, session_id=session_id).run_id
        store.add_checkpoint(tenant, checkpoint_of(store, tenant=tenant, run_id=run_id))
        store.add_sampler(tenant, sampler_of(session_id=session_id))
        store.accept(tenant, operation_of(1, run_id=run_id))
    store.finish_operation(ACME, RUN, 1, result=b"out")
    take_run_step(store, 2, 1)
    take_steps(store, 1)
    store.audit("k1", "purge", ACME, {"why": "asked"})
    with pytest.raises(Conflict, match="job 'sums' of 'acme' is active"):
        store.purge_tenant(ACME)
    store.set_job_state(ACME, "sums", JobState.CANCELLED)
    with pytest.raises(Conflict, match="run 's-1:train:0' of 'acme' is at work"):
        store.purge_tenant(ACME)
    later_s = runtime.wall_time_s() + 60.0
    monkeypatch.setattr(runtime, "wall_time_s", lambda: later_s)
    neighbours = {
        name: [row for row in rows if OTHER in row] for name, rows in all_rows(store).items()
    }
    store.purge_tenant(ACME)
    after = all_rows(store)
    for name, rows in after.items():
        if name != "audit":
            assert [row for row in rows if ACME in row] == []
            assert [row for row in rows if OTHER in row] == neighbours[name]
    assert len(after["audit"]) == 1
    paths = [str(path) for path in store.files.root.rglob("*")]
    assert not any("/acme" in path for path in paths)
    assert any("uploads/other" in path for path in paths)
    assert any("runs/other" in path for path in paths)
    with pytest.raises(NotFound):
        store.purge_tenant(ACME)
    store.add_tenant(Tenant(tenant_id=ACME))
    assert store.last_event(ACME) == 0


def test_a_tenant_whose_operations_are_to_be_executed_is_not_purged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_tenant(Tenant(tenant_id=ACME))
    with_run(store)
    store.accept(ACME, operation_of(1))
    later_s = runtime.wall_time_s() + 3600.0
    monkeypatch.setattr(runtime, "wall_time_s", lambda: later_s)
    with pytest.raises(Conflict, match="is at work: revoke the tenant's keys"):
        store.purge_tenant(ACME)


def test_the_audit_log_keeps_its_order(store: Store) -> None:
    for number in range(3):
        store.audit("k1", "tenant.update", ACME, {"weight": number})
    assert [entry.seq for entry in store.audit_log()] == [1, 2, 3]
    entry = store.audit_log(after=1, limit=1)[0]
    assert (entry.actor, entry.action, entry.tenant_id, entry.detail) == (
        "k1", "tenant.update", ACME, {"weight": 1},
    )  # fmt: skip
