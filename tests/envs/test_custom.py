"""A tenant's own file judges replies: what it may return, and what becomes of its faults."""

import asyncio
import io
import json
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import marlaas
from marlaas.envs.base import EnvStep
from marlaas.envs.catalog import make_family
from marlaas.envs.custom import CustomFamily, CustomSettings, check_environment
from marlaas.envs.print_log import CALL_CHARACTERS, MINUTE_CHARACTERS, PrintLog
from marlaas.envs.prompts import check_prompts
from marlaas.envs.sandbox import Sandbox
from marlaas.errors import EnvironmentFailure, FailureKind, InvalidRequest
from marlaas.runtime import run_virtual

REFUSED = asyncio.run(Sandbox.probe())
pytestmark = pytest.mark.skipif(REFUSED != "", reason=REFUSED)

PROMPTS = b"".join(b'{"prompt": "What is %d + 1?", "answer": %d}\n' % (i, i + 1) for i in range(40))

ADD = """
import re
CALLS = []
def reward(prompt, reply):
    CALLS.append(reply)
    assert len(CALLS) == 1, "calls share memory"
    found = re.search(r"-?[0-9]+", reply)
    is_right = found is not None and int(found[0]) == prompt["answer"]
    return {"reward": float(is_right), "success": is_right, "metrics": {"read": found is not None}}
"""

GUESS = """
def start(prompt):
    return {"secret": prompt["answer"], "tries": 0}

def step(state, reply, is_last):
    tries, guess = state["tries"] + 1, int(reply)
    if guess == state["secret"]:
        return {"reward": 1 / tries, "success": True, "metrics": {"tries": tries}}
    if is_last:
        return {"reward": 0}
    hint = "higher" if guess < state["secret"] else "lower"
    return {"state": {"secret": state["secret"], "tries": tries},
            "messages": [{"role": "user", "content": hint}]}
"""


def with_family(
    source: str,
    use: Callable[[CustomFamily], Awaitable],
    *,
    log: Callable[[str], None] | None = None,
    prompts: bytes = PROMPTS,
    **settings: object,
):
    """Run `use` with a started family of this file and return its result."""
    uploads = {"file": source.encode(), "prompts": prompts}
    env = {"family": "custom", "environment": "file", "prompts": "prompts", **settings}

    async def main():
        family = make_family(env, read_upload=uploads.__getitem__, log=log)
        assert isinstance(family, CustomFamily)
        try:
            await family.start()
            return await use(family)
        finally:
            await family.stop()

    return asyncio.run(main())


def outcomes_of(source: str, *replies: str, is_last: bool = True, **settings: object) -> list:
    """Return for each reply, given to an episode of its own, the answer or the failure."""

    async def use(family: CustomFamily) -> list:
        prompt = family.prompt(0, seed=0, split="train")
        envs = family.make(prompt, len(replies))
        return await asyncio.gather(
            *(env.step(reply, is_last=is_last) for env, reply in zip(envs, replies, strict=True)),
            return_exceptions=True,
        )

    return with_family(source, use, **settings)


def failure_of(source: str, reply: str = "", **settings: object) -> EnvironmentFailure:
    (outcome,) = outcomes_of(source, reply, **settings)
    assert isinstance(outcome, EnvironmentFailure), outcome
    return outcome


def problems_of(source: str | bytes, prompt: dict | None = None) -> tuple[str, ...]:
    with pytest.raises(InvalidRequest) as caught:
        asyncio.run(check_environment(source, prompt=prompt))
    return caught.value.problems


# ---------------------------------------------------------------------------------------------
# Episodes


