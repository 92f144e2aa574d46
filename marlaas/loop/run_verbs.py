"""What each operation of a run does that is not a pass: on the worker and on the disk.

    | operation | on the worker                | on the disk                          |
    |-----------|------------------------------|--------------------------------------|
    | create    | loaded, fresh or from files  | nothing                              |
    | step      | gradient applied and cleared | state of the new version             |
    | load      | loaded beside, then adopted  | nothing: linked when it is committed |
    | save      | live, written as PEFT folder | that, the state linked, its row      |

Nothing here has an outcome: `runner.py` stores what comes back, and only then `settle`s it, or
`undo`es it. Every verb may be done again, after a crash at any place.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from marlaas import runtime
from marlaas.errors import InvalidRequest, PolicyDiverged, QuotaExceeded
from marlaas.loop.operations import (
    Body,
    Created,
    CreateRun,
    Loaded,
    LoadWeights,
    OptimStep,
    Saved,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    Value,
)
from marlaas.loop.run_policy import RunPolicy
from marlaas.loop.usage import Tenants, why_full
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import (
    EPHEMERAL,
    Checkpoint,
    CheckpointKind,
    Run,
    Sampler,
    StateKind,
    TenantId,
)

INCOMPLETE = (
    "a forward_backward since the last step failed, so the gradient would lack it: it was cleared, "
    "weights and optimizer are as they were"
)
VETOED = (
    "the gradient is not finite: it was cleared, weights and optimizer are as they were; expected "
    "finite losses"
)


async def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a verb has done, to be stored."""

    value: Value
    run: Run | None = None
    """What the run becomes, its gradient cleared; None leaves it as it is."""
    settle: Callable[[], Awaitable[None]] = _nothing
    """Once it is stored."""
    undo: Callable[[], None] = lambda: None
    """If it will not be."""


