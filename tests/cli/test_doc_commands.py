"""Every command line and every request in the documents is one that the code takes."""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from marlaas.cli.main import make_parser
from marlaas.envs.math import INSTRUCTIONS
from marlaas.service import adapters, jobs, operating, records, runs, sampling, tenants, uploads

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/client.md",
    "docs/operations.md",
    "docs/api.md",
    "docs/jobs.md",
    "docs/tinker.md",
)
ROUTERS = (
    *(module.router for module in (jobs, records, adapters, runs, sampling, tenants)),
    *(module.router for module in (operating, uploads)),
    operating.open_routes,
    tenants.operators,
)


def lines_that_begin(word: str) -> Iterator[tuple[str, str]]:
    """Yield page and line for everything in the pages that a reader may copy."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
        fenced = re.findall(rf"^(?:    )?({word} .*)$", text, re.MULTILINE)
        nested = re.findall(rf"\$\(({word} [^)]*)\)", text)
        # A cell of a table with optional parts in brackets is held by its own test below.
        inline = re.findall(rf"`({word} [^`]*)`", text)
        for line in (*fenced, *nested, *(line for line in inline if "[" not in line)):
            yield page, line


def words_of(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    return [word for word in words if word != "&"]


@pytest.mark.parametrize(("page", "line"), [*lines_that_begin("marlaas")])
def test_a_command_line_is_one_that_the_parser_takes(page: str, line: str):
    _, *words = words_of(re.sub(r"\bN\b", "1", line.replace("JOB...", "JOB")))
    if words[-1] == "...":
        words.pop()
    make_parser().parse_args(words)


def subparsers() -> dict[str, argparse.ArgumentParser]:
    actions = make_parser()._actions
    (commands,) = (action for action in actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


@pytest.mark.parametrize(
    "cell", re.findall(r"^\| `(marlaas [^`]*\[[^`]*)`", (ROOT / PAGES[1]).read_text(), re.MULTILINE)
)
def test_a_command_of_the_table_has_the_flags_that_it_lists(cell: str):
    parser = subparsers()[cell.split()[1]]
    known = {option for action in parser._actions for option in action.option_strings}
    assert set(re.findall(r"(?<!\w)--?[a-z][a-z-]*", cell)) <= known


@pytest.mark.parametrize("page", PAGES)
def test_a_sum_is_asked_in_the_words_that_the_policy_was_trained_with(page: str):
    text = (ROOT / page).read_text(encoding="utf-8").replace('\\"', '"')
    assert text.count("What is 3 + 4?") == text.count(f"What is 3 + 4? {INSTRUCTIONS['marked']}")


@pytest.mark.parametrize(("page", "line"), [*lines_that_begin("curl")])
def test_a_request_goes_to_a_route_of_ours(page: str, line: str):
    words = words_of(line)
    (address,) = (word for word in words if word.startswith("$URL"))
    path = address.removeprefix("$URL").split("?")[0]
    method = "POST" if "--json" in words else "PUT" if "-T" in words else "GET"
    if "-X" in words:
        method = words[words.index("-X") + 1]
    routes = [route for router in ROUTERS for route in router.routes]
    assert any(
        route.path_regex.fullmatch(path) and method in route.methods  # type: ignore[attr-defined]
        for route in routes
    )
