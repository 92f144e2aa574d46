"""Reads what the functions of a tenant's file return, strictly.

    reward(prompt, reply)       -> 0.5 | {"reward": 0.5, "success": true, "metrics": {"short": 1}}
    step(state, reply, is_last) -> {"state": {...}, "messages": [{"role": "tool", "content": ""}]}
                                 | {"reward": 1.0, "success": true, "metrics": {}}

Whatever does not fit is an `EnvironmentFailure` whose message says what would; no value is bent
into shape, since a reward that was guessed would be trained on.
"""

import math

from marlaas.envs.base import EnvStep
from marlaas.envs.prompts import message_faults
from marlaas.errors import EnvironmentFailure, FailureKind
from marlaas.types import Message

MAX_REWARD = 1e6
"""Beyond it a reward is a mistake, and its advantage noise."""
MAX_METRICS = 32
MAX_METRIC_NAME = 64
MAX_MESSAGES = 16
"""Of one turn."""
SHOWN = 80
"""Characters of a wrong value in a message."""


def read_reward(value: object) -> EnvStep:
    """Return the end of an episode from what `reward` returned.

    Raises:
        EnvironmentFailure: names every fault of the value.
    """
    record = value if type(value) is dict else {"reward": value}
    faults = _unknown_fields("reward", record, ("reward", "success", "metrics"))
    faults += _verdict_faults("reward", record)
    if faults:
        raise EnvironmentFailure(FailureKind.ERROR, "; ".join(faults))
    return _verdict(record)


def read_step(value: object, *, is_last: bool) -> tuple[EnvStep, object]:
    """Return an answer and the state to go on with (None at the end) from what `step` returned.

    Raises:
        EnvironmentFailure: names every fault of the value.
    """
    faults = step_faults(value, is_last=is_last)
    if faults or type(value) is not dict:
        raise EnvironmentFailure(FailureKind.ERROR, "; ".join(faults))
    if value.get("reward") is not None:
        return _verdict(value), None
    messages = tuple(Message(one["role"], one["content"]) for one in value["messages"])
    return EnvStep(messages=messages, metrics=value.get("metrics") or {}), value["state"]


def step_faults(value: object, *, is_last: bool) -> list[str]:
    """Return what is wrong with a value that `step` returned."""
    if type(value) is not dict:
        return [f"step must return a dict with state and messages, or reward; got {_shown(value)}"]
    fields = ("state", "messages", "reward", "success", "metrics")
    faults = _unknown_fields("step", value, fields)
    if value.get("reward") is not None:
        return faults + _verdict_faults("step", value)
    if is_last:
        return [*faults, "step must return a reward when is_last is true: no turn is left"]
    if type(value.get("state")) is not dict:
        faults.append(
            "step must return state, a dict of JSON values, while the episode goes on; "
            f"got {_shown(value.get('state'))}"
        )
    return faults + _messages_faults(value.get("messages")) + _metrics_faults("step", value)


def _messages_faults(messages: object) -> list[str]:
    if type(messages) is not list or not 0 < len(messages) <= MAX_MESSAGES:
        wanted = f'1 to {MAX_MESSAGES} of {{"role": ..., "content": ...}}'
        return [f"step must return messages, a list of {wanted}; got {_shown(messages)}"]
    return [
        f"step returned messages[{place}]{fault}"
        for place, message in enumerate(messages)
        for fault in _answer_faults(message)
    ]


def _answer_faults(message: object) -> list[str]:
    faults = message_faults(message)
    if not faults and isinstance(message, dict) and message["role"] == "assistant":
        return [".role must not be assistant: those words are the policy's"]
    return faults


def _verdict_faults(function: str, record: dict) -> list[str]:
    reward, success = record.get("reward"), record.get("success")
    faults = []
    if type(reward) not in (int, float) or not _is_within(reward, MAX_REWARD):
        bound = f"a finite number within {MAX_REWARD:,.0f}"
        faults.append(f"{function} must return a reward that is {bound}, got {_shown(reward)}")
    if success is not None and type(success) is not bool:
        faults.append(f"{function} must return success as true or false, got {_shown(success)}")
    return faults + _metrics_faults(function, record)


def _metrics_faults(function: str, record: dict) -> list[str]:
    metrics = record.get("metrics")
    if metrics is None:
        return []
    if type(metrics) is not dict or len(metrics) > MAX_METRICS:
        wanted = f"a dict of at most {MAX_METRICS} numbers by name"
        return [f"{function} must return metrics as {wanted}, got {_shown(metrics)}"]
    faults = []
    for name, number in metrics.items():
        if not 0 < len(name) <= MAX_METRIC_NAME:
            faults.append(f"{function} returned a metric whose name is not 1 to 64 characters long")
        if type(number) not in (int, float, bool) or not _is_within(number, math.inf):
            faults.append(f"metric {_shown(name)} must be a finite number, got {_shown(number)}")
    return faults


def _unknown_fields(function: str, record: dict, known: tuple[str, ...]) -> list[str]:
    unknown = ", ".join(repr(key) for key in record if key not in known)
    if not unknown:
        return []
    return [f"{function} returned the unknown field {unknown}; known are {', '.join(known)}"]


def _verdict(record: dict) -> EnvStep:
    """Return the end of the episode. Unless it is said, a success is a reward of at least 1."""
    reward = float(record["reward"])
    success = record.get("success")
    metrics = {name: float(number) for name, number in (record.get("metrics") or {}).items()}
    return EnvStep(
        reward=reward,
        is_success=reward >= 1.0 if success is None else success,
        metrics=metrics,
    )


def _is_within(number: float | None, bound: float) -> bool:
    """Return whether a number is finite and no further than `bound` from 0, however long it is."""
    if number is None:
        return False
    try:
        return math.isfinite(number) and abs(number) <= bound
    except OverflowError:
        return False


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a huge number"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
