"""The rollout stage: one group of trajectories from a prompt, token for token.

    opening ids ─► generate ─► reply ids ─► decode ─► environment ─► messages ─► rendered ids ─┐
                      ▲                                    └──► reward: the trajectory ends    │
                      └────────────────────────────────────────────────────────────────────────┘

- Tokens are exact over turns: what was sampled is kept as ids, what the environment says is
  rendered and appended. Text is decoded for the environment and people, and never encoded again.
- Loss falls on sampled tokens only; each turn records the version and adapter hash that made it.
- Randomness is a function of (seed, split, group, trajectory) and the position in the sequence.
- A failure of the environment ends its own trajectory with a typed reason; its siblings go on.
  `WorkerLost` alone passes through: the group is then sampled anew.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from marlaas import runtime
from marlaas.envs.base import Env, EnvStep, Family
from marlaas.errors import EnvironmentFailure, FailureKind
from marlaas.loop.concurrency import all_or_none
from marlaas.text.chat import LONG_TEXT_CHARS
from marlaas.types import (
    Completion,
    GenerateRequest,
    Generator,
    Group,
    JobSpec,
    Message,
    Prompt,
    SamplingParams,
    StopReason,
    Trajectory,
    TrajectoryEnd,
    Turn,
)

MAX_LOST_SANDBOXES = 1
"""Calls that an episode may repeat because the sandbox died under them; then it has failed."""


class ChatTokenizer(Protocol):
    """Turns messages into the base model's token ids and back."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Ids that end an assistant message."""
        ...

    def least_tokens(self, messages: Sequence[Message]) -> int:
        """Return how many tokens messages take at the very least. Cheap, however long they are."""
        ...

    def render_opening(self, messages: Sequence[Message]) -> Sequence[int]:
        """Return the ids of a conversation up to where the assistant begins to speak."""
        ...

    def render_continuation(
        self, sampled_ids: Sequence[int], messages: Sequence[Message]
    ) -> Sequence[int]:
        """Return the ids that follow a sampled reply: its end if it lacks one, the messages, and
        the start of the assistant's next message."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What to sample: `size` trajectories of one prompt under one policy version."""

    index: int
    version: int
    size: int
    split: str = "train"
    """"train" or "eval"; names the prompt stream and keeps the two apart in every seed."""

    @property
    def is_training(self) -> bool:
        return self.split == "train"

    @property
    def label(self) -> str:
        return f"{self.split}-{self.index}@{self.version}"


class GroupRollout:
    """A group being sampled: `open -> finished`, or `open -> cut -> finished`.

    The controller awaits `run` once. `cut` may be called meanwhile: trajectories that have not
    ended yet end as stragglers, those that have keep their reward, and `run` returns at once.

        rollout = GroupRollout(spec, family, tokenizer, plan)
        group = await rollout.run(generator)          # Group with `plan.size` trajectories
    """

    def __init__(
        self, spec: JobSpec, family: Family, tokenizer: ChatTokenizer, plan: GroupPlan
    ) -> None:
        self.plan = plan
        self._spec = spec
        self._family = family
        self._tokenizer = tokenizer
        self._episodes: list[Episode] = []
        self._tasks: list[asyncio.Task[Trajectory]] = []
        self._is_cut = False

    async def run(self, generator: Generator) -> Group:
        """Sample every trajectory and return the group.

        Raises:
            WorkerLost: the generator went away; nothing of the group is kept.
        """
        plan, max_turns = self.plan, self._family.max_turns
        try:
            prompt = self._family.prompt(plan.index, seed=self._spec.seed, split=plan.split)
            envs = self._family.make(prompt, plan.size)
        except Exception as error:  # the fate "bad rollout": whatever tenant-chosen code raises
            return _stillborn(plan, f"{type(error).__name__}: {error}")
        able = generator.capabilities
        max_context = able.max_trajectory(is_training=plan.is_training)
        least = self._tokenizer.least_tokens(prompt.messages)
        if least >= max_context:
            return _stillborn(plan, _no_room(least, max_context))
        rendered = await _rendered(self._tokenizer.render_opening, prompt.messages)
        opening = np.asarray(rendered, dtype=np.int32)
        self._episodes = [
            Episode(self._spec, self._tokenizer, plan, index, prompt, opening)
            for index in range(plan.size)
        ]
        for episode in self._episodes:
            episode.is_cut = self._is_cut
        self._tasks = [
            asyncio.create_task(episode.run(env, generator, max_turns))
            for episode, env in zip(self._episodes, envs, strict=True)
        ]
        trajectories = await all_or_none(self._tasks)
        return Group(
            index=plan.index,
            prompt_index=prompt.index,
            version=plan.version,
            trajectories=tuple(trajectories),
        )

    def cut(self) -> None:
        """End what is unfinished, typed as stragglers."""
        self._is_cut = True
        for episode, task in zip(self._episodes, self._tasks, strict=True):
            if not episode.is_over:
                episode.is_cut = True
                if episode.has_begun:  # the others see it when they do; a task that is cancelled
                    task.cancel()  # before its first line would leave nothing behind


