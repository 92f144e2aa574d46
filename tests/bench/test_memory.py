"""The benchmark of memory sets what is measured beside what was predicted, for every length."""

from pathlib import Path

from marlaas.bench import memory


def test_a_base_is_measured_in_a_process_of_its_own() -> None:
    shape = dict.fromkeys(memory.SHAPES["width 256, 8 layers"], 64)
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    cases = [("scored", 128), ("kv", 100), ("checkpointed", 256), ("plain", 256)]
    rows = list(memory.measure(shape | {"vocab_size": 2048}, cases))
    assert [(row.kind, row.tokens) for row in rows] == cases
    assert all(row.predicted_bytes > 0 and row.cpu_s > 0 for row in rows)


def test_the_cheapest_cases_come_first_and_each_base_has_every_kind() -> None:
    for plan in (memory.Plan(), memory.QUICK):
        for idx in range(len(memory.SHAPES)):
            cases = plan.cases(idx)
            assert [num for _, num in cases] == sorted(num for _, num in cases)
            assert {kind for kind, _ in cases} == {"checkpointed", "plain", "scored", "kv"}


def test_the_report_has_a_table_and_a_plot(tmp_path: Path) -> None:
    rows = [
        memory.Row(kind=kind, tokens=num, predicted_bytes=num << 20, measured_bytes=num << 19,
                   cpu_s=1.0)
        for kind in ("plain", "kv")
        for num in (1024, 2048)
    ]  # fmt: skip
    about = dict.fromkeys(("processor", "cores", "memory_gb", "system", "python"), 1)
    about |= dict.fromkeys(("load_average", "marlaas", *memory.machine.PACKAGES), 1)
    probe = {"gemm_gflops": 1.0, "read_gb_per_s": 1.0}
    memory.write_report(tmp_path, {"machine": about, "probe": probe}, {"base": rows})
    assert (
        "| base | plain | 2,048 | 2,048 | 1,024 | 0.50 | 1.0 |"
        in (tmp_path / "memory.md").read_text()
    )
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
