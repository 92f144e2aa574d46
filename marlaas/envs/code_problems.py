"""Small programming problems with hidden tests, and how an answer is read from a reply.

The family in `code.py` runs the tests in a sandbox; this module only makes problems and never
executes what a policy wrote.

    "Take x, add 3, then multiply by 2."           ->  (x + 3) * 2
    "If x is over 4, add 3; otherwise square it."  ->  def f(x): ...
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from marlaas.envs.settings import in_range, one_of
from marlaas.envs.splits import draw_item
from marlaas.runtime import rng
from marlaas.types import Message, Prompt

MAX_INPUT = 20
"""Hidden tests use whole numbers from -MAX_INPUT to MAX_INPUT."""

INPUTS = range(-MAX_INPUT, MAX_INPUT + 1)

ENTRY = "f"
"""Name of the function that the policy writes in problems of kind "function"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSettings:
    """What problems a job of the family `code` gets."""

    kind: str = one_of("expression", "function")
    """Write an expression in x, or a whole function with a branch."""
    steps: int = in_range(2, 1, 4)
    """Operations one after another; a function has them in each branch."""
    max_value: int = in_range(9, 5, 99)
    """Largest number in an instruction."""
    num_tests: int = in_range(6, 2, 32)
    """Hidden tests of one problem."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on the value so far; `operand` is 0 where the operation has none."""

    name: str
    operand: int

    def phrase(self) -> str:
        """Return the operation in words."""
        return _PHRASES[self.name].format(n=self.operand)

    def apply(self, value: int) -> int:
        """Return the result of the operation."""
        match self.name:
            case "add":
                return value + self.operand
            case "subtract":
                return value - self.operand
            case "multiply":
                return value * self.operand
            case "remainder":
                return value % self.operand
            case "square":
                return value**2
        raise AssertionError(self.name)

    def source(self, inner: str) -> str:
        """Return the operation as Python, applied to the expression `inner`."""
        inner = inner if inner.isidentifier() else f"({inner})"
        if self.name == "square":
            return f"{inner} ** 2"
        return f"{inner} {_OPERATORS[self.name]} {self.operand}"


@dataclass(frozen=True, slots=True)
class Branches:
    """What a function problem asks for: one chain of steps above the threshold, one up to it."""

    threshold: int
    above: tuple[Step, ...]
    otherwise: tuple[Step, ...]


_PHRASES = {
    "add": "add {n}",
    "subtract": "subtract {n}",
    "multiply": "multiply by {n}",
    "remainder": "take the remainder by {n}",
    "square": "square it",
}
_OPERATORS = {"add": "+", "subtract": "-", "multiply": "*", "remainder": "%"}
_SMALLEST_OPERAND = {"add": 1, "subtract": 1, "multiply": 2, "remainder": 2}

Problem = tuple[Step, ...] | Branches


def make_problem(settings: CodeSettings, index: int, *, seed: int, split: str) -> Prompt:
    """Return one problem as a prompt.

    Its reference holds `tests`, a list of `[args, expected]`; `entry`, the name of the function to
    call, or "" when the answer is an expression in x; and `solution`, one right answer.
    """
    labels = ("code", settings.kind, settings.steps, settings.max_value, seed, index)
    problem = draw_item(lambda stream: draw_problem(settings, stream), *labels, split=split)
    inputs = _test_inputs(settings, problem, rng(*labels, split, "tests"))
    return Prompt(
        index=index,
        messages=(Message("user", instruction(problem)),),
        reference={
            "tests": [[[x], run_problem(problem, x)] for x in inputs],
            "entry": ENTRY if isinstance(problem, Branches) else "",
            "solution": solution(problem),
        },
    )


def draw_problem(settings: CodeSettings, stream: np.random.Generator) -> Problem:
    """Return a random problem that no constant, not the input, and no single branch solves."""
    while True:
        if settings.kind == "expression":
            problem: Problem = _draw_steps(settings, stream)
            outputs = [run_problem(problem, x) for x in INPUTS]
            if outputs != list(INPUTS) and len(set(outputs)) > 1:
                return problem
        else:
            threshold = int(stream.integers(0, min(settings.max_value, MAX_INPUT - 2) + 1))
            problem = Branches(
                threshold, _draw_steps(settings, stream), _draw_steps(settings, stream)
            )
            if all(_telling_inputs(problem)):
                return problem


def run_problem(problem: Problem, x: int) -> int:
    """Return the right result for input x."""
    if isinstance(problem, Branches):
        problem = problem.above if x > problem.threshold else problem.otherwise
    for step in problem:
        x = step.apply(x)
    return x


def instruction(problem: Problem) -> str:
    """Return the user message that states the problem."""
    if isinstance(problem, Branches):
        above, otherwise = _in_words(problem.above), _in_words(problem.otherwise)
        return (
            f"Write a Python function {ENTRY}(x): if x is over {problem.threshold}, {above}; "
            f"otherwise {otherwise}. Put it into a ```python block."
        )
    return (
        f"Take x, {_in_words(problem)}. Write it as a Python expression. "
        'End with "Answer: " and the expression.'
    )


def solution(problem: Problem) -> str:
    """Return one right answer as Python source."""
    if isinstance(problem, Branches):
        return (
            f"def {ENTRY}(x):\n"
            f"    if x > {problem.threshold}:\n"
            f"        return {_as_expression(problem.above)}\n"
            f"    return {_as_expression(problem.otherwise)}"
        )
    return _as_expression(problem)


_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def extract_code(reply: str) -> str | None:
    """Return the code of a reply: what follows the last `Answer:`, or the last fenced block.

    Code after `Answer:` may be fenced itself; without a fence it is one line, unless it is a
    function. None when the reply has neither.
    """
    _, marker, tail = reply.rpartition("Answer:")
    blocks = _FENCED.findall(tail if marker else reply)
    if blocks:
        return blocks[-1].strip() or None
    if not marker:
        return None
    code = tail.strip()
    if not code.startswith("def "):
        code = code.partition("\n")[0].strip().strip("`").strip()
    return code or None


def _draw_steps(settings: CodeSettings, stream: np.random.Generator) -> tuple[Step, ...]:
    return tuple(_draw_step(settings, stream) for _ in range(settings.steps))


def _draw_step(settings: CodeSettings, stream: np.random.Generator) -> Step:
    name = list(_PHRASES)[stream.integers(len(_PHRASES))]
    if name == "square":
        return Step(name, 0)
    return Step(name, int(stream.integers(_SMALLEST_OPERAND[name], settings.max_value + 1)))


def _in_words(steps: Sequence[Step]) -> str:
    return ", then ".join(step.phrase() for step in steps)


def _as_expression(steps: Sequence[Step]) -> str:
    source = "x"
    for step in steps:
        source = step.source(source)
    return source


def _telling_inputs(problem: Branches) -> tuple[list[int], list[int]]:
    """Return inputs up to and above the threshold where taking the other branch is wrong."""
    telling = [
        x for x in INPUTS if run_problem(problem.above, x) != run_problem(problem.otherwise, x)
    ]
    return (
        [x for x in reversed(telling) if x <= problem.threshold],
        [x for x in telling if x > problem.threshold],
    )


def _test_inputs(
    settings: CodeSettings, problem: Problem, stream: np.random.Generator
) -> list[int]:
    """Return distinct inputs; the first two tell apart the branches, next to the threshold."""
    edges = []
    if isinstance(problem, Branches):
        edges = [side[0] for side in _telling_inputs(problem)]
    others = [int(x) for x in stream.permutation(np.array(INPUTS))]
    return (edges + [x for x in others if x not in edges])[: settings.num_tests]