def test_a_reward_function_judges_every_reply_in_a_copy_of_its_own():
    async def use(family: CustomFamily) -> list[EnvStep]:
        steps = []
        for index in range(6):
            prompt = family.prompt(index, seed=1, split="train")
            right, wrong = family.make(prompt, 2)
            steps += [await right.step(f"It is {prompt.reference['answer']}", is_last=True)]
            steps += [await wrong.step("no idea", is_last=True)]
        return steps

    steps = with_family(ADD, use)
    assert [step.reward for step in steps] == [1.0, 0.0] * 6
    assert [step.is_success for step in steps] == [True, False] * 6
    assert [step.metrics for step in steps[:2]] == [{"read": 1.0}, {"read": 0.0}]


def test_a_bare_number_is_a_reward_and_one_is_a_success():
    source = "def reward(prompt, reply): return float(reply)"
    steps = outcomes_of(source, "1", "0.5", "-3", "2")
    assert [(step.reward, step.is_success) for step in steps] == [
        (1.0, True), (0.5, False), (-3.0, False), (2.0, True)
    ]  # fmt: skip


def test_an_episode_of_several_turns_travels_as_state():
    async def use(family: CustomFamily) -> list[EnvStep]:
        prompt = family.prompt(3, seed=0, split="train")
        (env,) = family.make(prompt, 1)
        answer = int(str(prompt.reference["answer"]))
        guesses = (answer - 5, answer + 5, answer)
        return [await env.step(str(guess), is_last=False) for guess in guesses]

    first, second, third = with_family(GUESS, use, max_turns=5)
    assert first.messages[0].content == "higher" and second.messages[0].content == "lower"
    assert not first.is_done and third.reward == pytest.approx(1 / 3) and third.is_success
    assert third.metrics == {"tries": 3.0}


def test_any_container_can_take_the_next_call_of_an_episode():
    async def use(family: CustomFamily) -> list[float | None]:
        prompt = family.prompt(0, seed=0, split="train")
        envs = family.make(prompt, 6)
        right = str(prompt.reference["answer"])
        await asyncio.gather(*(env.step("-1", is_last=False) for env in envs))
        steps = await asyncio.gather(*(env.step(right, is_last=True) for env in reversed(envs)))
        return [step.reward for step in steps]

    assert with_family(GUESS, use, max_turns=2) == [0.5] * 6


def test_the_same_call_gives_the_same_result_in_every_container_and_copy():
    source = "import random\ndef reward(prompt, reply): return random.random() + hash(reply) % 7"
    assert len({step.reward for step in outcomes_of(source, *["same"] * 8)}) == 1


def test_the_file_is_imported_once_per_container():
    source = "print('imported')\ndef reward(prompt, reply): return 1"
    lines: list[str] = []
    steps = outcomes_of(source, *["x"] * 10, log=lines.append)
    assert all(step.reward == 1.0 for step in steps)
    assert 1 <= lines.count("imported") <= 2


def test_with_more_processes_the_file_is_imported_for_each_call_and_nothing_stays():
    source = """
import os, time
def reward(prompt, reply):
    alive = 0
    for pid in range(1, 200):
        try: os.kill(pid, 0)
        except ProcessLookupError: continue
        except PermissionError: pass
        alive += 1
    if os.fork() == 0:
        while True: time.sleep(1)
    return alive
"""
    steps = outcomes_of(source, *["x"] * 4, max_processes=4)
    assert [step.reward for step in steps] == [3.0] * 4


def test_cpu_seconds_of_the_file_are_counted():
    burn = "def reward(prompt, reply):\n    sum(range(10 ** 7))\n    return 1"

    async def use(family: CustomFamily) -> float:
        before_s = family.cpu_s()
        (env,) = family.make(family.prompt(0, seed=0, split="train"), 1)
        await env.step("", is_last=True)
        return family.cpu_s() - before_s

    assert with_family(burn, use) > 0.05


# ---------------------------------------------------------------------------------------------
# What the file gets wrong


