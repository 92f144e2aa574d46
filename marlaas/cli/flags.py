"""The flags of the commands around a service: the one that serves, and those that talk to it."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from marlaas.config import Placement
from marlaas.types import JobState, Quotas

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Command = Callable[[argparse.Namespace], int]
Load = Callable[[str, str], Command]
"""Returns the function of a module of `marlaas.cli`, imported when it is called."""


def add_service_commands(commands: Commands, load: Load) -> None:
    """Add every command around a service."""
    _add_serve(commands, load)
    _add_submit(commands, load)
    _add_jobs(commands, load)
    _add_watching(commands, load)
    _add_runs(commands, load)
    _add_rollouts(commands, load)
    _add_adapters(commands, load)
    _add_tenants(commands, load)
    _add_keys(commands, load)
    _add_usage(commands, load)
    _add_backups(commands, load)


def _new(
    commands: Commands, name: str, words: str, *, json: bool = False, tenant: bool = True
) -> argparse.ArgumentParser:
    """Return the parser of a command that talks to a service."""
    parser = commands.add_parser(
        name,
        help=words[0].lower() + words[1:].rstrip("."),
        description=words,
        epilog="The service and the key come from MARLAAS_URL and MARLAAS_API_KEY, or from "
        "~/.config/marlaas/credentials.",
    )
    parser.add_argument("--url", metavar="URL", help="the service (default: see below)")
    if tenant:
        parser.add_argument("--tenant", metavar="NAME", help="for operators: whose things")
    else:
        parser.set_defaults(tenant=None)
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    return parser


def _add_serve(commands: Commands, load: Load) -> None:
    serve = commands.add_parser(
        "serve",
        help="run the service",
        description="Run the service until SIGTERM or Ctrl-C; what is done is kept.",
        epilog="Every setting may stand in the file, or as MARLAAS_NAME in the environment; a flag "
        "wins over a variable, and that over the file. docs/operations.md lists them.",
    )
    serve.add_argument("--config", type=Path, metavar="FILE", help="settings in YAML or TOML")
    serve.add_argument("--data", metavar="DIR", help="where the database and all files lie")
    serve.add_argument("--base", help="base model: a name, a model folder or a .gguf file")
    serve.add_argument(
        "--model-alias",
        action="append",
        metavar="NAME",
        dest="model_aliases",
        help="a further name of the base for `tinker` clients; may be given again",
    )
    serve.add_argument("--host", help="address to listen at (default: 127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen at (default: 8642)")
    serve.add_argument(
        "--workers", type=int, metavar="N", help="engine workers (default: one a core)"
    )
    serve.add_argument("--placement", choices=[*Placement], help="which workers sample and train")
    serve.add_argument("--database", metavar="URL", help="PostgreSQL instead of SQLite in DIR")
    serve.add_argument(
        "--exact",
        action="store_true",
        default=None,
        help="compute bit for bit, which seeded jobs need; slower",
    )
    serve.set_defaults(command=load("serve", "serve"))


def _add_submit(commands: Commands, load: Load) -> None:
    submit = _new(commands, "submit", "Hand the jobs of a job file to a service.", json=True)
    submit.add_argument("jobs", type=Path, metavar="JOBS.yaml", help="the job file")
    submit.set_defaults(command=load("submit", "command"))


def _add_jobs(commands: Commands, load: Load) -> None:
    jobs = _new(commands, "jobs", "List jobs.", json=True)
    jobs.add_argument("--state", choices=[*JobState], help="only jobs in this state")
    jobs.set_defaults(command=load("jobs", "list_jobs"))
    for verb, words in (
        ("pause", "Stop jobs where they are; finished work is kept."),
        ("resume", "Let jobs go on that are paused, held or failed."),
        ("cancel", "End jobs for good; what they learned stays."),
        ("delete", "Remove jobs that have ended, with everything of theirs."),
    ):
        parser = _new(commands, verb, words)
        parser.add_argument("jobs", nargs="+", metavar="JOB")
        parser.set_defaults(command=load("jobs", "move"), verb=verb)
    logs = _new(commands, "logs", "Print what a job's own code said.", json=True)
    logs.add_argument("job", metavar="JOB")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job stops")
    logs.add_argument("--after", type=int, default=0, metavar="N", help="begin behind event N")
    logs.set_defaults(command=load("jobs", "logs"))


def _add_watching(commands: Commands, load: Load) -> None:
    watch = _new(commands, "watch", "Watch jobs until none is queued or running.")
    watch.add_argument("job", nargs="?", metavar="JOB", help="one job (default: all)")
    watch.add_argument("--plain", action="store_true", help="print lines instead of a live board")
    watch.set_defaults(command=load("live", "watch"))
    top = _new(commands, "top", "Watch the machine (operators).", json=True, tenant=False)
    top.set_defaults(command=load("live", "top"))


def _add_runs(commands: Commands, load: Load) -> None:
    words = "List the runs of Tinker clients: how far they are, what they hold."
    runs = _new(commands, "runs", words, json=True)
    runs.add_argument("--live", action="store_true", help="only those that count as `max_runs`")
    runs.set_defaults(command=load("runs", "command"))


def _add_rollouts(commands: Commands, load: Load) -> None:
    rollouts = _new(commands, "rollouts", "Read what a policy said and got for it.", json=True)
    rollouts.add_argument("job", metavar="JOB")
    rollouts.add_argument("--step", type=int, metavar="N", help="groups that step N trained on")
    rollouts.add_argument("--state", help="groups in this state, e.g. trained or dropped")
    rollouts.add_argument("--min-reward", type=float, metavar="X", help="mean reward from X")
    rollouts.add_argument("--max-reward", type=float, metavar="X", help="mean reward up to X")
    rollouts.add_argument("--limit", type=int, default=50, metavar="N", help="most groups to list")
    rollouts.add_argument("--show", type=int, metavar="INDEX", help="the conversations of a group")
    rollouts.add_argument("--tokens", action="store_true", help="with --show --json: tokens too")
    rollouts.set_defaults(command=load("rollouts", "command"))


def _add_adapters(commands: Commands, load: Load) -> None:
    adapters = _new(commands, "adapters", "List, download, promote or merge adapters.", json=True)
    adapters.add_argument("job", metavar="JOB")
    adapters.add_argument("action", nargs="?", choices=["download", "promote", "merged"])
    adapters.add_argument(
        "--version", default="best", help="a number, latest, best or promoted (default: best)"
    )
    adapters.add_argument("--out", type=Path, metavar="PATH", help="where a download goes")
    adapters.set_defaults(command=load("adapters", "command"))


def _add_tenants(commands: Commands, load: Load) -> None:
    words = "List, add, change or purge tenants (operators)."
    tenants = _new(commands, "tenants", words, json=True, tenant=False)
    tenants.add_argument(
        "action", nargs="?", default="list", choices=["list", "add", "set", "purge"]
    )
    tenants.add_argument("name", nargs="?", metavar="NAME", help="the tenant, for all but list")
    tenants.add_argument("--weight", type=float, help="share of the machine (default: 1)")
    for name in Quotas.__slots__:
        tenants.add_argument(
            f"--{name.replace('_', '-')}", metavar="N", help="quota; `none` lifts the limit"
        )
    tenants.add_argument("--yes", action="store_true", help="purge without asking")
    tenants.set_defaults(command=load("operators", "tenants"))


def _add_keys(commands: Commands, load: Load) -> None:
    keys = _new(commands, "keys", "List, add or revoke API keys (operators).", json=True)
    keys.add_argument("action", nargs="?", default="list", choices=["list", "add", "revoke"])
    keys.add_argument("key_id", nargs="?", metavar="KEY", help="the key to revoke, by its id")
    keys.add_argument("--label", default="", help="what the new key is for")
    keys.add_argument("--operator", action="store_true", help="operators' keys")
    keys.set_defaults(command=load("operators", "keys"))


def _add_usage(commands: Commands, load: Load) -> None:
    usage = _new(commands, "usage", "Print what was used, by job and by day.", json=True)
    usage.add_argument("--days", type=int, default=30, metavar="N", help="days to list")
    usage.set_defaults(command=load("operators", "usage"))


def _add_backups(commands: Commands, load: Load) -> None:
    backup = commands.add_parser(
        "backup",
        help="copy a service's data while it runs",
        description="Write a consistent copy of a service's data into a folder. The service may "
        "run meanwhile.",
    )
    backup.add_argument("target", type=Path, metavar="TARGET", help="the folder to write")
    restore = commands.add_parser(
        "restore",
        help="make a data folder from a backup",
        description="Make a new data folder from a backup.",
    )
    restore.add_argument("archive", type=Path, metavar="BACKUP", help="a folder that backup wrote")
    data = {
        "backup": "the service's data folder (default: marlaas-data)",
        "restore": "the data folder to make (default: marlaas-data)",
    }
    for parser, name in ((backup, "backup"), (restore, "restore")):
        parser.add_argument("--config", type=Path, metavar="FILE", help="settings of the service")
        parser.add_argument("--data", metavar="DIR", help=data[name])
        parser.add_argument("--database", metavar="URL", help="PostgreSQL instead of SQLite in DIR")
        parser.set_defaults(command=load("serve", name))
