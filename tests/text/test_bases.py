"""What a base's name stands for."""

import pytest

from marlaas.errors import InvalidRequest
from marlaas.text.bases import resolve_base


def test_tiny_comes_with_the_package():
    folder = resolve_base("tiny")
    assert (folder / "config.json").is_file()
    assert (folder / "model.safetensors").is_file()


def test_a_model_folder_stands_for_itself():
    folder = resolve_base("tiny")
    assert resolve_base(str(folder)) == folder
    assert resolve_base(folder) == folder


def test_a_base_that_needs_conversion_says_how(tmp_path):
    for name in ("smollm2-135m", "some/where/model.gguf"):
        with pytest.raises(InvalidRequest, match=f"python -m marlaas.model.convert {name}"):
            resolve_base(name, cache=lambda name: tmp_path / name)


def test_a_converted_base_is_found_in_the_cache(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_base("smollm2-135m", cache=lambda _: tmp_path) == tmp_path


def test_an_unknown_base_is_answered_with_the_names_that_would_be_right(tmp_path):
    with pytest.raises(InvalidRequest, match=r"tiny, smollm2-135m, a \.gguf file"):
        resolve_base("tinny")
    with pytest.raises(InvalidRequest, match=r"no config\.json"):
        resolve_base(tmp_path)
