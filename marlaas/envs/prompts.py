"""A tenant's file of prompts: one JSON object a line, checked line by line, then drawn from.

    {"prompt": "What is 2 + 2?", "answer": 4}
    {"messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}]}

- Checking holds one line at a time, so a file of a million lines needs no more memory than one.
- The hash of what the policy is shown decides between train and eval: a question that stands on two
  lines is on one side with both, under every seed, and stays there when the file grows. Where all
  lines show the same (a game with a hidden board), the whole line may decide instead.
- Items are drawn in a seeded order, each once before any comes again.
"""

import hashlib
from array import array
from collections.abc import Iterator
from typing import BinaryIO

import msgspec
import numpy as np

from marlaas.errors import InvalidRequest
from marlaas.runtime import rng
from marlaas.types import Message, Prompt

MAX_LINE_BYTES = 1 << 20
MAX_LINES = 1_000_000
MAX_FAULTS = 100
"""Faults that are reported; a file that is wrong throughout is wrong for one reason."""
ROLES = ("system", "user", "assistant", "tool")
SHOWN = 60
"""Characters of a wrong value in a message."""
NUM_ORDERS_KEPT = 4
"""Shuffled orders that are remembered: two splits, and groups on both sides of an epoch's end."""

_decode = msgspec.json.Decoder().decode


def check_prompts(file: BinaryIO) -> int:
    """Return the number of prompts in a file.

    Raises:
        InvalidRequest: names the line and field of every fault, up to `MAX_FAULTS`.
    """
    faults: list[str] = []
    num_lines = 0
    for line in _lines(file):
        num_lines += 1
        if num_lines > MAX_LINES:
            raise InvalidRequest(*faults, f"at most {MAX_LINES:,} lines are taken")
        for fault in line_faults(line):
            faults.append(f"line {num_lines}: {fault}")
            if len(faults) == MAX_FAULTS:
                raise InvalidRequest(*faults, "further faults are not listed")
    if num_lines == 0:
        raise InvalidRequest('the file is empty; expected one {"prompt": ...} a line')
    if faults:
        raise InvalidRequest(*faults)
    return num_lines


def line_faults(line: bytes) -> list[str]:
    """Return what is wrong with one line, each with its field."""
    return _read(line)[1]


class PromptSet:
    """The prompts of a checked file, split and shuffled. Keeps the bytes and where lines begin."""

    def __init__(self, content: bytes, eval_share: float, *, by_line: bool = False) -> None:
        """Read every line once.

        Raises:
            InvalidRequest: the file is not right, see `check_prompts`.
        """
        self._content = content
        self._starts = array("Q")
        keys = array("Q")
        faults: list[str] = []
        start = 0
        while start < len(content) and len(faults) < MAX_FAULTS:
            end = content.find(b"\n", start) + 1 or len(content)
            line = content[start:end]
            self._starts.append(start)
            item, found = _read(line)
            if found:
                faults += [f"line {len(self._starts)}: {fault}" for fault in found]
            else:
                keys.append(_key(item if by_line else shown(item)))
            start = end
        if faults or not keys:
            raise InvalidRequest(*(faults or ["the file of prompts is empty"]))
        self._starts.append(len(content))
        self._lines = _split(np.frombuffer(keys, dtype=np.uint64), eval_share)
        self._orders: dict[tuple[int, str, int], np.ndarray] = {}

    def size(self, split: str) -> int:
        """Return how many prompts a split has."""
        return len(self._lines[split])

    def prompt(self, index: int, *, seed: int, split: str) -> Prompt:
        """Return item `index` of a split; beyond its size they come again in another order.

        Raises:
            InvalidRequest: the split is empty.
        """
        if not self.size(split):
            raise InvalidRequest(f"no prompt is in the split {split!r}: see eval_share")
        epoch, place = divmod(index, self.size(split))
        line = int(self._lines[split][self._order(seed, split, epoch)[place]])
        item = self.item(line)
        return Prompt(index=index, messages=opening(item), reference=item)

    def item(self, line: int) -> dict:
        """Return a line of the file, counted from 0, as the environment sees it."""
        return _decode(self._content[self._starts[line] : self._starts[line + 1]])

    def _order(self, seed: int, split: str, epoch: int) -> np.ndarray:
        key = (seed, split, epoch)
        if key not in self._orders:
            while len(self._orders) >= NUM_ORDERS_KEPT:
                self._orders.pop(next(iter(self._orders)))
            order = rng("prompts", seed, split, epoch).permutation(self.size(split))
            self._orders[key] = order.astype(np.uint32)
        return self._orders[key]


