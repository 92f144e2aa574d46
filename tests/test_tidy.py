"""Rules of the code base that a machine can hold: imports, time and chance, links in the docs."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "marlaas"

OWN_CLOCKS = {
    "runtime.py": "the seam itself",
    "envs/sandbox_child.py": "runs alone inside the sandbox, where the package does not exist",
    "bench/tinker_client.py": "runs alone beside another server's SDK, without the package",
}
"""Modules that may read clocks and make chance of their own, and why."""

CLOCKS = {
    "time": {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns",
             "process_time", "process_time_ns", "thread_time", "localtime", "gmtime", "ctime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
    "os": {"urandom"},
    "uuid": {"uuid1", "uuid4"},
}  # fmt: skip
CHANCE_MODULES = {"random", "secrets"}
SEEDED_NUMPY = {"Generator", "Philox", "SeedSequence", "BitGenerator"}
TORCH_CHANCE = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli", "normal"}


def test_imports_go_downward_only_and_the_light_side_never_reaches_torch():
    # In a process of its own: it switches off every logger that there is.
    command = "from importlinter.cli import lint_imports; exit(lint_imports(no_cache=True))"
    checked = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "google": "protobuf",
    "pydantic": "fastapi",
    "starlette": "fastapi",
}
"""Where a module comes from, if not from the distribution of its name; of those that fastapi stands
on, fastapi decides the version."""

EXTRAS = {"gguf", "peft", "psycopg"}
"""Modules that only an extra brings; who needs them says so when they are missing."""


def test_a_plain_installation_has_everything_that_the_package_imports():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[^a-z0-9-]", line.lower())[0] for line in project["dependencies"]}
    imported = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    third_party = imported - sys.stdlib_module_names - {"marlaas"} - EXTRAS
    needed = {DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in third_party}
    assert needed <= declared


def test_the_command_line_starts_without_torch():
    modules = ["main", "run", "chat", "doctor", "report", "display", "jobfile", "serve", "submit"]
    modules += ["jobs", "live", "rollouts", "adapters", "operators", "own_service"]
    program = (
        f"import sys, {', '.join(f'marlaas.cli.{name}' for name in modules)}\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def own_modules() -> Iterator[Path]:
    yield from sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", own_modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_time_and_chance_come_from_runtime(path):
    if str(path.relative_to(PACKAGE)) in OWN_CLOCKS:
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert list(clocks_and_chance(tree)) == []


def clocks_and_chance(tree: ast.AST) -> Iterator[str]:
    """Yield every place that reads a clock, or draws what no seed decides."""
    rules = {
        ast.Import: _imported,
        ast.ImportFrom: _imported,
        ast.Attribute: _used,
        ast.Call: _called,
    }
    for node in ast.walk(tree):
        rule = rules.get(type(node))
        if rule is not None:
            yield from (f"line {node.lineno}: {fault}" for fault in rule(node))


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    source = getattr(node, "module", None) or ""
    for alias in node.names:
        is_chance = source in CHANCE_MODULES or (not source and alias.name in CHANCE_MODULES)
        if is_chance or alias.name in CLOCKS.get(source, set()):
            yield f"{source} {alias.name}"


def _used(node: ast.Attribute) -> Iterator[str]:
    owner = ast.unparse(node.value)
    is_numpy_chance = owner in ("np.random", "numpy.random") and node.attr not in SEEDED_NUMPY
    if is_numpy_chance or node.attr in CLOCKS.get(owner.rpartition(".")[2], set()):
        yield ast.unparse(node)


def _called(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    is_torch_chance = name.startswith("torch.") and name.removeprefix("torch.") in TORCH_CHANCE
    if is_torch_chance and not any(keyword.arg == "generator" for keyword in node.keywords):
        yield f"{name} without a generator"


@pytest.mark.parametrize(
    "line",
    [
        "time.time()",
        "from time import monotonic",
        "import random",
        "np.random.default_rng()",
        "datetime.datetime.now()",
        "uuid.uuid4()",
        "torch.rand(3)",
    ],
)
def test_the_rule_sees_clocks_and_chance(line):
    assert list(clocks_and_chance(ast.parse(line)))


def test_the_rule_lets_seeded_chance_pass():
    source = "runtime.rng(1).integers(3)\ntorch.rand(3, generator=g)\nx: np.random.Generator"
    assert list(clocks_and_chance(ast.parse(source))) == []


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_the_docs_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_named_in_the_docs_exist(path):
    named = set(re.findall(r"`([\w/]+\.py)`", path.read_text(encoding="utf-8")))
    folders = ("marlaas", "tests", "tools", "scripts", "examples")
    there = [f"/{module}" for folder in folders for module in (ROOT / folder).rglob("*.py")]
    missing = [name for name in named if not any(path.endswith(f"/{name}") for path in there)]
    assert missing == []
