"""Trials of custom environments, before a job that names one is taken.

    spec ─► its uploads ─► prompts split? ─► file imported, called on the first prompt ─► taken

What fails here would fail the job at its start or at every call, hours later in a queue. A tenant
has one trial at a time, and what passed is not tried again: neither for the jobs of a sweep nor for
a job that is handed over twice.
"""

import asyncio
from collections.abc import Iterable

from marlaas.envs.custom import CustomSettings, check_job
from marlaas.envs.settings import parse_settings
from marlaas.errors import InvalidRequest
from marlaas.service.limits import Turns
from marlaas.store.async_store import AsyncStore
from marlaas.store.codec import encode
from marlaas.store.db import Store
from marlaas.store.uploads import read_content
from marlaas.types import JobSpec, TenantId

MAX_REMEMBERED = 1000

Trial = tuple[TenantId, bytes]
"""Whose environment, and all of its settings."""


class Trials:
    """Tries the environments of jobs that are about to be taken."""

    def __init__(self) -> None:
        self._turns = Turns()
        self._passed: dict[Trial, None] = {}
        """What was tried without a fault, oldest first."""

    async def check(self, store: AsyncStore, specs: Iterable[JobSpec]) -> None:
        """Try each distinct custom environment of some jobs of one tenant.

        Raises:
            InvalidRequest: one does not work, and why.
            EnvironmentFailure: this machine cannot contain code.
        """
        for spec in specs:
            if spec.env.get("family") != "custom":
                continue
            _check_held_out(spec)
            async with self._turns.of(spec.tenant):
                trial = (spec.tenant, encode(dict(sorted(spec.env.items()))))
                if trial not in self._passed:
                    await _try(store, spec)
                    self._remember(trial)

    def _remember(self, trial: Trial) -> None:
        while len(self._passed) >= MAX_REMEMBERED:
            del self._passed[next(iter(self._passed))]
        self._passed[trial] = None


async def _try(store: AsyncStore, spec: JobSpec) -> None:
    settings = _settings(spec)
    prompts, source = [
        await asyncio.to_thread(
            read_content, await store.call(Store.upload_file, spec.tenant, digest)
        )
        for digest in (settings.prompts, settings.environment)
    ]
    try:
        await check_job(settings, prompts, source)
    except InvalidRequest as error:
        raise InvalidRequest(*(f"env: {problem}" for problem in error.problems)) from None


def _check_held_out(spec: JobSpec) -> None:
    if spec.eval_prompts > 0 and _settings(spec).eval_share == 0:
        raise InvalidRequest(
            f"eval_prompts: got {spec.eval_prompts}, but env.eval_share: 0 holds no prompt out; "
            "expected eval_prompts: 0, or a share"
        )


def _settings(spec: JobSpec) -> CustomSettings:
    named = {key: value for key, value in spec.env.items() if key != "family"}
    return parse_settings(CustomSettings, named)