def shown(item: dict) -> object:
    """Return what the policy sees of an item."""
    return item["prompt"] if "prompt" in item else item["messages"]


def opening(item: dict) -> tuple[Message, ...]:
    """Return the messages that an item begins with."""
    if "messages" not in item:
        return (Message("user", item["prompt"]),)
    return tuple(Message(one["role"], one["content"]) for one in item["messages"])


# ---------------------------------------------------------------------------------------------


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines; of one that is too long only enough to see that."""
    while line := file.readline(MAX_LINE_BYTES + 2):
        yield line
        is_cut = len(line) > MAX_LINE_BYTES
        while is_cut and line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)


def _read(line: bytes) -> tuple[dict, list[str]]:
    """Return the item that a line holds, and what is wrong with it."""
    fault = _line_fault(line)
    if fault:
        return {}, [fault]
    try:
        item = _decode(line)
    except msgspec.DecodeError as error:
        return {}, [_undecodable(line, error)]
    except RecursionError:
        return {}, ["is nested too deeply"]
    if type(item) is not dict:
        return {}, [f'must be a JSON object such as {{"prompt": "..."}}, got {_shown(item)}']
    if "messages" not in item:
        return item, _prompt_faults(item)
    if "prompt" in item:
        return item, ["has both prompt and messages; keep one of them"]
    return item, _messages_faults(item["messages"])


def _line_fault(line: bytes) -> str:
    if len(line) > MAX_LINE_BYTES:
        return f"is over {MAX_LINE_BYTES >> 20} MiB long"
    if line.isspace():
        return "is empty; expected one JSON object"
    if line.startswith(b"\xef\xbb\xbf"):
        return "begins with a byte order mark; save the file as plain UTF-8"
    return ""


def _undecodable(line: bytes, error: msgspec.DecodeError) -> str:
    try:
        line.decode()
    except UnicodeDecodeError as unicode_error:
        return f"is not UTF-8 (byte {unicode_error.start + 1})"
    return f"is not JSON: {str(error).removeprefix('JSON is malformed: ')}"


def _prompt_faults(item: dict) -> list[str]:
    text = item.get("prompt")
    if type(text) is str and text and not text.isspace():
        return []
    if "prompt" not in item:
        return ["needs prompt (a string) or messages (a list)"]
    return [f"prompt must be a string that is not empty, got {_shown(text)}"]


def _messages_faults(messages: object) -> list[str]:
    if type(messages) is not list or not messages:
        wanted = '[{"role": "user", "content": "..."}]'
        return [f"messages must be a list such as {wanted}, got {_shown(messages)}"]
    faults = []
    for place, message in enumerate(messages):
        faults += [f"messages[{place}]{fault}" for fault in message_faults(message)]
    if not faults and messages[-1]["role"] == "assistant":
        faults.append("messages must not end with the assistant: that is whose turn it is")
    return faults


def message_faults(message: object) -> list[str]:
    """Return what is wrong with one message, each fault as the end of a sentence about it."""
    if type(message) is not dict:
        return [f' must be {{"role": ..., "content": ...}}, got {_shown(message)}']
    faults = [
        f" has the unknown field {key!r}" for key in message if key not in ("role", "content")
    ]
    if message.get("role") not in ROLES:
        faults.append(f".role must be one of {', '.join(ROLES)}, got {_shown(message.get('role'))}")
    if type(message.get("content")) is not str:
        faults.append(f".content must be a string, got {_shown(message.get('content'))}")
    return faults


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _key(value: object) -> int:
    digest = hashlib.blake2b(msgspec.json.encode(value), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _split(keys: np.ndarray, eval_share: float) -> dict[str, np.ndarray]:
    """Return the lines of each split: low keys are held out.

    While there are two distinct prompts, neither split that is wanted is empty.
    """
    is_eval = keys < np.uint64(eval_share * 2.0**64)
    lowest, highest = keys.min(), keys.max()
    if eval_share > 0 and lowest != highest:
        is_eval = (is_eval | (keys == lowest)) & (keys != highest)
    return {
        "eval": np.flatnonzero(is_eval).astype(np.uint32),
        "train": np.flatnonzero(~is_eval).astype(np.uint32),
    }
