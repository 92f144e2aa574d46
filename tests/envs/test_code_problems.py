"""Programming problems: tests that tell right from wrong, and reading code from replies."""

from typing import Any

from marlaas.envs.code_problems import (
    ENTRY,
    Branches,
    CodeSettings,
    Step,
    extract_code,
    instruction,
    make_problem,
    solution,
)

SETTINGS = [
    CodeSettings(),
    CodeSettings(steps=1),
    CodeSettings(steps=4, max_value=99, num_tests=32),
    CodeSettings(kind="function"),
    CodeSettings(kind="function", steps=1, num_tests=2),
]


def passes(code: str, reference: dict[str, Any]) -> bool:
    """Run code of this test on hidden tests."""
    scope: dict[str, Any] = {}
    exec(code if reference["entry"] else f"{ENTRY} = lambda x: ({code})", scope)
    return all(scope[ENTRY](*args) == expected for args, expected in reference["tests"])


def references(settings: CodeSettings) -> list[dict[str, Any]]:
    prompts = [make_problem(settings, i, seed=0, split="train") for i in range(60)]
    return [dict(prompt.reference) for prompt in prompts]


def test_the_solution_passes_and_the_input_itself_does_not():
    for settings in SETTINGS:
        for reference in references(settings):
            assert len(reference["tests"]) == settings.num_tests
            assert passes(reference["solution"], reference)


def test_lazy_answers_fail():
    for settings in SETTINGS[:2]:
        lazy = ("x", "0", "x + 1")
        failed = [not passes(code, r) for r in references(settings) for code in lazy]
        assert sum(failed) / len(failed) > 0.95


def test_both_branches_of_a_function_are_tested():
    for reference in references(CodeSettings(kind="function", num_tests=2)):
        above, otherwise = reference["solution"].split("return ")[1:]
        for half in (above.partition("\n")[0], otherwise):
            assert not passes(f"def {ENTRY}(x):\n    return {half}", reference)


def test_instructions_read_well():
    chain = (Step("add", 3), Step("multiply", 2))
    assert instruction(chain).startswith("Take x, add 3, then multiply by 2. ")
    assert solution(chain) == "(x + 3) * 2"
    branches = Branches(4, (Step("square", 0),), (Step("remainder", 5),))
    assert "if x is over 4, square it; otherwise take the remainder by 5." in instruction(branches)
    assert solution(branches) == (
        "def f(x):\n    if x > 4:\n        return x ** 2\n    return x % 5"
    )


def test_code_is_read_after_the_answer_marker_or_from_a_fenced_block():
    function = "def f(x):\n    return x + 1"
    for reply, code in (
        ("Answer: x + 1", "x + 1"),
        ("First I add. Answer: `x + 1`\nDone.", "x + 1"),
        ("Answer: x\nAnswer: x + 1", "x + 1"),
        (f"Answer: {function}", function),
        (f"Answer:\n```python\n{function}\n```", function),
        (f"Here it is:\n```\n{function}\n```\nbye", function),
        (f"```python\n{function}", function),
        ("```python\nwrong\n```\n```py\nx + 1\n```", "x + 1"),
    ):
        assert extract_code(reply) == code


def test_a_reply_without_code_has_none():
    for reply in ("It is x + 1.", "", "Answer:", "Answer: ``", "```python\n```", "answer: x"):
        assert extract_code(reply) is None
