"""What a policy acts in: single-use environments that see messages only.

    family.prompt(i) -> Prompt ── family.make(prompt, n) -> n environments, one per trajectory
    env.step(reply) -> EnvStep: either the next messages, or the end with a reward

An environment lives for one episode: no reset, no reuse. It never sees tokens. Whatever goes wrong
inside it that is not the policy's doing is raised as `EnvironmentFailure`, never scored 0.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from marlaas.types import Message, Prompt

ReadUpload = Callable[[str], bytes | Awaitable[bytes]]
"""Returns the content of a tenant's upload by its digest, at once or when awaited."""
Log = Callable[[str], None]
"""Is told what a tenant's own code printed or raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStep:
    """The environment's answer to one assistant message."""

    messages: tuple[Message, ...] = ()
    """Shown to the policy before its next turn; empty at the end."""
    reward: float | None = None
    """Set exactly when the episode is over."""
    is_success: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    """E.g. `format`: the answer could be read. Averaged over trajectories in the learning curve."""

    @property
    def is_done(self) -> bool:
        return self.reward is not None


class Env(Protocol):
    """One episode."""

    async def step(self, reply: str, *, is_last: bool) -> EnvStep:
        """Judge the policy's reply. With `is_last` (no turn is left) the answer must be done.

        Raises:
            EnvironmentFailure: the environment could not judge.
        """
        ...

    async def close(self) -> None:
        """Free what the episode holds; called once, whatever happened."""
        ...


class Family(Protocol):
    """A kind of task with its settings; makes prompts by seed and environments for them.

    The same `(settings, seed, split, index)` gives the same prompt on every machine. The splits
    `train` and `eval` share no item.
    """

    name: str
    max_turns: int
    """Most assistant turns that an episode may have."""

    def prompt(self, index: int, *, seed: int, split: str) -> Prompt:
        """Return item `index` of a split ("train" or "eval")."""
        ...

    def make(self, prompt: Prompt, num_envs: int) -> Sequence[Env]:
        """Return fresh environments for the trajectories of one group."""
        ...

    async def start(self) -> None:
        """Start what the whole job needs (a sandbox); called once before the first `make`."""
        ...

    async def stop(self) -> None:
        """End it. Idempotent."""
        ...

    def cpu_s(self) -> float:
        """CPU seconds that this family's own processes (sandboxes) have used so far."""
        ...
