"""`marlaas serve`, `backup` and `restore`: what an operator does on the machine itself."""

import argparse
import asyncio
import sys
from pathlib import Path

from marlaas.client import Credentials, credentials_file, save_credentials
from marlaas.config import ServeSettings, read_serve_settings
from marlaas.errors import InvalidRequest
from marlaas.store.backup import restore as restore_backup
from marlaas.store.db import Store


def serve(args: argparse.Namespace) -> int:
    """Run the service until a signal."""
    flags = ("base", "model_aliases", "host", "port", "workers", "placement", "database", "exact")
    settings = _settings(args, {name: getattr(args, name) for name in flags})
    from marlaas import launch  # faulty settings are refused before the engines' side is loaded

    asyncio.run(launch.serve(settings, say=_say, opened=_keep_key))
    return 0


def _settings(args: argparse.Namespace, flags: dict[str, object]) -> ServeSettings:
    return read_serve_settings(args.config, flags={"folder": args.data, **flags})


def _say(line: str) -> None:
    print(line, flush=True)


def _keep_key(url: str, key: str) -> None:
    """Show the first operator's key, and put it where this person's commands find it."""
    if not key:
        return
    file = credentials_file()
    _say(f"operator key, shown this once: {key}")
    if file.exists():
        _say(f"{file} is in use, so the key is not written there")
        return
    try:
        save_credentials(Credentials(url=url, api_key=key), file)
    except OSError as error:
        _say(f"{file} cannot be written ({error.strerror})")
    else:
        _say(f"the key and the address are in {file}, where the other commands find them")


def backup(args: argparse.Namespace) -> int:
    """Copy a service's data into a folder; the service may run meanwhile."""
    settings = _settings(args, {"database": args.database})
    folder = _data_folder(settings)
    store = Store.open(folder, url=settings.database or None)
    try:
        summary = store.backup(args.target)
    finally:
        store.close()
    print(f"{args.target}: rows and {summary.num_files} files")
    for missing in summary.missing:
        print(f"marlaas: {missing} was not there", file=sys.stderr)
    return 1 if summary.missing else 0


def restore(args: argparse.Namespace) -> int:
    """Make a new data folder from a backup."""
    settings = _settings(args, {"database": args.database})
    restore_backup(args.archive, Path(settings.folder), url=settings.database or None)
    print(f"Restored. To go on with it: marlaas serve --data {settings.folder}")
    return 0


def _data_folder(settings: ServeSettings) -> Path:
    """Return the folder of a service.

    Raises:
        InvalidRequest: nothing was ever served from it.
    """
    folder = Path(settings.folder)
    if not settings.database and not (folder / "store.db").is_file():
        raise InvalidRequest(f"--data: {folder} holds no service (it has no store.db)")
    return folder
