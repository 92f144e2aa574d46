"""The service's settings: read strictly, every fault at once, shown without secrets."""

from pathlib import Path

import pytest

from marlaas.config import (
    MIN_PASS_BYTES,
    Durability,
    Placement,
    RunSettings,
    ServeSettings,
    read_serve_settings,
    resolve,
    slab_tokens,
)
from marlaas.errors import InvalidRequest


def test_flags_win_over_variables_and_those_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("base: other\nport: 1\nworkers: 3\ngap_bound: 1e-4\ndurability: power\n")
    environment = {"MARLAAS_PORT": "2", "MARLAAS_EXACT": "true", "MARLAAS_WORKERS": "4"}
    settings = read_serve_settings(file, environment, {"workers": 5, "host": None})
    assert (settings.base, settings.port, settings.workers) == ("other", 2, 5)
    assert (settings.exact, settings.gap_bound, settings.host) == (True, 1e-4, "127.0.0.1")
    assert settings.durability is Durability.POWER
    assert settings.engines().durability is Durability.POWER


def test_names_of_the_base_are_a_list_or_text_with_commas(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("model_aliases: [Qwen/Qwen3-8B, other]\n")
    assert read_serve_settings(file, {}).model_aliases == ("Qwen/Qwen3-8B", "other")
    variables = {"MARLAAS_MODEL_ALIASES": "a, b"}
    assert read_serve_settings(file, variables).model_aliases == ("a", "b")
    settings = read_serve_settings(file, variables, {"model_aliases": ["c"]})
    assert settings.model_aliases == ("c",) and "model_aliases: c" in settings.shown()
    with pytest.raises(InvalidRequest, match="expected a list of texts"):
        read_serve_settings(None, {}, {"model_aliases": [3]})


def test_toml_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text('placement = "split"\nworkers = 2\nheartbeat_s = 5\n')
    settings = read_serve_settings(file, {})
    assert (settings.placement, settings.workers, settings.heartbeat_s) == (Placement.SPLIT, 2, 5)


def test_every_fault_is_named_with_its_place_and_what_would_be_right(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("prot: 80\nworkers: 0\nplacement: both\n")
    with pytest.raises(InvalidRequest) as refused:
        read_serve_settings(file, {"MARLAAS_DRAIN": "x", "MARLAAS_MAX_BATCH": "many"})
    problems = "\n".join(refused.value.problems)
    for words in (
        "prot: unknown setting; did you mean `port`?",
        "workers: got 0; expected a whole number from 1 to 256",
        "placement: got 'both'; expected replicated or split",
        "MARLAAS_DRAIN: unknown setting; did you mean `drain_s`?",
        "MARLAAS_MAX_BATCH: got 'many'; expected a whole number",
    ):
        assert words in problems


@pytest.mark.parametrize("text", ["- a\n", "a: [", "just words"])
def test_a_file_that_is_no_settings_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=r"service\.yaml"):
        read_serve_settings(file, {})


@pytest.mark.parametrize(
    "url",
    ["postgresql://me:se:cr@et@host/db", "postgresql://host/db?user=me&password=se:cr@et@&x=1"],
)
def test_the_password_of_the_database_is_masked(url: str) -> None:
    shown = "\n".join(ServeSettings(database=url).shown())
    assert "host/db" in shown
    assert "se:cr" not in shown
    assert "et@" not in shown


def test_the_clients_variables_are_not_the_services() -> None:
    environment = {"MARLAAS_URL": "x", "MARLAAS_API_KEY": "y", "MARLAAS_CACHE": "z"}
    assert read_serve_settings(None, environment) == ServeSettings()


def test_a_pass_gets_what_weights_and_kv_leave_of_the_machine() -> None:
    facts = {
        "base_name": "b",
        "base_folder": "/b",
        "max_context": 100,
        "kv_bytes_per_token": 1000,
        "base_bytes": 1 << 20,
    }

    def pass_bytes(**asked: int) -> int:
        return resolve(RunSettings(**asked), **facts)[0].pass_memory_bytes  # type: ignore[arg-type]

    one, two = (pass_bytes(num_workers=num, kv_capacity_tokens=1024) for num in (1, 2))
    assert one > two >= MIN_PASS_BYTES
    more_kv = pass_bytes(num_workers=1, kv_capacity_tokens=2048)
    assert more_kv == one - 1024 * 1000
    assert pass_bytes(num_workers=256) == MIN_PASS_BYTES
    assert pass_bytes(pass_memory_bytes=123 << 20) == 123 << 20
    settings = read_serve_settings(None, {"MARLAAS_PASS_MEMORY_BYTES": str(1 << 30)})
    assert settings.engines().pass_memory_bytes == 1 << 30


def test_slabs_double() -> None:
    assert [slab_tokens(num) for num in (0, 64, 65, 1000)] == [64, 64, 128, 1024]
