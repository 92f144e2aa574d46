"""Makes environments take their time, as real tools do; the wait is drawn from a seed.

Used by the controller for jobs that ask for it, and by simulations under virtual time.
"""

import asyncio
import math
from collections.abc import Sequence

from marlaas.envs.base import Env, EnvStep, Family
from marlaas.runtime import rng
from marlaas.types import Latency, Prompt


def with_latency(family: Family, latency: Latency, seed: int) -> Family:
    """Return the family with a log-normal wait before every environment call."""
    return LatencyFamily(family, latency, seed) if latency.median_s > 0 else family


def draw_wait_s(latency: Latency, *, seed: int, prompt: int, env: int, turn: int) -> float:
    """Return the wait before one call; the same arguments give the same wait."""
    deviation = float(rng("latency", seed, prompt, env, turn).standard_normal())
    return latency.median_s * math.exp(latency.sigma * deviation)


class LatencyFamily:
    """A family whose environments wait before they answer; otherwise the wrapped one."""

    def __init__(self, family: Family, latency: Latency, seed: int) -> None:
        self.name = family.name
        self.max_turns = family.max_turns
        self._family = family
        self._latency = latency
        self._seed = seed

    def prompt(self, index: int, *, seed: int, split: str) -> Prompt:
        """Return item `index` of a split."""
        return self._family.prompt(index, seed=seed, split=split)

    def make(self, prompt: Prompt, num_envs: int) -> "Sequence[LatencyEnv]":
        """Return fresh environments for one group."""
        return [
            LatencyEnv(env, self._latency, seed=self._seed, prompt=prompt.index, index=index)
            for index, env in enumerate(self._family.make(prompt, num_envs))
        ]

    async def start(self) -> None:
        """Start the wrapped family."""
        await self._family.start()

    async def stop(self) -> None:
        """Stop the wrapped family."""
        await self._family.stop()

    def cpu_s(self) -> float:
        """Return CPU seconds of the wrapped family; waiting costs none."""
        return self._family.cpu_s()


class LatencyEnv:
    """Waits, then lets the wrapped environment answer."""

    def __init__(self, env: Env, latency: Latency, *, seed: int, prompt: int, index: int) -> None:
        self._env = env
        self._latency = latency
        self._labels = {"seed": seed, "prompt": prompt, "env": index}
        self._turn = 0

    async def step(self, reply: str, *, is_last: bool) -> EnvStep:
        """Judge the reply after the wait of this turn."""
        wait_s = draw_wait_s(self._latency, turn=self._turn, **self._labels)
        self._turn += 1
        await asyncio.sleep(wait_s)
        return await self._env.step(reply, is_last=is_last)

    async def close(self) -> None:
        """Close the wrapped environment."""
        await self._env.close()
