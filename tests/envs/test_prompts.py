"""Files of prompts: every fault with line and field, constant memory, splits that never meet."""

import io
import json
import tracemalloc
from collections.abc import Iterator

import pytest

from marlaas.envs.prompts import MAX_FAULTS, MAX_LINE_BYTES, PromptSet, check_prompts
from marlaas.errors import InvalidRequest
from marlaas.types import Message


def problems_of(content: bytes) -> tuple[str, ...]:
    with pytest.raises(InvalidRequest) as caught:
        check_prompts(io.BytesIO(content))
    return caught.value.problems


def numbered(count: int) -> bytes:
    return b"".join(b'{"prompt": "number %d", "answer": %d}\n' % (i, i) for i in range(count))


def test_a_right_file_is_counted():
    messages = {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "é"}]}
    content = numbered(3) + json.dumps(messages, ensure_ascii=False).encode()
    assert check_prompts(io.BytesIO(content)) == 4


def test_every_fault_has_its_line_and_field():
    lines = {
        b'{"prompt": "right"}': None,
        b"": "is empty; expected one JSON object",
        b'{"prompt": "x"': "is not JSON: ",
        b'{"prompt": NaN}': "is not JSON: ",
        b'{"prompt": "\xff"}': "is not UTF-8 (byte 13)",
        b"\xef\xbb\xbf{}": "begins with a byte order mark; save the file as plain UTF-8",
        b'{"prompt": "\\ud800"}': "is not JSON: ",
        b"[1]": 'must be a JSON object such as {"prompt": "..."}, got [1]',
        b'{"question": "x"}': "needs prompt (a string) or messages (a list)",
        b'{"prompt": 3}': "prompt must be a string that is not empty, got 3",
        b'{"prompt": " "}': "prompt must be a string that is not empty, got ' '",
        b'{"prompt": "x", "messages": []}': "has both prompt and messages; keep one of them",
        b'{"messages": []}': 'messages must be a list such as [{"role": "user", "content": "..."}]',
        b'{"messages": ["x"]}': 'messages[0] must be {"role": ..., "content": ...}, got \'x\'',
        b'{"messages": [{"role": "bot", "content": "x"}]}': "messages[0].role must be one of syst",
        b'{"messages": [{"role": "user"}]}': "messages[0].content must be a string, got None",
        b'{"messages": [{"role": "user", "content": "", "n": 1}]}': "has the unknown field 'n'",
        b'{"messages": [{"role": "assistant", "content": "x"}]}': "must not end with the assistant",
        b"[" * 5000: "is nested too deeply",
    }
    problems = problems_of(b"\n".join(lines))
    wrong = [(number, words) for number, words in enumerate(lines.values(), 1) if words]
    for problem, (number, words) in zip(problems, wrong, strict=True):
        assert problem.startswith(f"line {number}: ") and words in problem, problem


def test_only_the_first_faults_are_listed():
    problems = problems_of(b'{"prompt": 1}\n' * 1000)
    assert len(problems) == MAX_FAULTS + 1 and problems[-1] == "further faults are not listed"
    assert problems[99].startswith("line 100: ")


def test_a_line_that_is_too_long_is_one_fault_and_the_count_goes_on():
    long = b'{"prompt": "' + b"x" * (3 * MAX_LINE_BYTES) + b'"}\n'
    assert problems_of(numbered(1) + long + b"{}\n") == (
        "line 2: is over 1 MiB long",
        "line 3: needs prompt (a string) or messages (a list)",
    )


def test_an_empty_file_and_one_with_too_many_lines_are_refused(monkeypatch: pytest.MonkeyPatch):
    assert problems_of(b"")[0].startswith("the file is empty")
    monkeypatch.setattr("marlaas.envs.prompts.MAX_LINES", 3)
    assert problems_of(numbered(4)) == ("at most 3 lines are taken",)


class Endless(io.RawIOBase):
    """A file of many lines that is never held as a whole."""

    def __init__(self, count: int) -> None:
        self._lines: Iterator[bytes] = (numbered(1) for _ in range(count))

    def readline(self, size: int | None = -1, /) -> bytes:
        return next(self._lines, b"")


def test_checking_needs_no_memory_for_lines_that_are_behind_it():
    tracemalloc.start()
    try:
        assert check_prompts(Endless(20_000)) == 20_000  # type: ignore[arg-type]
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def drawn(prompts: PromptSet, split: str, count: int, seed: int = 0) -> list[int]:
    return [
        int(str(prompts.prompt(index, seed=seed, split=split).reference["answer"]))
        for index in range(count)
    ]


def test_items_come_once_each_before_any_comes_again_in_an_order_of_the_seed():
    prompts = PromptSet(numbered(100), 0.2)
    size = prompts.size("train")
    first = drawn(prompts, "train", 2 * size)
    assert sorted(first[:size]) == sorted(first[size:]) and first[:size] != first[size:]
    assert len(set(first)) == size and drawn(prompts, "train", 2 * size) == first
    assert drawn(prompts, "train", size, seed=1) != first[:size]
    assert drawn(PromptSet(numbered(100), 0.2), "train", size) == first[:size]


def test_splits_never_meet_and_equal_questions_are_on_one_side():
    content = numbered(200) + numbered(200).replace(b'"answer"', b'"other": 1, "answer"')
    prompts = PromptSet(content, 0.3)
    train, held_out = (
        set(drawn(prompts, split, prompts.size(split))) for split in ("train", "eval")
    )
    assert not train & held_out and len(train | held_out) == 200
    assert 30 < len(held_out) < 90 and prompts.size("eval") == 2 * len(held_out)


def test_lines_that_show_the_same_can_be_split_by_the_whole_line():
    content = b"".join(b'{"prompt": "Guess.", "answer": %d}\n' % i for i in range(100))
    assert PromptSet(content, 0.2).size("eval") == 0
    prompts = PromptSet(content, 0.2, by_line=True)
    assert 5 < prompts.size("eval") < 40 and prompts.size("train") == 100 - prompts.size("eval")


def test_a_held_out_prompt_stays_so_when_the_file_grows():
    small, large = PromptSet(numbered(300), 0.2), PromptSet(numbered(600), 0.2)
    before = set(drawn(small, "eval", small.size("eval")))
    assert before <= set(drawn(large, "eval", large.size("eval")))


def test_small_files_have_both_splits_and_none_is_held_out_where_none_is_wanted():
    for count in range(2, 12):
        prompts = PromptSet(numbered(count), 0.1)
        assert prompts.size("train") > 0 and prompts.size("eval") > 0
    assert PromptSet(numbered(50), 0.0).size("eval") == 0
    with pytest.raises(InvalidRequest, match="eval_share"):
        PromptSet(numbered(50), 0.0).prompt(0, seed=0, split="eval")


def test_the_environment_gets_the_whole_line_and_the_policy_its_messages():
    line = b'{"messages": [{"role": "user", "content": "hi"}], "answer": [1, {"a": null}]}'
    prompt = PromptSet(line, 0.0).prompt(5, seed=0, split="train")
    assert prompt.messages == (Message("user", "hi"),) and prompt.index == 5
    assert prompt.reference["answer"] == [1, {"a": None}]


def test_a_wrong_file_makes_no_set():
    with pytest.raises(InvalidRequest, match=r"line 2: prompt must be a string"):
        PromptSet(numbered(1) + b'{"prompt": 1}\n', 0.1)