class Episode:
    """One trajectory in the making: `opening -> (turn -> answer) * n -> over`."""

    def __init__(
        self,
        spec: JobSpec,
        tokenizer: ChatTokenizer,
        plan: GroupPlan,
        index: int,
        prompt: Prompt,
        opening: np.ndarray,
    ) -> None:
        self.is_over = False
        """The verdict is in; only cleaning up is left."""
        self.is_cut = False
        self.has_begun = False
        self._spec = spec
        self._tokenizer = tokenizer
        self._plan = plan
        self._index = index
        self._sequence_id = f"{spec.policy_id}/{plan.label}/{index}"
        self._seed = runtime.derive_seed("sample", spec.seed, plan.split, plan.index, index)
        self._opening_len = len(opening)
        self._pieces = [opening]
        """The sequence so far: opening, completion, continuation, completion, ..."""
        self._num_tokens = len(opening)
        self._messages = list(prompt.messages)
        self._completions: list[tuple[int, Completion]] = []
        """Position of the first sampled token, and what was sampled there."""
        self._latencies_s: list[float] = []
        self._metrics: dict[str, float] = {}
        self._num_lost_sandboxes = 0
        self._is_kept = False

    async def run(self, env: Env, generator: Generator, max_turns: int) -> Trajectory:
        """Play the episode to its end; failures become the trajectory's typed end."""
        self.has_begun = True
        verdict, detail = EnvStep(reward=0.0), ""
        try:
            if self.is_cut:
                raise asyncio.CancelledError
            end, verdict = await self._play(env, generator, max_turns)
        except EnvironmentFailure as failure:
            end, detail = TrajectoryEnd(failure.kind.value), str(failure)
        except asyncio.CancelledError:
            if not self.is_cut:
                raise
            end, detail = TrajectoryEnd.STRAGGLER, "cut at the job's straggler deadline"
        finally:
            self.is_over = True
            with suppress(Exception):  # the verdict is in: nothing that cleaning up says changes it
                await env.close()
            if self._is_kept:
                await generator.release([self._sequence_id])
        return self._trajectory(end, verdict, detail)

    async def _play(
        self, env: Env, generator: Generator, max_turns: int
    ) -> tuple[TrajectoryEnd, EnvStep]:
        able = generator.capabilities
        max_context = able.max_trajectory(is_training=self._plan.is_training)
        if self._opening_len >= max_context:
            raise EnvironmentFailure(FailureKind.ERROR, _no_room(self._opening_len, max_context))
        for turn in range(1, max_turns + 1):
            completion = await self._sample(generator, max_context, is_last=turn == max_turns)
            if completion.stop_reason is StopReason.NON_FINITE:
                return TrajectoryEnd.NON_FINITE, EnvStep(reward=0.0)
            if completion.stop_reason is StopReason.CANCELLED:
                return TrajectoryEnd.CANCELLED, EnvStep(reward=0.0)
            is_truncated = completion.stop_reason in (StopReason.LENGTH, StopReason.CONTEXT_FULL)
            reply = self._reply(completion)
            is_last = turn == max_turns or is_truncated
            answer = await self._judge(env, reply, is_last=is_last)
            if answer.is_done:
                return _end_of(is_truncated, is_last and max_turns > 1), answer
            continuation = await self._continuation(completion, answer, max_context)
            if continuation is None:
                # What was said does not fit, so nothing can be answered: judge what there is.
                answer = await self._judge(env, "", is_last=True)
                return TrajectoryEnd.TRUNCATED, answer
            self._append(continuation)
            self._messages.extend(answer.messages)
        raise AssertionError("an environment that was told `is_last` must end")

    async def _continuation(
        self, completion: Completion, answer: EnvStep, max_context: int
    ) -> np.ndarray | None:
        """Return the ids of what the environment says; None if they leave no room for a reply.

        What surely does not fit is not encoded: a tool may answer with megabytes.
        """
        room = max_context - self._num_tokens
        if self._tokenizer.least_tokens(answer.messages) >= room:
            return None
        render = partial(self._tokenizer.render_continuation, completion.tokens.tolist())
        ids = await _rendered(render, answer.messages)
        return np.asarray(ids, dtype=np.int32) if len(ids) < room else None

    async def _sample(self, generator: Generator, max_context: int, *, is_last: bool) -> Completion:
        spec, plan, turn = self._spec, self._plan, len(self._completions)
        start = self._num_tokens
        self._is_kept = not is_last
        completion = await generator.generate(
            GenerateRequest(
                request_id=f"{self._sequence_id}/{turn}",
                sequence_id=self._sequence_id,
                policy_id=spec.policy_id,
                version=plan.version,
                tokens=self._tokens(),
                sampling=SamplingParams(
                    max_tokens=min(spec.max_tokens, max_context - start),
                    temperature=spec.temperature,
                    stop_token_ids=tuple(self._tokenizer.stop_token_ids),
                    seed=self._seed,
                ),
                prefix_id=plan.label if plan.size > 1 else "",  # nobody to share it with
                prefix_len=self._opening_len,
                keep_kv=not is_last,
                in_flight=spec.is_in_flight and plan.is_training,
            )
        )
        self._completions.append((start, completion))
        self._append(completion.tokens)
        return completion

    def _append(self, tokens: np.ndarray) -> None:
        self._pieces.append(tokens)
        self._num_tokens += len(tokens)

    def _tokens(self) -> np.ndarray:
        return self._pieces[0] if len(self._pieces) == 1 else np.concatenate(self._pieces)

    def _reply(self, completion: Completion) -> str:
        """Return a completion as text, without its stop token, and note it as a message."""
        reply = self._tokenizer.decode(completion.reply_tokens.tolist())
        self._messages.append(Message("assistant", reply))
        return reply

    async def _judge(self, env: Env, reply: str, *, is_last: bool) -> EnvStep:
        """Return the environment's answer; note how long it took.

        Raises:
            EnvironmentFailure: it could not answer; any error of its own code is one.
        """
        began_s = runtime.now_s()
        try:
            answer = await self._step(env, reply, is_last=is_last)
        except EnvironmentFailure:
            raise
        except Exception as error:  # the fate "bad rollout": whatever tenant-chosen code raises
            raise EnvironmentFailure(
                FailureKind.ERROR, f"{type(error).__name__}: {error}"
            ) from error
        finally:
            self._latencies_s.append(runtime.now_s() - began_s)
        if is_last and not answer.is_done:
            raise EnvironmentFailure(FailureKind.ERROR, "no verdict at the last turn")
        if answer.reward is not None and not math.isfinite(answer.reward):
            raise EnvironmentFailure(FailureKind.ERROR, f"reward {answer.reward}")
        self._metrics.update(answer.metrics)
        return answer

    async def _step(self, env: Env, reply: str, *, is_last: bool) -> EnvStep:
        while True:
            try:
                return await env.step(reply, is_last=is_last)
            except EnvironmentFailure as failure:
                self._num_lost_sandboxes += failure.kind is FailureKind.SANDBOX_LOST
                is_lost = failure.kind is FailureKind.SANDBOX_LOST
                if not is_lost or self._num_lost_sandboxes > MAX_LOST_SANDBOXES:
                    raise

    def _trajectory(self, end: TrajectoryEnd, verdict: EnvStep, detail: str) -> Trajectory:
        """Lay the sampled tokens over the whole sequence; tokens after the last one are dropped."""
        last = self._completions[-1] if self._completions else None
        length = self._num_tokens if last is None else last[0] + len(last[1].tokens)
        loss_mask = np.zeros(length, dtype=bool)
        sampling_logprobs = np.zeros(length, dtype=np.float32)
        versions = np.full(length, -1, dtype=np.int32)
        turns = []
        for turn, (start, completion) in enumerate(self._completions):
            stop = start + len(completion.tokens)
            loss_mask[start:stop] = True
            sampling_logprobs[start:stop] = completion.logprobs
            versions[start:stop] = completion.versions
            turns.append(
                Turn(
                    start=start,
                    end=stop,
                    version=int(completion.versions[0]) if stop > start else self._plan.version,
                    adapter_hash=completion.adapter_hash,
                    stop_reason=completion.stop_reason,
                    latency_s=self._latencies_s[turn] if turn < len(self._latencies_s) else 0.0,
                )
            )
        return Trajectory(
            index=self._index,
            tokens=self._tokens()[:length],
            loss_mask=loss_mask,
            sampling_logprobs=sampling_logprobs,
            versions=versions,
            turns=tuple(turns),
            messages=tuple(self._messages),
            reward=verdict.reward or 0.0,
            is_success=verdict.is_success,
            end=end,
            detail=detail,
            metrics=dict(self._metrics),
        )


