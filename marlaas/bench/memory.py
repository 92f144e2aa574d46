"""How much memory long contexts take, beside what is predicted: training by length, KV by context.

- checkpointed, plain: the peak of `forward_backward` on one datum, half of it trained on, with and
  without activation checkpointing
- scored: the peak of `forward` on all of it
- kv: the slab of a context and the prefill that fills it

Each base is measured in a process of its own; peaks are over what it held before the pass. The last
line is one JSON object.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from marlaas.bench import machine

MIB = 1 << 20

SHAPES: Mapping[str, Mapping[str, int]] = {
    "width 256, 8 layers": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "SmolLM2-135M shape, 6 layers": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    # Attention of 32k tokens is quadratic: on a larger base it takes minutes.
    "width 128, 4 layers": {
        "vocab_size": 8192,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The lengths that are measured, by kind, for each base."""

    checkpointed: tuple[tuple[int, ...], ...] = (
        (1024, 2048, 4096, 8192, 16384),
        (1024, 4096, 8192),
        (4096, 16384, 32768),
    )
    plain: tuple[tuple[int, ...], ...] = ((1024, 2048, 4096, 8192), (1024, 4096), (4096,))
    scored: tuple[tuple[int, ...], ...] = ((1024, 8192), (1024, 8192), (16384,))
    kv: tuple[tuple[int, ...], ...] = ((1000, 4000), (1000, 4000), (16000,))

    def cases(self, idx: int) -> list[tuple[str, int]]:
        """Return (kind, tokens) of one base, the cheapest first."""
        kinds = asdict(self)
        cases = [(kind, num) for kind, lengths in kinds.items() for num in lengths[idx]]
        return sorted(cases, key=lambda case: case[1])


QUICK = Plan(
    checkpointed=((1024, 4096), (1024,), (4096,)),
    plain=((1024, 4096), (1024,), (1024,)),
    scored=((1024,), (1024,), (1024,)),
    kv=((1000,), (1000,), (4000,)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement."""

    kind: str
    tokens: int
    predicted_bytes: int
    measured_bytes: int
    cpu_s: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_bytes / self.predicted_bytes


def measure(shape: Mapping[str, int], cases: Sequence[tuple[str, int]]) -> Iterator[Row]:
    """Yield the rows of one base as a process of its own measures them."""
    with subprocess.Popen(
        [sys.executable, "-m", "marlaas.bench.memory_probe"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as probe:
        assert probe.stdin is not None and probe.stdout is not None
        json.dump({"shape": dict(shape), "cases": cases}, probe.stdin)
        probe.stdin.close()
        for line in probe.stdout:
            yield Row(**json.loads(line))
    if probe.returncode:
        raise RuntimeError(f"the measuring process ended with status {probe.returncode}")


def write_report(folder: Path, result: Mapping, rows: Mapping[str, Sequence[Row]]) -> None:
    """Write `memory.json`, the table `memory.md` and the plot `memory.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.json").write_text(json.dumps(result, indent=2) + "\n")
    lines = [
        machine.as_markdown(result["machine"], result["probe"]),
        "",
        "| base | what | tokens | predicted MiB | measured MiB | measured / predicted | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {base} | {row.kind} | {row.tokens:,} | {row.predicted_bytes / MIB:,.0f} "
        f"| {row.measured_bytes / MIB:,.0f} | {row.ratio:.2f} | {row.cpu_s:,.1f} |"
        for base, measured in rows.items()
        for row in sorted(measured, key=lambda row: (row.kind, row.tokens))
    ]
    (folder / "memory.md").write_text("\n".join(lines) + "\n")
    _draw(folder / "memory.png", rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="marlaas bench memory", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="about a minute: up to 4k tokens")
    parser.add_argument("--base", choices=tuple(SHAPES), action="append", help="only this base")
    parser.add_argument("--out", type=Path, help="folder for memory.json, memory.md and memory.png")
    options = parser.parse_args(argv)
    plan = QUICK if options.quick else Plan()
    about, probe = machine.describe(), machine.probe()
    print(machine.as_markdown(about, probe))
    rows: dict[str, list[Row]] = {}
    for idx, (name, shape) in enumerate(SHAPES.items()):
        if name not in (options.base or SHAPES):
            continue
        rows[name] = []
        for row in measure(shape, plan.cases(idx)):
            rows[name].append(row)
            print(_line(name, row), flush=True)
    result = {
        "bench": "memory",
        "is_quick": options.quick,
        "machine": about,
        "probe": probe,
        "rows": {name: [asdict(row) for row in measured] for name, measured in rows.items()},
        "worst_ratio": max(
            (row.ratio for measured in rows.values() for row in measured),
            key=lambda ratio: abs(ratio - 1),
        ),
    }
    if options.out:
        write_report(options.out, result, rows)
    print(json.dumps(result))
    return 0


def _line(name: str, row: Row) -> str:
    return (
        f"{name:<30} {row.kind:<13} {row.tokens:>7,} tokens  predicted "
        f"{row.predicted_bytes / MIB:>7,.1f} MiB  measured {row.measured_bytes / MIB:>7,.1f} MiB  "
        f"ratio {row.ratio:.3f}  {row.cpu_s:,.1f} s CPU"
    )


def _draw(path: Path, rows: Mapping[str, Sequence[Row]]) -> None:
    """Draw predicted curves and measured points by length, one panel a base."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(rows), squeeze=False)[0]
    for axes, (name, measured) in zip(panels, rows.items(), strict=True):
        for color, kind in enumerate(asdict(QUICK)):
            own = sorted((row for row in measured if row.kind == kind), key=lambda row: row.tokens)
            tokens = [row.tokens for row in own]
            predicted = [row.predicted_bytes / MIB for row in own]
            axes.plot(tokens, predicted, color=f"C{color}", label=f"{kind}, predicted")
            axes.plot(tokens, [row.measured_bytes / MIB for row in own], "o", color=f"C{color}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("tokens; dots: measured")
        axes.set_ylabel("MiB at the peak")
        axes.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=120)
