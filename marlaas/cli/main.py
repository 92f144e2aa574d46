"""The command `marlaas`: which subcommands there are, what they take, and how they fail.

Exit codes: 0 done; 1 it ran and something went wrong; 2 the request cannot be honoured as written;
128 + n ended by signal n. Whatever the user can put right is said without a traceback; a traceback
means a fault of ours.
"""

import argparse
import ast
import importlib
import pkgutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from marlaas import __version__
from marlaas.cli.flags import add_service_commands
from marlaas.config import Placement
from marlaas.errors import InvalidRequest, MarlaasError
from marlaas.loop.jobspec import MODES

EXIT_FAILED = 1
EXIT_INVALID = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    command: Callable[[argparse.Namespace], int] | None = getattr(args, "command", None)
    if command is None:
        parser.print_help()
        return EXIT_INVALID
    try:
        return command(args)
    except InvalidRequest as error:
        _say_problems(error.problems)
        return EXIT_INVALID
    except MarlaasError as error:
        print(f"marlaas: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output went away; there is nobody left to tell.
        sys.stderr.close()
        return EXIT_FAILED


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="marlaas",
        description="Many tenants fine-tune one shared base model by reinforcement learning.",
    )
    parser.add_argument("--version", action="version", version=f"marlaas {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_run(commands)
    _add_report(commands)
    _add_chat(commands)
    _add_doctor(commands)
    _add_bench(commands)
    add_service_commands(commands, _command)
    return parser


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = commands.add_parser(
        "run",
        help="run the jobs of a job file, or go on with a run",
        description="Run the jobs of a job file side by side, and leave a run folder.",
    )
    run.add_argument("jobs", nargs="?", type=Path, metavar="JOBS.yaml", help="the job file")
    run.add_argument("--out", type=Path, metavar="DIR", help="run folder (default: runs/NAME)")
    run.add_argument("--base", help="base model: a name, a model folder or a .gguf file")
    run.add_argument(
        "--workers", type=int, metavar="N", help="engine workers (default: one a core)"
    )
    run.add_argument("--placement", choices=[*Placement], help="which workers sample and train")
    run.add_argument(
        "--mode", choices=MODES, help="async, or lockstep: one job and one stage after another"
    )
    run.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="DIR",
        help="go on with the run in DIR, or in --out",
    )
    output = run.add_mutually_exclusive_group()
    output.add_argument("--quiet", action="store_true", help="print the final table only")
    output.add_argument("--plain", action="store_true", help="print lines instead of a live board")
    run.set_defaults(command=_command("run"))


def _add_report(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    report = commands.add_parser(
        "report",
        help="make the readable files of a run folder anew",
        description="Make curves, pictures, trajectories and summary of a run folder anew.",
    )
    report.add_argument("out", type=Path, metavar="DIR", help="the run folder")
    report.set_defaults(command=_command("report"))


def _add_chat(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    chat = commands.add_parser(
        "chat",
        help="talk to the base, to a saved adapter, or to a job on a service",
        description="Talk to a base model, to an adapter on top of it, or to a job on a service.",
    )
    chat.add_argument("message", nargs="?", help="say this, print the reply and end")
    chat.add_argument("--base", help="base model of this machine (default: tiny)")
    chat.add_argument("--adapter", type=Path, metavar="DIR", help="PEFT folder of an adapter")
    chat.add_argument(
        "--job", metavar="JOB[@VERSION]", help="a job on a service; a number, best, promoted"
    )
    chat.add_argument("--url", metavar="URL", help="with --job: the service")
    chat.add_argument("--tenant", metavar="NAME", help="with --job, for operators: whose job")
    chat.add_argument("--system", metavar="TEXT", help="system message to begin with")
    chat.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default: 0.7)")
    chat.add_argument("--top-p", type=float, default=1.0)
    chat.add_argument("--top-k", type=int, default=0, help="0 means no limit")
    chat.add_argument("--min-p", type=float, default=0.0)
    chat.add_argument("--max-tokens", type=int, default=256, help="most tokens of one reply")
    chat.add_argument("--seed", type=int, default=0)
    chat.set_defaults(command=_command("chat"))


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine can do and what is missing",
        description="Say what this machine can do, what is missing, and what to do about it.",
    )
    doctor.set_defaults(command=_command("doctor"))


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    bench = commands.add_parser(
        "bench",
        help="measure this machine and this engine",
        description="Run a benchmark by name; without a name, list them.",
        epilog="Everything after NAME goes to the benchmark: try `marlaas bench NAME --help`.",
    )
    bench.add_argument("name", nargs="?", metavar="NAME")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    bench.set_defaults(command=_run_bench)


def _command(module: str, function: str = "command") -> Callable[[argparse.Namespace], int]:
    """Return a function that imports `marlaas.cli.<module>` only when it is called."""

    def command(args: argparse.Namespace) -> int:
        loaded = importlib.import_module(f"marlaas.cli.{module}")
        return getattr(loaded, function)(args)

    return command


def _run_bench(args: argparse.Namespace) -> int:
    names = benchmarks()
    if args.name is None:
        for name, purpose in names.items():
            print(f"{name:<12} {purpose}")
        return 0
    if args.name not in names:
        known = ", ".join(names) or "none yet"
        raise InvalidRequest(f"bench: got {args.name!r}; expected one of {known}")
    module = importlib.import_module(f"marlaas.bench.{args.name}")
    return module.main(args.arguments) or 0


def benchmarks() -> dict[str, str]:
    """Return the modules of `marlaas.bench` that have a `main`, with their first docstring line.

    They are read, not imported: a list must not load an engine.
    """
    package = importlib.import_module("marlaas.bench")
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        path = Path(package.__path__[0]) / f"{module.name}.py"
        if not path.is_file():
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[module.name] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found


def _say_problems(problems: Sequence[str]) -> None:
    plural = "" if len(problems) == 1 else "s"
    print(f"marlaas: {len(problems)} problem{plural}", file=sys.stderr)
    for problem in problems:
        print(f"  {problem}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