def test_a_wrong_value_is_a_failure_that_says_what_would_be_right():
    wanted = {
        "float('nan')": "reward must return a reward that is a finite number within 1,000,000",
        "float('inf')": "a finite number within 1,000,000, got inf",
        "1e9": "a finite number within 1,000,000, got 1000000000.0",
        "10 ** 400": "got a huge number",
        "'1'": "a finite number within 1,000,000, got '1'",
        "None": "got nothing",
        "True": "got True",
        "[1]": "got [1]",
        "{}": "got nothing",
        "{'reward': 1, 'succes': True}": "unknown field 'succes'; known are reward, success, metr",
        "{'reward': 1, 'success': 1}": "success as true or false, got 1",
        "{'reward': 1, 'metrics': {'a': 'b'}}": "metric 'a' must be a finite number, got 'b'",
        "{'reward': 1, 'metrics': [1]}": "metrics as a dict of at most 32 numbers by name",
        "{1, 2}": "reward failed: TypeError: Object of type set is not JSON serializable",
        "deep(10 ** 5)": "RecursionError",
    }
    deep = "def deep(n):\n    x = []\n    for _ in range(n): x = [x]\n    return x\n"
    cases = ", ".join(f"lambda: {value}" for value in wanted)
    source = f"{deep}def reward(prompt, reply): return [{cases}][int(reply)]()"
    failures = outcomes_of(source, *map(str, range(len(wanted))))
    for failure, words in zip(failures, wanted.values(), strict=True):
        assert isinstance(failure, EnvironmentFailure), failure
        assert failure.kind is FailureKind.ERROR and words in failure.reason, failure


def test_wrong_steps_are_failures_too():
    wanted = {
        "1": "step must return a dict with state and messages, or reward; got 1",
        "{'messages': [{'role': 'user', 'content': 'x'}]}": "step must return state",
        "{'state': {}}": "step must return messages, a list of 1 to 16",
        "{'state': {}, 'messages': []}": "step must return messages",
        "{'state': {}, 'messages': [{'role': 'robot', 'content': 'x'}]}": "messages[0].role must",
        "{'state': {}, 'messages': [{'role': 'user'}]}": "messages[0].content must be a string",
        "{'state': {}, 'messages': [{'role': 'assistant', 'content': 'x'}]}": "the policy's",
    }
    cases = ", ".join(wanted)
    source = (
        f"def start(prompt): return {{}}\ndef step(s, reply, is_last): return [{cases}][int(reply)]"
    )
    replies = map(str, range(len(wanted)))
    failures = outcomes_of(source, *replies, is_last=False, max_turns=3)
    for failure, words in zip(failures, wanted.values(), strict=True):
        assert isinstance(failure, EnvironmentFailure) and words in failure.reason, failure


def test_the_last_turn_needs_a_verdict_and_start_a_dict():
    on = "return {'state': {}, 'messages': [{'role': 'user', 'content': 'x'}]}"
    failure = failure_of(f"def start(p): return {{}}\ndef step(s, r, l): {on}")
    assert "must return a reward when is_last is true" in failure.reason
    failure = failure_of(f"def start(p): return 3\ndef step(s, r, l): {on}")
    assert "start must return a dict of JSON values, got int" in failure.reason


