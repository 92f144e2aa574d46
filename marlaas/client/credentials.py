"""Where the client finds the address of a service and the key for it.

    argument  >  MARLAAS_URL, MARLAAS_API_KEY  >  ~/.config/marlaas/credentials  >  loopback

The file is TOML with `url` and `api_key`. Its key goes to its own address only: whoever points
`MARLAAS_URL` elsewhere does not hand over the key of another service on the way.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from marlaas.errors import InvalidRequest, Unauthorized

URL_VARIABLE, KEY_VARIABLE = "MARLAAS_URL", "MARLAAS_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8642"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """An address and the key that opens it."""

    url: str
    api_key: str


def credentials_file() -> Path:
    """Return where the address and the key of a person lie."""
    return Path.home() / ".config" / "marlaas" / "credentials"


def find_credentials(
    url: str | None = None,
    api_key: str | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
    file: Path | None = None,
) -> Credentials:
    """Return the first address and the first key found, in the order above.

    Raises:
        InvalidRequest: the address is none, or the file is not what it should be.
        Unauthorized: no key was found; says where it was looked for.
    """
    file = file or credentials_file()
    saved = _read(file)
    found_url = url or environment.get(URL_VARIABLE) or saved.get("url") or DEFAULT_URL
    found_url = _checked(found_url)
    found_key = api_key or environment.get(KEY_VARIABLE)
    is_files = saved.get("url", found_url).rstrip("/") == found_url
    if not found_key and is_files:
        found_key = saved.get("api_key")
    if not found_key:
        raise Unauthorized(_missing(found_url, file, saved, is_files=is_files))
    return Credentials(url=found_url, api_key=found_key)


def save_credentials(credentials: Credentials, file: Path | None = None) -> Path:
    """Write the file, readable by its owner only, and return where it lies."""
    file = file or credentials_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(file.name + ".tmp")
    beside.unlink(missing_ok=True)
    # Created closed to others: a mode set afterwards would leave a moment in which it is open.
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as lines:
        lines.write(f'url = "{credentials.url}"\napi_key = "{credentials.api_key}"\n')
    beside.replace(file)
    return file


def _read(file: Path) -> Mapping[str, str]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file}: cannot be read ({error})") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"{file}: is not TOML ({error}); {_EXPECTED}") from error
    if not values.keys() <= {"url", "api_key"} or not all(
        isinstance(value, str) for value in values.values()
    ):
        raise InvalidRequest(f"{file}: {_EXPECTED}")
    return values


_EXPECTED = 'expected the lines url = "http://..." and api_key = "tml-..."'


def _checked(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"address: got {url!r}; expected http://HOST:PORT or https://HOST")
    return url.rstrip("/")


def _missing(url: str, file: Path, saved: Mapping[str, str], *, is_files: bool) -> str:
    if not is_files:
        in_file = f"{file} (its key is for {saved['url']})"
    elif saved:
        in_file = f"{file} (has no api_key)"
    else:
        in_file = f"{file} (there is no such file)"
    return (
        f"no API key for {url}: looked at the argument `api_key`, the variable {KEY_VARIABLE} and "
        f"{in_file}. The operator of the service gives out keys: marlaas keys add --tenant NAME"
    )
