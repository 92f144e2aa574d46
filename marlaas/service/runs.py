"""Runs of `tinker` clients as tenants and operators see them; `service/tinker` drives them."""

from fastapi import APIRouter

from marlaas.service.auth import WithCaller
from marlaas.service.parts import WithParts
from marlaas.service.places import After, PageSize
from marlaas.service.wire.runs import RunInfo, RunPage
from marlaas.store.db import Store

router = APIRouter(tags=["runs"])


@router.get("/v1/runs")
async def list_runs(
    caller: WithCaller, parts: WithParts, after: After = 0, limit: PageSize = 100
) -> RunPage:
    """List the runs of Tinker clients, newest first, with what each holds and waits for."""
    rows = await parts.store.call(Store.run_rows, caller.tenant_id, limit=limit + 1, offset=after)
    return RunPage(
        runs=[RunInfo.of(row) for row in rows[:limit]],
        next=after + limit if len(rows) > limit else None,
    )