async def _rendered(
    render: Callable[[Sequence[Message]], Sequence[int]], messages: Sequence[Message]
) -> Sequence[int]:
    """Return messages as ids; long ones are encoded on a thread, while the event loop goes on."""
    if sum(len(message.content) for message in messages) < LONG_TEXT_CHARS:
        return render(messages)
    return await asyncio.to_thread(render, messages)


def _no_room(num_tokens: int, max_context: int) -> str:
    return f"the prompt of {num_tokens} tokens leaves no room in a context of {max_context}"


def _stillborn(plan: GroupPlan, detail: str) -> Group:
    """Return the group of a prompt that could not be made: every trajectory failed, empty."""
    none = np.zeros(0, dtype=np.int32)
    trajectories = tuple(
        Trajectory(
            index=index,
            tokens=none,
            loss_mask=none.astype(bool),
            sampling_logprobs=none.astype(np.float32),
            versions=none,
            turns=(),
            messages=(),
            reward=0.0,
            is_success=False,
            end=TrajectoryEnd.ENVIRONMENT_ERROR,
            detail=detail,
        )
        for index in range(plan.size)
    )
    return Group(
        index=plan.index,
        prompt_index=plan.index,
        version=plan.version,
        trajectories=trajectories,
    )


def _end_of(is_truncated: bool, is_turn_limit: bool) -> TrajectoryEnd:
    if is_truncated:
        return TrajectoryEnd.TRUNCATED
    return TrajectoryEnd.MAX_TURNS if is_turn_limit else TrajectoryEnd.DONE
