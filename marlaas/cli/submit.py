"""`marlaas submit JOBS.yaml`: hand the jobs of a file to a service.

    job file ──► local files of custom environments become digests ──► every fault, before anything
             ──► upload what the service lacks ──► hand over each job

All of it may be done again: a file that is there is not sent twice, and the same job is one job.
"""

import argparse
import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlaas.cli.connection import connected, console, print_json
from marlaas.cli.jobfile import load_document
from marlaas.cli.jobs import job_row, job_table
from marlaas.client import Client
from marlaas.client.records import JobInfo
from marlaas.errors import Conflict, InvalidRequest
from marlaas.loop.jobspec import Place, RunSection, describe_job, read_jobs
from marlaas.types import MAX_NAME_CHARS, JobSpec, Role, UploadKind

FILE_KINDS = {"environment": UploadKind.ENVIRONMENT, "prompts": UploadKind.PROMPTS}
"""Settings of the family `custom` that may name a file of this machine."""
LOCAL_FILE = re.compile(r".*(/|\.py$|\.jsonl$)")
"""What is written like a path is one; anything else names an upload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFile:
    """A file that a job names, to be uploaded."""

    kind: UploadKind
    path: Path
    digest: str
    written: str
    """As the job file names it."""

    @property
    def name(self) -> str:
        """What it is called on the service, where jobs name it by digest."""
        return (
            re.sub(r"[^A-Za-z0-9._-]", "-", self.path.stem).lstrip("._-")[:MAX_NAME_CHARS] or "file"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a job file asks for; all that can be checked here is."""

    specs: tuple[JobSpec, ...]
    files: tuple[LocalFile, ...]
    run: RunSection
    has_run: bool
    """The file says how its jobs are run, which a service decides by itself."""

    def files_of(self, spec: JobSpec) -> Iterator[LocalFile]:
        named = {spec.env.get(setting) for setting in FILE_KINDS}
        return (file for file in self.files if file.digest in named)


def command(args: argparse.Namespace) -> int:
    """Hand over the jobs of a file and show where they stand."""
    with connected(args) as client:
        who = client.whoami()
        own = args.tenant or (who.tenant if who.role is Role.TENANT else None)
        submission = read_submission(args.jobs, default_tenant=own)
        if submission.has_run:
            words = "`run:` is for `marlaas run`; the service decides how jobs run"
            print(f"marlaas: {args.jobs}: {words}", file=sys.stderr)
        others = sorted({spec.tenant for spec in submission.specs} - {own})
        if others and who.role is Role.TENANT:
            raise InvalidRequest(f"{args.jobs}: is for {', '.join(others)}; the key is {own}'s")
        clients = {str(tenant): client.acting_for(tenant) for tenant in others}
        has_owners = who.role is Role.OPERATOR
        rows: list[tuple[str, JobInfo]] = []
        try:
            # One by one: what was handed over is shown even if a later job is refused.
            for row in hand_over(submission, clients, client):
                rows.append(row)
        finally:
            if args.json:
                print_json([job_row(*row) for row in rows])
            elif rows:
                console().print(job_table(rows, has_owners=has_owners))
    return 0


def hand_over(
    submission: Submission, clients: Mapping[str, Client], client: Client
) -> Iterator[tuple[str, JobInfo]]:
    """Upload what the jobs need and hand them over, each by the client of its tenant.

    Raises:
        InvalidRequest: with every problem of every job that the service refused.
    """
    problems: list[str] = []
    has_uploaded: set[tuple[str, str]] = set()
    for spec in submission.specs:
        acting = clients.get(spec.tenant, client)
        job = describe_job(spec)
        del job["tenant"]
        try:
            for file in submission.files_of(spec):
                if (spec.tenant, file.digest) not in has_uploaded:
                    upload(acting, file)
                has_uploaded.add((spec.tenant, file.digest))
            yield spec.tenant, acting.jobs.create(**job).info
        except InvalidRequest as error:
            problems += [f"{spec.job_id}: {problem}" for problem in error.problems]
        except Conflict as error:
            problems.append(f"{spec.job_id}: {error}")
    if problems:
        raise InvalidRequest(*problems)


def upload(client: Client, file: LocalFile) -> None:
    """Upload a file unless the tenant has it."""
    if any(there.digest == file.digest for there in client.uploads()):
        return
    print(f"Uploading {file.path}", file=sys.stderr)
    if file.kind is UploadKind.PROMPTS:
        client.upload_prompts(file.name, file.path)
    else:
        client.upload_environment(file.name, file.path)


def read_submission(
    path: Path,
    *,
    default_tenant: str | None = None,
    context_of: Callable[[str], int | None] | None = None,
    digests: Mapping[str, str] | None = None,
) -> Submission:
    """Read a job file; jobs that name no tenant are the default one's.

    `context_of` is as in `read_jobs`. `digests` are those of local files that were uploaded before,
    by the name that the job file has for them; the files themselves may be gone.

    Raises:
        InvalidRequest: with one problem per fault.
    """
    document = load_document(path)
    problems = list(document.problems)
    values = document.values
    files: dict[str, LocalFile] = {}
    if isinstance(values, dict):
        top = Place(lines=document.lines, problems=problems)
        for env, place in _custom_envs(values, top):
            for file in _local_files(env, place, path.parent, digests or {}):
                files[file.digest] = file
        if default_tenant is not None and isinstance(values.setdefault("defaults", {}), dict):
            values["defaults"].setdefault("tenant", default_tenant)
    read = read_jobs(values, lines=document.lines, problems=problems, context_of=context_of)
    return Submission(
        specs=read.jobs, files=tuple(files.values()), run=read.run, has_run="run" in values
    )


def _custom_envs(values: Mapping[str, Any], top: Place) -> Iterator[tuple[dict[str, Any], Place]]:
    """Yield the settings of every custom environment of a job file, and where they stand."""
    jobs = values.get("jobs")
    listed: Sequence[Any] = jobs if isinstance(jobs, list) else ()
    holders = [(values.get("defaults"), top / "defaults")]
    holders += [(job, top / "jobs" / index) for index, job in enumerate(listed)]
    for holder, place in holders:
        env = holder.get("env") if isinstance(holder, dict) else None
        if isinstance(env, dict) and env.get("family") == "custom":
            yield env, place / "env"


def _local_files(
    env: dict[str, Any], place: Place, folder: Path, digests: Mapping[str, str]
) -> Iterator[LocalFile]:
    """Replace each local file in the settings by its digest, and yield those to be uploaded."""
    for setting, kind in FILE_KINDS.items():
        named = env.get(setting)
        if not isinstance(named, str) or not LOCAL_FILE.fullmatch(named):
            continue
        if named in digests:
            env[setting] = digests[named]
            continue
        path = folder / named
        try:
            with path.open("rb") as file:
                env[setting] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            (place / setting).refuse(f"{path} cannot be read ({error.strerror})")
            # A digest in its place, so that the other settings are judged all the same.
            env[setting] = hashlib.sha256().hexdigest()
            continue
        yield LocalFile(kind=kind, path=path, digest=env[setting], written=named)