class RunVerbs:
    """The verbs of one run.

    verbs = RunVerbs("acme", policy, store, tenants)
    done = await verbs.carry_out(OptimStep(adam=adam), run, seq=7)
    """

    def __init__(
        self, tenant_id: TenantId, policy: RunPolicy, store: AsyncStore, tenants: Tenants
    ) -> None:
        self._tenant_id = tenant_id
        self._policy = policy
        self._store = store
        self._tenants = tenants

    async def carry_out(self, body: Body, run: Run, seq: int) -> Done:
        """Do what operation `seq` of a run asks for, whatever it is but a pass.

        Raises:
            InvalidRequest, NotFound, Conflict, QuotaExceeded: it cannot be done as asked for.
            WorkerLost: it is to be done again.
            PolicyDiverged: files are not what they were.
        """
        match body:
            case CreateRun():
                return await self._create(run)
            case OptimStep():
                return await self._step(body, run)
            case LoadWeights():
                return await self._load(body, run)
            case SaveForSampler():
                return await self._save_for_sampler(body, run, seq)
            case SaveWeights():
                return await self._save(CheckpointKind.WEIGHTS, body, run, seq)
            case SaveExternal():
                return await self._save(CheckpointKind.EXTERNAL, body, run, seq)
            case _:
                raise AssertionError(f"{type(body).__name__} is a pass")

    # Training -------------------------------------------------------------------------------

    async def _create(self, run: Run) -> Done:
        await self._policy.bring()
        adapter_hash = self._policy.adapter_hash
        return Done(
            value=Created(run_id=run.run_id, adapter_hash=adapter_hash),
            run=replace(run, adapter_hash=adapter_hash),
        )

    async def _step(self, body: OptimStep, run: Run) -> Done:
        await self._policy.bring()
        version = run.version + 1
        path = self._store.files.run_state(self._tenant_id, run.run_id, version)
        result = await self._policy.step(body.adam, path)
        if result.is_vetoed:
            raise InvalidRequest(VETOED)
        return Done(
            value=replace(result, version=version),
            run=replace(
                run,
                version=version,
                state_path=path,
                state_kind=StateKind.SNAPSHOT,
                adapter_hash=result.adapter_hash,
            ),
        )

    async def _load(self, body: LoadWeights, run: Run) -> Done:
        policy = self._policy
        _, checkpoint = await self._store.call(Store.use_checkpoint, self._tenant_id, body.path)
        source, kind = source_of(checkpoint, with_optimizer=body.with_optimizer)
        await policy.bring()
        policy_id, adapter_hash = await policy.load_beside(run, source)
        if adapter_hash != checkpoint.adapter_hash:
            policy.abandon(policy_id)
            raise PolicyDiverged(f"{body.path} came back as {adapter_hash}: its files have changed")

        async def adopt() -> None:
            policy.adopt(policy_id)

        version = run.version + 1
        return Done(
            value=Loaded(path=body.path, version=version),
            run=replace(
                run,
                version=version,
                state_path=source,
                state_kind=kind,
                adapter_hash=adapter_hash,
            ),
            settle=adopt,
            undo=lambda: policy.abandon(policy_id),
        )

    # Saving ---------------------------------------------------------------------------------

    async def _save_for_sampler(self, body: SaveForSampler, run: Run, seq: int) -> Done:
        if body.name is not None:
            return await self._save(CheckpointKind.SAMPLER, body, run, seq)
        if body.sampler_seq is None:
            raise InvalidRequest("a save for sampling has a name or the number of a sampler")
        checkpoint = await self._keep(
            CheckpointKind.SAMPLER, f"{EPHEMERAL}{seq}", run, seq,
            ttl_s=body.ttl_s, metadata=body.metadata,
        )  # fmt: skip
        sampler = Sampler(
            sampler_id=f"{run.session_id}:sample:{body.sampler_seq}",
            session_id=run.session_id,
            seq=body.sampler_seq,
            base_model=run.base_model,
            checkpoint_path=checkpoint.path,
        )
        await self._store.call(Store.add_sampler, self._tenant_id, sampler)

        async def prune() -> None:
            await self._store.call(Store.prune_ephemeral, self._tenant_id, run.run_id)

        value = Saved(path=None, size_bytes=checkpoint.size_bytes, sampler_id=sampler.sampler_id)
        return Done(value=value, settle=prune)

    async def _save(
        self,
        kind: CheckpointKind,
        body: SaveWeights | SaveForSampler | SaveExternal,
        run: Run,
        seq: int,
    ) -> Done:
        assert body.name is not None
        checkpoint = await self._keep(
            kind, body.name, run, seq,
            ttl_s=body.ttl_s,
            metadata={} if isinstance(body, SaveExternal) else body.metadata,
            overwrite=isinstance(body, SaveWeights) and body.overwrite,
        )  # fmt: skip
        return Done(value=Saved(path=checkpoint.path, size_bytes=checkpoint.size_bytes))

    async def _keep(
        self,
        kind: CheckpointKind,
        name: str,
        run: Run,
        seq: int,
        *,
        ttl_s: float | None,
        metadata: Mapping[str, str],
        overwrite: bool = False,
    ) -> Checkpoint:
        """Write a checkpoint of the run as it is, complete before anybody can see it."""
        await self.check_storage()
        await self._policy.bring()
        # Under the number of the operation: done again after a crash it finds its own files.
        files = self._store.files.checkpoint(
            self._tenant_id, run.run_id, kind, name, generation=seq
        ).prepare()
        adapter_hash = await self._policy.save_adapter(files.adapter)
        is_whole = kind is CheckpointKind.WEIGHTS and run.state_kind is StateKind.SNAPSHOT
        checkpoint = Checkpoint(
            run_id=run.run_id,
            kind=kind,
            name=name,
            version=run.version,
            adapter_hash=adapter_hash,
            folder=files.folder,
            has_optimizer=is_whole,
            metadata=metadata,
            expires_s=None if ttl_s is None else runtime.wall_time_s() + ttl_s,
        )
        state = run.state_path if is_whole else None
        return await self._store.call(
            keep_checkpoint, self._tenant_id, checkpoint, state, overwrite=overwrite
        )

    async def check_storage(self) -> None:
        """Refuse what would be stored beyond the tenant's share.

        Raises:
            QuotaExceeded: it is used up.
        """
        limit = self._tenants.quotas(self._tenant_id).stored_bytes
        if limit is None:
            return
        used = await self._store.call(Store.stored_bytes, self._tenant_id)
        if full := why_full(used, limit):
            raise QuotaExceeded(full, retry_after_s=0.0)


def keep_checkpoint(
    store: Store,
    tenant_id: TenantId,
    checkpoint: Checkpoint,
    state: str | None,
    *,
    overwrite: bool,
) -> Checkpoint:
    """Link the training state into a checkpoint's folder, if it has one, and store it."""
    if state is not None:
        store.files.link(state, checkpoint.folder / "state")
    return store.add_checkpoint(tenant_id, checkpoint, overwrite=overwrite)


def source_of(checkpoint: Checkpoint, *, with_optimizer: bool) -> tuple[str, StateKind]:
    """Return what a run that goes on from a checkpoint is loaded from.

    A checkpoint of kind `weights` without state was saved before any step: its moments are zero,
    which is what its adapter alone gives.

    Raises:
        InvalidRequest: it never had an optimizer.
    """
    if with_optimizer and checkpoint.kind is not CheckpointKind.WEIGHTS:
        raise InvalidRequest(
            f"{checkpoint.path} has no optimizer state; expected a checkpoint of kind weights, or "
            "to load it without"
        )
    if with_optimizer and checkpoint.has_optimizer:
        return str(checkpoint.folder / "state"), StateKind.SNAPSHOT
    return str(checkpoint.folder / "adapter"), StateKind.ADAPTER
