"""The processes of a server as the operating system shows them: who descends from whom, who lives.

A process is known by its number and the time it began, since numbers are used again.
"""

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """One process at the moment it was looked at."""

    pid: int
    began: int
    """In clock ticks since the system began."""
    command: str
    """Its arguments, joined by blanks."""

    @property
    def is_alive(self) -> bool:
        """True while it runs; one that has ended and was not waited for does not."""
        stat = _stat(self.pid)
        return stat is not None and stat.began == self.began and stat.state != "Z"


def descendants(pid: int) -> list[Process]:
    """Return every process below another one."""
    children: dict[int, list[_Stat]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (stat := _stat(int(entry.name))) is not None:
            children[stat.parent].append(stat)
    found: list[Process] = []
    waiting = [pid]
    while waiting:
        for stat in children[waiting.pop()]:
            waiting.append(stat.pid)
            found.append(Process(stat.pid, stat.began, _command(stat.pid)))
    return found


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and of every one below it; shared pages count each
    time."""
    pages = 0
    for one in (pid, *(process.pid for process in descendants(pid))):
        try:
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class _Stat:
    pid: int
    parent: int
    state: str
    began: int


def _stat(pid: int) -> _Stat | None:
    """Return what /proc says of a process; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in parentheses and may hold anything; fields are counted from behind it.
    fields = text.rpartition(")")[2].split()
    return _Stat(pid, parent=int(fields[1]), state=fields[0], began=int(fields[19]))


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
