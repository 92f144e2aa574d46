"""`marlaas rollouts`: what a policy said, and what it got for it."""

import argparse

from rich.console import Console, Group
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from marlaas.cli.connection import connected, console, located, new_table, print_json
from marlaas.client.records import GroupInfo, GroupRow, Rollout
from marlaas.errors import InvalidRequest

ROLE_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def command(args: argparse.Namespace) -> int:
    """List groups, or show the conversations of one."""
    _check(args)
    with connected(args) as client:
        acting, name = located(client, args, args.job)
        job = acting.jobs.get(name)
        if args.show is not None:
            group = job.group(args.show, tokens=args.tokens)
            if args.json:
                print_json(group)
            else:
                show_group(console(), group)
            return 0
        groups = job.groups(
            step=args.step,
            state=args.state,
            min_reward=args.min_reward,
            max_reward=args.max_reward,
        )
        rows = [row for row, _ in zip(groups, range(args.limit), strict=False)]
    if args.json:
        print_json(rows)
    elif rows:
        console().print(group_table(rows))
        print(f"\nOne of them: marlaas rollouts {args.job} --show {rows[-1].index}")
    else:
        print("No such groups.")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse flags that would do nothing.

    Raises:
        InvalidRequest: with each of them.
    """
    chosen = ("step", "state", "min_reward", "max_reward")
    problems = []
    if args.show is not None:
        problems = [
            f"--{name.replace('_', '-')}: chooses among groups; expected it without --show"
            for name in chosen
            if getattr(args, name) is not None
        ]
    if args.tokens and (args.show is None or not args.json):
        problems.append("--tokens: are for programs; expected --show and --json with it")
    if args.limit < 1:
        problems.append(f"--limit: got {args.limit}; expected at least 1")
    if problems:
        raise InvalidRequest(*problems)


def group_table(rows: list[GroupRow]) -> Table:
    numbers = ("group", "step", "version", "rollouts", "reward", "success", "tokens")
    table = new_table(*numbers, "state", "because", right=numbers)
    for row in rows:
        table.add_row(
            str(row.index),
            "·" if row.step is None else str(row.step),
            str(row.version),
            str(row.num_trajectories),
            "·" if row.reward_mean is None else f"{row.reward_mean:.2f}",
            "·" if row.success_mean is None else f"{row.success_mean:.0%}",
            str(row.num_tokens),
            row.state,
            Text(row.reason),
        )
    return table


def show_group(shown: Console, group: GroupInfo) -> None:
    """Print the conversations of a group, best reward first."""
    trained = "not trained on yet" if group.step is None else f"trained on in step {group.step}"
    heading = (
        f"group {group.index}, prompt {group.prompt_index}, version {group.version}, {trained}"
    )
    shown.print(Text(heading + (f" ({group.reason})" if group.reason else ""), style="bold"))
    if not group.trajectories:
        shown.print("It is being sampled.")
        return
    shown.print(Text(_all_of(group), style="dim"))
    for rollout in sorted(group.trajectories, key=_reward, reverse=True):
        shown.print()
        shown.print(_rollout(rollout))


def _all_of(group: GroupInfo) -> str:
    """Return how many rollouts follow, and whether all of them count."""
    failed = [rollout for rollout in group.trajectories if rollout.reward is None]
    words = f"{len(group.trajectories)} rollouts, best reward first"
    if not failed:
        return words
    why = ", ".join(sorted({rollout.end for rollout in failed}))
    return f"{words}; {len(failed)} without a verdict at the end, not trained on ({why})"


def _reward(rollout: Rollout) -> float:
    return float("-inf") if rollout.reward is None else rollout.reward


def _rollout(rollout: Rollout) -> Group:
    """Return a conversation under a line that says how it ended."""
    verdict = "no verdict" if rollout.reward is None else f"reward {rollout.reward:g}"
    title = f"#{rollout.index}  {verdict}  {rollout.end}  {rollout.num_tokens} tokens"
    parts: list[Rule | Text | Padding] = [
        Rule(Text(title, style="green" if rollout.is_success else ""), align="left", style="dim")
    ]
    for message in rollout.messages:
        parts.append(Text(message.role, style=f"bold {ROLE_STYLES.get(message.role, '')}".strip()))
        # Text, not markup: what a policy says is shown as it is.
        parts.append(Padding(Text(message.content), (0, 0, 0, 2), expand=False))
    notes = [f"{name} {value:g}" for name, value in rollout.metrics.items() if value is not None]
    if rollout.detail:
        notes.append(rollout.detail)
    if notes:
        parts.append(Text(", ".join(notes), style="dim"))
    return Group(*parts)