def test_running_over_a_limit_is_typed():
    ends = {
        "while True: pass": (FailureKind.TIMEOUT, "took longer than 0.2 s (time_limit_s)"),
        "import time; time.sleep(60)": (FailureKind.TIMEOUT, "took longer than 0.2 s"),
        "bytearray(1 << 30)": (FailureKind.SANDBOX_LIMIT, "limit on memory"),
        "import os; os.fork()": (FailureKind.SANDBOX_LIMIT, "limit on processes"),
        "open('/tmp/a', 'wb').write(bytes(1 << 24))": (FailureKind.SANDBOX_LIMIT, "files"),
        "return 'x' * 10 ** 6": (FailureKind.SANDBOX_LIMIT, "limit on output"),
        "print('x' * 10 ** 6)": (FailureKind.SANDBOX_LIMIT, "limit on output"),
        "import os; os.abort()": (FailureKind.ERROR, "died of signal 6"),
        "import os; os._exit(0)": (FailureKind.ERROR, "ended before"),
        "raise SystemExit": (FailureKind.ERROR, "SystemExit"),
        "return 1 / 0": (FailureKind.ERROR, "ZeroDivisionError: division by zero (line"),
    }
    cases = "\n".join(f"def f{i}():\n    {code}" for i, code in enumerate([*ends, "return 1"]))
    source = f"{cases}\ndef reward(prompt, reply): return globals()['f' + reply]()"
    outcomes = outcomes_of(source, *map(str, range(len(ends) + 1)), time_limit_s=0.2)
    assert outcomes.pop().reward == 1.0
    for outcome, (kind, words) in zip(outcomes, ends.values(), strict=True):
        assert isinstance(outcome, EnvironmentFailure), outcome
        assert outcome.kind is kind and words in outcome.reason, outcome


def test_limits_are_settings_of_the_job():
    limits = CustomSettings(memory_mb=64, max_processes=3, tmp_mb=2, output_kb=8).limits
    assert (limits.memory_bytes, limits.max_processes) == (64 << 20, 3)
    assert (limits.tmp_bytes, limits.output_bytes) == (2 << 20, 8 << 10)
    source = "def reward(prompt, reply): return len(bytearray(200 << 20)) >> 20"
    (step,) = outcomes_of(source, "", memory_mb=512)
    assert step.reward == 200.0


# ---------------------------------------------------------------------------------------------
# Where its words go


def test_prints_and_tracebacks_reach_the_log_and_no_other_place(caplog, capfd):
    caplog.set_level(logging.DEBUG)
    lines: list[str] = []
    source = (
        "def inner(x):\n    return 1 / x\ndef reward(prompt, reply):\n    print('seen', reply)\n"
    )
    source += "    return inner(0)"
    failure_of(source, "secret words", log=lines.append)
    (text,) = lines
    assert text.startswith("seen secret words\nTraceback (most recent call last):")
    assert 'File "environment.py", line 2, in inner\n    return 1 / x' in text
    assert text.endswith("ZeroDivisionError: division by zero") and "server.py" not in text
    assert "secret words" not in caplog.text
    assert "secret" not in "".join(capfd.readouterr())


def test_what_is_printed_before_a_cut_is_logged():
    lines: list[str] = []
    source = "def reward(prompt, reply):\n    print('here')\n    while True: pass"
    failure_of(source, time_limit_s=0.2, log=lines.append)
    assert lines == ["here"]


def test_the_log_is_bounded_per_call_and_per_minute():
    async def main() -> list[str]:
        lines: list[str] = []
        log = PrintLog(lines.append)
        for _ in range(1000):
            log.add("x" * (2 * CALL_CHARACTERS))
        assert sum(map(len, lines)) <= MINUTE_CHARACTERS + 100
        assert lines[0].endswith(f"[cut: {CALL_CHARACTERS} characters]")
        await asyncio.sleep(61)
        log.add("again")
        return lines[-2:]

    left_out, again = run_virtual(main())
    assert left_out.startswith("[left out: the output of 9") and again == "again"


# ---------------------------------------------------------------------------------------------
# Checking at submit


def test_a_right_file_passes_the_check_and_its_trial():
    asyncio.run(check_environment(ADD, prompt={"prompt": "?", "answer": 2}))
    source = GUESS.replace("int(reply)", "int(reply or 0)")
    asyncio.run(check_environment(source.encode(), prompt={"prompt": "?", "answer": 2}))


