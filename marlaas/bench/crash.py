"""A service that is killed again and again: nothing lost, nothing doubled, nothing done anew.

    plan of strikes ─► [server up ─► recovered ─► strike ─► dead]* ─► jobs run to their end ─► audit
                          ▲ SIGKILL: the server at a moment or a durable boundary,
                            an engine worker, or a sandbox

Eight jobs of two tenants (half of them seeded) run on the real service while a client hands them
over and follows the event streams across every death. When all are used up, eight more follow. At
the end the store and what the client was told are compared with each other, and seeded jobs with
the same jobs on a service that nobody touched.

- *lost*: steps that the client was told of and that are not there, or are others, afterwards.
- *doubled*: steps that were told twice, and groups that two steps were trained on.
- *regenerated*: groups that were sampled again although their record was durable. (A group in
  flight is sampled again, and an evaluation in flight is made again: neither was durable.)
- *recovery*: from the death of the server to the first step that is committed after it.
- *survivors*: processes of a dead server that are there 5 s later.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from marlaas.bench.crash_audit import Findings, audit
from marlaas.bench.crash_strikes import draw_strikes
from marlaas.bench.crash_trial import Trial, say
from marlaas.bench.machine import describe

# ---------------------------------------------------------------------------------------------
# The command


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    console = Console()
    strikes = draw_strikes(args.kills, args.seed)
    with _run_folder(args.keep) as folder:
        say("reference: the same jobs, undisturbed")
        whole = Trial(folder / "undisturbed", args).run([])
        say(f"disturbed: {len(strikes)} kills")
        struck = Trial(folder / "disturbed", args).run(strikes)
        findings = audit(struck, whole)
    _print(console, struck, whole, findings)
    result = {
        "bench": "crash",
        "machine": describe(),
        "kills": len(struck.deaths),
        "kills_by_target": dict(Counter(death.target.value for death in struck.deaths)),
        "seed": args.seed,
        "steps": sum(findings.steps.values()),
        "steps_lost": len(findings.lost),
        "steps_doubled": len(findings.doubled),
        "groups_regenerated": findings.num_regenerated,
        "seeded_identical": findings.is_seeded_identical,
        "seeded_compared": findings.num_compared,
        "other_faults": findings.faults,
        "survivors": struck.num_survivors,
        "recover_s_median": _median(struck.recoveries_s),
        "recover_s_max": max(struck.recoveries_s, default=None),
        "ready_s_median": _median(struck.ready_s),
        "worker_recover_s_max": max(struck.worker_recoveries_s, default=None),
        "undisturbed_s": whole.elapsed_s,
        "disturbed_s": struck.elapsed_s,
    }
    print(json.dumps(result))
    return 0 if findings.is_clean else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="marlaas bench crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=None, metavar="N", help="default: 50")
    parser.add_argument("--quick", action="store_true", help="a few minutes at most: 8 kills")
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps of each job")
    parser.add_argument("--seed", type=int, default=0, help="draws the kills")
    parser.add_argument("--base", default="tiny")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--keep", action="store_true", help="leave the run folders where they are")
    args = parser.parse_args(argv)
    args.kills = args.kills if args.kills is not None else (8 if args.quick else 50)
    args.steps = args.steps or (6 if args.quick else 20)
    return args


@contextmanager
def _run_folder(is_kept: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="marlaas-crash-"))
    try:
        yield folder
    finally:
        if is_kept:
            say(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _print(console: Console, struck: Trial, whole: Trial, findings: Findings) -> None:
    table = Table(title=f"{len(struck.deaths)} kills, {len(struck.jobs)} jobs")
    table.add_column("what")
    table.add_column("found", justify="right")
    table.add_column("expected", justify="right")
    for target, count in Counter(death.target for death in struck.deaths).items():
        table.add_row(f"killed: {target}", str(count), "")
    rows = {
        "steps": (sum(findings.steps.values()), ""),
        "steps lost": (len(findings.lost), "0"),
        "steps doubled": (len(findings.doubled), "0"),
        "groups regenerated": (findings.num_regenerated, "0"),
        "seeded jobs identical": (
            f"{findings.num_compared - len(findings.unlike)} of {findings.num_compared}",
            "all",
        ),
        "other faults": (len(findings.faults), "0"),
        "survivors": (struck.num_survivors, "0"),
        "server ready, median s": (_shown(struck.ready_s, statistics.median), ""),
        "first step after a kill, median s": (_shown(struck.recoveries_s, statistics.median), ""),
        "first step after a kill, max s": (_shown(struck.recoveries_s, max), "< 15"),
        "all jobs on after a worker's death, max s": (_shown(struck.worker_recoveries_s, max), ""),
        "whole run, s (undisturbed, one wave)": (
            f"{struck.elapsed_s:.0f} ({whole.elapsed_s:.0f})",
            "",
        ),
    }
    for name, (found, expected) in rows.items():
        table.add_row(name, str(found), expected)
    console.print(table)
    for fault in (*findings.lost, *findings.doubled, *findings.faults, *findings.unlike):
        console.print(fault)


def _shown(values: Sequence[float], of: Callable[[Sequence[float]], float]) -> str:
    return f"{of(values):.1f}" if values else "-"
