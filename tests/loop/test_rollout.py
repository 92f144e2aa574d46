"""Tokens are exact, failures are typed, seeds decide, and nothing is left behind."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from marlaas import runtime
from marlaas.envs.base import EnvStep
from marlaas.errors import EnvironmentFailure, FailureKind, WorkerLost
from marlaas.loop.rollout import GroupPlan, GroupRollout
from marlaas.types import (
    Capabilities,
    Completion,
    GenerateRequest,
    Group,
    JobSpec,
    Message,
    Prompt,
    StopReason,
    TrajectoryEnd,
)
from tests.fakes import ByteTokenizer

SPEC = JobSpec(tenant="acme", name="j", env={}, max_tokens=8, group_size=2, temperature=0.7)
OPENING = b"user:hi\nassistant:"


class Replies:
    """A generator that says what a script returns for each request."""

    def __init__(
        self, script: Callable[[GenerateRequest], str | StopReason | Exception], context: int = 100
    ) -> None:
        self.script = script
        self.capabilities = Capabilities(max_context=context)
        self.requests: list[GenerateRequest] = []
        self.released: list[str] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        reply = self.script(request)
        if isinstance(reply, Exception):
            raise reply
        reason = reply if isinstance(reply, StopReason) else StopReason.STOP_TOKEN
        ids = [] if isinstance(reply, StopReason) else list(reply.encode())
        if len(ids) >= request.sampling.max_tokens:
            ids, reason = ids[: request.sampling.max_tokens], StopReason.LENGTH
        await asyncio.sleep(1.0)
        return Completion(
            request_id=request.request_id,
            tokens=np.array(ids, dtype=np.int32),
            logprobs=np.full(len(ids), -0.5, dtype=np.float32),
            stop_reason=reason,
            versions=np.full(len(ids), request.version, dtype=np.int32),
            adapter_hash=f"hash{request.version}",
        )

    async def release(self, sequence_ids: list[str]) -> None:
        self.released += sequence_ids


@dataclass
class Echo:
    """A family whose environments answer by a script: (turn, reply, is_last) -> EnvStep."""

    answer: Callable[[int, str, bool], EnvStep]
    max_turns: int = 3
    name: str = "echo"
    envs: list["EchoEnv"] = field(default_factory=list)

    def prompt(self, index: int, *, seed: int, split: str) -> Prompt:
        return Prompt(index=index, messages=(Message("user", "hi"),), reference={})

    def make(self, prompt: Prompt, num_envs: int) -> list["EchoEnv"]:
        self.envs = [EchoEnv(self.answer) for _ in range(num_envs)]
        return self.envs


class EchoEnv:
    def __init__(self, answer: Callable[[int, str, bool], EnvStep]) -> None:
        self.answer = answer
        self.turn = 0
        self.num_closed = 0

    async def step(self, reply: str, *, is_last: bool) -> EnvStep:
        self.turn += 1
        await asyncio.sleep(0.25)
        return self.answer(self.turn, reply, is_last)

    async def close(self) -> None:
        self.num_closed += 1


def done(reward: float = 1.0, **metrics: float) -> EnvStep:
    return EnvStep(reward=reward, is_success=reward > 0.5, metrics=metrics)


def says(text: str) -> EnvStep:
    return EnvStep(messages=(Message("tool", text),))


def roll_out(
    family: Echo,
    generator: Replies,
    spec: JobSpec = SPEC,
    size: int = 1,
    tokenizer: ByteTokenizer | None = None,
) -> Group:
    plan = GroupPlan(index=5, version=3, size=size)

    async def main() -> Group:
        return await GroupRollout(spec, family, tokenizer or ByteTokenizer(), plan).run(generator)

    return runtime.run_virtual(main())


def test_tokens_are_the_sampled_and_the_rendered_ids_and_nothing_else() -> None:
    replies = iter(["ask\n", "abcdefghi", "never"])
    family = Echo(lambda turn, reply, is_last: says("ok") if turn == 1 else done(0.5, format=1.0))
    generator = Replies(lambda request: next(replies))
    (trajectory,) = roll_out(family, generator).trajectories
    text = OPENING + b"ask\n" + b"tool:ok\nassistant:" + b"abcdefgh"
    assert bytes(trajectory.tokens.tolist()) == text
    first, second = trajectory.turns
    assert text[first.start : first.end] == b"ask\n"
    assert text[second.start : second.end] == b"abcdefgh"
    assert np.flatnonzero(trajectory.loss_mask).tolist() == [
        *range(first.start, first.end), *range(second.start, second.end),
    ]  # fmt: skip
    assert (trajectory.sampling_logprobs[trajectory.loss_mask] == -0.5).all()
    assert (trajectory.sampling_logprobs[~trajectory.loss_mask] == 0).all()
    assert (trajectory.versions == np.where(trajectory.loss_mask, 3, -1)).all()
    assert trajectory.end is TrajectoryEnd.TRUNCATED
    assert (trajectory.reward, dict(trajectory.metrics)) == (0.5, {"format": 1.0})
    assert [m.role for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[1].content == "ask", "people do not see the stop token"
    assert [turn.latency_s for turn in trajectory.turns] == [0.25, 0.25]


def test_each_turn_continues_the_exact_context_of_the_one_before() -> None:
    replies = iter(["one\n", "two\n", "three\n"])
    family = Echo(lambda turn, reply, is_last: done() if is_last else says(reply))
    generator = Replies(lambda request: next(replies))
    (trajectory,) = roll_out(family, generator).trajectories
    contexts = [request.tokens.tolist() for request in generator.requests]
    for request, turn in zip(generator.requests, trajectory.turns, strict=True):
        assert request.tokens.tolist() == trajectory.tokens[: turn.start].tolist()
    assert [request.keep_kv for request in generator.requests] == [True, True, False]
    assert len({request.sequence_id for request in generator.requests}) == 1
    assert len({request.request_id for request in generator.requests}) == 3
    assert contexts[0] == list(OPENING)
    assert trajectory.end is TrajectoryEnd.MAX_TURNS
    assert trajectory.turns[0].adapter_hash == "hash3"


def test_siblings_share_their_prefix_and_differ_in_their_seed() -> None:
    generator = Replies(lambda request: "x\n")
    roll_out(Echo(lambda *_: done()), generator, size=4)
    requests = generator.requests
    assert len({request.prefix_id for request in requests}) == 1
    assert {request.prefix_len for request in requests} == {len(OPENING)}
    assert len({request.sampling.seed for request in requests}) == 4
    assert {request.sampling.temperature for request in requests} == {0.7}
    again = Replies(lambda request: "x\n")
    roll_out(Echo(lambda *_: done()), again, size=4)
    assert [r.sampling.seed for r in again.requests] == [r.sampling.seed for r in requests]
    other = Replies(lambda request: "x\n")
    roll_out(Echo(lambda *_: done()), other, replace(SPEC, seed=1), size=4)
    assert not {r.sampling.seed for r in other.requests} & {r.sampling.seed for r in requests}


def test_a_lone_trajectory_keeps_no_prefix_for_others() -> None:
    generator = Replies(lambda request: "x\n")
    roll_out(Echo(lambda *_: done()), generator, size=1)
    assert [request.prefix_id for request in generator.requests] == [""]


def test_held_out_prompts_never_share_a_seed_with_training() -> None:
    generator = Replies(lambda request: "x\n")

    async def main() -> None:
        for split in ("train", "eval"):
            plan = GroupPlan(index=5, version=3, size=1, split=split)
            await GroupRollout(SPEC, Echo(lambda *_: done()), ByteTokenizer(), plan).run(generator)

    runtime.run_virtual(main())
    assert len({request.sampling.seed for request in generator.requests}) == 2
    assert len({request.sequence_id for request in generator.requests}) == 2


def test_a_reply_cut_at_its_limit_is_judged_as_the_last_one() -> None:
    seen = []
    family = Echo(lambda turn, reply, is_last: seen.append((reply, is_last)) or done(0.0))
    (trajectory,) = roll_out(family, Replies(lambda request: "abcdefghijk")).trajectories
    assert seen == [("abcdefgh", True)]
    assert trajectory.end is TrajectoryEnd.TRUNCATED


def test_what_does_not_fit_the_context_ends_the_episode_with_a_verdict() -> None:
    seen = []

    def answer(turn: int, reply: str, is_last: bool) -> EnvStep:
        seen.append((reply, is_last))
        return done(0.25) if is_last else says("x" * 200)

    (trajectory,) = roll_out(Echo(answer), Replies(lambda request: "ab\n")).trajectories
    assert seen == [("ab", False), ("", True)]
    assert (trajectory.end, trajectory.reward) == (TrajectoryEnd.TRUNCATED, 0.25)
    assert bytes(trajectory.tokens.tolist()) == OPENING + b"ab\n"


class Unread(ByteTokenizer):
    """A tokenizer that must not be given anything long."""

    def _render(self, messages: Sequence[Message]) -> bytes:
        assert sum(len(message.content) for message in messages) < 1000
        return super()._render(messages)


@pytest.mark.parametrize("size", [1000, 10_000_000])
def test_what_surely_does_not_fit_is_not_encoded(size: int) -> None:
    def answer(turn: int, reply: str, is_last: bool) -> EnvStep:
        return done(0.25) if is_last else says("x" * size)

    replies = Replies(lambda request: "ab\n")
    (trajectory,) = roll_out(Echo(answer), replies, tokenizer=Unread()).trajectories
    assert (trajectory.end, trajectory.reward) == (TrajectoryEnd.TRUNCATED, 0.25)


def test_a_turn_asks_for_no_more_than_the_context_holds() -> None:
    generator = Replies(lambda request: "abcdefgh", context=len(OPENING) + 3)
    (trajectory,) = roll_out(Echo(lambda *_: done()), generator).trajectories
    assert generator.requests[0].sampling.max_tokens == 3
    assert len(trajectory.tokens) == len(OPENING) + 3


def test_a_prompt_larger_than_the_context_is_a_typed_failure() -> None:
    generator = Replies(lambda request: "x\n", context=10)
    (trajectory,) = roll_out(Echo(lambda *_: done()), generator).trajectories
    assert trajectory.end is TrajectoryEnd.ENVIRONMENT_ERROR
    assert "leaves no room in a context of 10" in trajectory.detail
    assert generator.requests == []


@pytest.mark.parametrize("kind", list(FailureKind))
def test_failures_are_typed_and_siblings_go_on(kind: FailureKind) -> None:
    def answer(turn: int, reply: str, is_last: bool) -> EnvStep:
        if reply == "bad":
            raise EnvironmentFailure(kind, "it broke")
        return done()

    family = Echo(answer)
    is_first = {"value": True}

    def script(request: GenerateRequest) -> str:
        was_first, is_first["value"] = is_first["value"], False
        return "bad\n" if was_first else "good\n"

    bad, good = roll_out(family, Replies(script), size=2).trajectories
    assert (bad.end.value, bad.reward) == (kind.value, 0.0)
    assert "it broke" in bad.detail and not bad.end.is_trainable
    assert (good.end, good.reward) == (TrajectoryEnd.DONE, 1.0)
    assert [env.num_closed for env in family.envs] == [1, 1]


def test_a_lost_sandbox_is_tried_again_once() -> None:
    calls = []

    def answer(turn: int, reply: str, is_last: bool) -> EnvStep:
        calls.append(turn)
        if len(calls) == 1:
            raise EnvironmentFailure(FailureKind.SANDBOX_LOST, "gone")
        return done()

    (trajectory,) = roll_out(Echo(answer), Replies(lambda request: "x\n")).trajectories
    assert trajectory.end is TrajectoryEnd.DONE and len(calls) == 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda *_: 1 / 0, "ZeroDivisionError"),
        (lambda *_: done(float("nan")), "reward nan"),
        (lambda turn, reply, is_last: says("more"), "no verdict at the last turn"),
    ],
)
def test_a_broken_environment_never_becomes_a_reward(answer, words: str) -> None:
    (trajectory,) = roll_out(Echo(answer), Replies(lambda request: "x\n")).trajectories
    assert trajectory.end is TrajectoryEnd.ENVIRONMENT_ERROR
    assert words in trajectory.detail


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        (StopReason.NON_FINITE, TrajectoryEnd.NON_FINITE),
        (StopReason.CANCELLED, TrajectoryEnd.CANCELLED),
    ],
)
def test_a_row_that_broke_in_the_engine_is_not_judged(reason, end) -> None:
    family = Echo(lambda *_: pytest.fail("judged"))
    (trajectory,) = roll_out(family, Replies(lambda request: reason)).trajectories
    assert trajectory.end is end
    assert family.envs[0].num_closed == 1


def test_a_lost_worker_ends_the_whole_group_and_closes_everything() -> None:
    family = Echo(lambda turn, reply, is_last: says("go on"))

    def script(request: GenerateRequest) -> str | Exception:
        is_second_turn = len(request.tokens) > len(OPENING)
        return WorkerLost("gone") if is_second_turn else "x\n"

    with pytest.raises(WorkerLost):
        roll_out(family, Replies(script), size=3)
    assert [env.num_closed for env in family.envs] == [1, 1, 1]


def test_cutting_keeps_what_has_ended_and_types_the_rest() -> None:
    def answer(turn: int, reply: str, is_last: bool) -> EnvStep:
        return done() if reply == "fast" else says("go on")

    async def main() -> tuple[Group, Replies, float]:
        is_first = {"value": True}

        def script(request: GenerateRequest) -> str:
            was_first, is_first["value"] = is_first["value"], False
            return "fast\n" if was_first else "slow\n"

        generator = Replies(script)
        plan = GroupPlan(index=0, version=0, size=2)
        rollout = GroupRollout(SPEC, Echo(answer, max_turns=99), ByteTokenizer(), plan)
        running = asyncio.create_task(rollout.run(generator))
        await asyncio.sleep(1.9)
        rollout.cut()
        return await running, generator, runtime.now_s()

    group, generator, now_s = runtime.run_virtual(main())
    fast, slow = group.trajectories
    assert now_s == pytest.approx(1.9)
    assert (fast.end, fast.reward) == (TrajectoryEnd.DONE, 1.0)
    assert slow.end is TrajectoryEnd.STRAGGLER and len(slow.turns) == 1
    assert set(generator.released) == {"acme/j/train-0@0/0", "acme/j/train-0@0/1"}


def test_cancelling_a_group_is_not_a_cut() -> None:
    async def main() -> Echo:
        family = Echo(lambda *_: done())
        plan = GroupPlan(index=0, version=0, size=2)
        rollout = GroupRollout(SPEC, family, ByteTokenizer(), plan)
        running = asyncio.create_task(rollout.run(Replies(lambda request: "x\n")))
        await asyncio.sleep(0.5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return family

    assert [env.num_closed for env in runtime.run_virtual(main()).envs] == [1, 1]


@pytest.mark.parametrize("num_turns_of_loop", [0, 1])
def test_a_group_cut_before_its_episodes_begin_ends_as_stragglers(num_turns_of_loop: int) -> None:
    async def main() -> tuple[Group, Replies, float]:
        family = Echo(lambda *_: done())
        generator = Replies(lambda request: "x\n")
        plan = GroupPlan(index=0, version=0, size=2)
        rollout = GroupRollout(SPEC, family, ByteTokenizer(), plan)

        async def cut() -> None:
            rollout.cut()

        running = asyncio.create_task(rollout.run(generator))
        # Before the group runs, or when it has made its tasks and none of them has begun.
        if num_turns_of_loop:
            await asyncio.create_task(cut())
        else:
            rollout.cut()
        return await running, generator, runtime.now_s()

    group, generator, now_s = runtime.run_virtual(main())
    assert now_s == 0 and generator.requests == []
    assert [one.end for one in group.trajectories] == [TrajectoryEnd.STRAGGLER] * 2


def test_a_trajectory_that_is_trained_on_ends_where_memory_does_and_a_judged_one_goes_on() -> None:
    lengths = {}
    for split in ("train", "eval"):
        generator = Replies(lambda request: "abcdefghi")
        generator.capabilities = Capabilities(max_context=100, max_trained_tokens=len(OPENING) + 3)
        family = Echo(lambda turn, reply, is_last: done(0.0))
        plan = GroupPlan(index=5, version=3, size=1, split=split)
        rollout = GroupRollout(SPEC, family, ByteTokenizer(), plan)
        (trajectory,) = runtime.run_virtual(rollout.run(generator)).trajectories
        lengths[split] = len(trajectory.tokens) - len(OPENING)
    assert lengths == {"train": 3, "eval": SPEC.max_tokens}