def test_every_fault_of_a_file_is_named():
    assert (
        "SyntaxError: expected ':' (environment.py, line 2)" in problems_of("x = 1\ndef f()\n")[0]
    )
    assert "NameError: name 'y' is not defined (line 2)" in problems_of("x = 1\ny\n")[0]
    assert "ModuleNotFoundError: No module named 'numpy'" in problems_of("import numpy")[0]
    assert "needs reward(prompt, reply), or start(prompt) and step" in problems_of("x = 1")[0]
    assert "it has only start" in problems_of("def start(p): return {}")[0]
    assert "keep one form" in problems_of(ADD + GUESS)[0]
    assert "cannot be called as reward(prompt, reply)" in problems_of("def reward(p): return 1")[0]
    assert "neither async" in problems_of("async def reward(p, r): return 1")[0]
    assert "must be a function" in problems_of("reward = 3")[0]
    both = problems_of("def start(): pass\ndef step(s): pass")
    assert len(both) == 2 and "step(state, reply, is_last): it is step(s)" in both[1]
    assert "not UTF-8" in problems_of(b"\xff")[0]
    assert "ended the process" in problems_of("import os\nos._exit(0)")[0]


def test_an_import_that_does_not_end_is_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("marlaas.envs.custom.IMPORT_LIMIT_S", 0.2)
    for code in ("while True: pass", "import time\ntime.sleep(100)"):
        assert "cannot be loaded: ran over the limit of time" in problems_of(code)[0]


def test_the_trial_finds_what_only_a_call_shows():
    problem = problems_of("def reward(prompt, reply): return prompt['anser']", {"answer": 1})[0]
    assert problem == (
        "on the first prompt with an empty reply: reward failed: KeyError: 'anser' (line 1)"
    )
    problem = problems_of("def reward(prompt, reply): return reply", {"answer": 1})[0]
    assert "a finite number within 1,000,000, got ''" in problem


def test_an_unsuitable_form_and_missing_uploads_are_refused():
    async def nothing(family: CustomFamily) -> None: ...

    with pytest.raises(InvalidRequest, match="several turns need start and step"):
        with_family(ADD, nothing, max_turns=3)
    with pytest.raises(InvalidRequest, match="set split_by: line, or eval_share: 0"):
        with_family(ADD, nothing, prompts=b'{"prompt": "x", "answer": 1}\n' * 9)
    with pytest.raises(InvalidRequest, match=r"line 1: prompt must be a string"):
        with_family(ADD, nothing, prompts=b'{"prompt": 3}\n')
    with pytest.raises(InvalidRequest) as caught:
        make_family({"family": "custom", "eval_share": 2})
    assert "eval_share must be between 0.0 and 0.9, got 2" in caught.value.problems
    with pytest.raises(InvalidRequest) as caught:
        make_family({"family": "custom"})
    assert len(caught.value.problems) == 2

    async def start_without_uploads() -> None:
        await make_family({"family": "custom", "environment": "a", "prompts": "b"}).start()

    with pytest.raises(InvalidRequest, match="needs uploads"):
        asyncio.run(start_without_uploads())


def test_uploads_may_come_from_another_thread():
    uploads = {"file": ADD.encode(), "prompts": PROMPTS}

    async def read(name: str) -> bytes:
        return await asyncio.to_thread(uploads.__getitem__, name)

    async def main() -> None:
        env = {"family": "custom", "environment": "file", "prompts": "prompts"}
        family = make_family(env, read_upload=read)
        await family.start()
        assert family.prompt(0, seed=0, split="eval").messages[0].role == "user"
        await family.stop()

    asyncio.run(main())


def test_the_examples_of_the_docs_work():
    docs = (Path(marlaas.__file__).parent.parent / "docs" / "jobs.md").read_text()
    lines = re.search(r"```json\n(.*?)```", docs, re.DOTALL)
    one_turn, turns = re.findall(r"```python\n(.*?)```", docs, re.DOTALL)
    assert lines is not None and check_prompts(io.BytesIO(lines[1].encode())) == 2
    prompt = json.loads(lines[1].splitlines()[0])
    for source in (one_turn, turns):
        asyncio.run(check_environment(source, prompt=prompt))
