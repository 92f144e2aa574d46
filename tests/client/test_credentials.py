"""An address and a key come from the argument, the environment or the file, in this order."""

import stat

import pytest

from marlaas.client.credentials import (
    DEFAULT_URL,
    Credentials,
    find_credentials,
    save_credentials,
)
from marlaas.errors import InvalidRequest, Unauthorized

SAVED = Credentials(url="http://host:1", api_key="tml-saved")


def test_arguments_win_over_the_environment_and_that_over_the_file(tmp_path):
    file = save_credentials(SAVED, tmp_path / "credentials")
    environment = {"MARLAAS_URL": "http://other:2/", "MARLAAS_API_KEY": "tml-env"}
    assert find_credentials(environment={}, file=file) == SAVED
    assert find_credentials(environment=environment, file=file) == Credentials(
        url="http://other:2", api_key="tml-env"
    )
    assert find_credentials("http://a:3", "tml-x", environment=environment, file=file) == (
        Credentials(url="http://a:3", api_key="tml-x")
    )


def test_the_files_key_goes_to_the_files_address_only(tmp_path):
    file = save_credentials(SAVED, tmp_path / "credentials")
    with pytest.raises(Unauthorized, match="its key is for http://host:1"):
        find_credentials("http://elsewhere:1", environment={}, file=file)


def test_a_missing_key_is_said_with_every_place_that_was_looked_at(tmp_path):
    file = tmp_path / "none" / "credentials"
    with pytest.raises(Unauthorized) as raised:
        find_credentials(environment={}, file=file)
    for words in ("api_key", "MARLAAS_API_KEY", str(file), "no such file", DEFAULT_URL):
        assert words in str(raised.value)


def test_the_file_is_closed_to_others(tmp_path):
    file = save_credentials(SAVED, tmp_path / "deep" / "credentials")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["url = ", "user = 'x'", "api_key = 3"])
def test_a_file_that_is_something_else_is_refused(tmp_path, text):
    file = tmp_path / "credentials"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match="expected the lines"):
        find_credentials(environment={}, file=file)


def test_an_address_without_a_scheme_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="http://HOST:PORT"):
        find_credentials("localhost:8642", "key", environment={}, file=tmp_path / "none")
