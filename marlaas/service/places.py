"""Parameters that many routes take: names in paths, cursors and page sizes in queries.

A name that could not name anything names nothing: it is answered with 404 like one that is free, so
no text that a caller chose reaches the file system or a message unchecked.
"""

from typing import Annotated

from fastapi import Depends, Path, Query

from marlaas.errors import InvalidRequest, NotFound
from marlaas.store.files import check_segment

MAX_PAGE = 1000
MAX_CURSOR = 2**53
"""Cursors are JSON numbers; this is the largest that every client holds exactly."""


def named(what: str, name: str) -> str:
    """Return a name from a path.

    Raises:
        NotFound: nothing can be called so.
    """
    try:
        return check_segment(what, name)
    except InvalidRequest:
        raise NotFound(f"no {what} of that name") from None


def _job(job: Annotated[str, Path(description="Name of a job.")]) -> str:
    return named("job", job)


def _sweep(name: Annotated[str, Path(description="Name of a sweep.")]) -> str:
    return named("sweep", name)


def _upload(name: Annotated[str, Path(description="Name of an upload.")]) -> str:
    return check_segment("upload", name)


def _version(
    version: Annotated[
        str, Path(description="A number, `latest`, `best` or `promoted`.", max_length=20)
    ],
) -> str:
    is_number = version.isascii() and version.isdigit()
    if not is_number and version not in ("latest", "best", "promoted"):
        raise NotFound("no such version; expected a number, latest, best or promoted")
    return version


JobName = Annotated[str, Depends(_job)]
SweepName = Annotated[str, Depends(_sweep)]
UploadName = Annotated[str, Depends(_upload)]
VersionName = Annotated[str, Depends(_version)]

After = Annotated[int, Query(ge=0, le=MAX_CURSOR, description="Continue behind this number.")]
PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Most things in the answer.")]
