"""Control groups for containers, on machines that delegate one to this process.

Resource limits bound each process; a control group bounds a container as a whole, also what the
kernel holds for it. Used on top of them, and only where nobody else's group is touched: version 2,
and a folder that is ours, as systemd makes it for a service with

    [Service]
    Delegate=memory pids
    DelegateSubgroup=server

Elsewhere containers are bounded by resource limits alone; `in_words` says which holds.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
CONTROLLERS = {"memory", "pids"}
MACHINERY_BYTES = 96 << 20
"""Memory of a container's own processes: bwrap, the server and the template."""
NUM_MACHINERY = 8
"""Processes of a container beside the runner's, with room to replace a template."""


@dataclass(frozen=True, slots=True)
class ContainerGroup:
    """The group of one container: `made -> entered by its first process -> removed`."""

    folder: Path

    @classmethod
    def make(
        cls, parent: Path, name: str, *, memory_bytes: int, max_processes: int
    ) -> "ContainerGroup":
        """Make a group with bounds for what runs in a container.

        Raises:
            OSError: the kernel refuses.
        """
        folder = parent / name
        folder.mkdir()
        bounds = {
            "memory.max": memory_bytes + MACHINERY_BYTES,
            "memory.swap.max": 0,
            "pids.max": max_processes + NUM_MACHINERY,
        }
        for file, bound in bounds.items():
            if file != "memory.swap.max" or (folder / file).exists():
                (folder / file).write_text(f"{bound}\n")
        return cls(folder)

    def entering(self, argv: Sequence[str]) -> list[str]:
        """Return a command that enters the group and then becomes `argv`."""
        script = 'echo $$ > "$0" && exec "$@"'
        return ["/bin/sh", "-c", script, str(self.folder / "cgroup.procs"), *argv]

    def remove(self) -> bool:
        """Remove the group. Returns False while a process in it is still dying."""
        try:
            self.folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def delegated(own: Path = OWN, mount: Path = MOUNT) -> Path | None:
    """Return the folder in which this process may make groups with `CONTROLLERS`, if there is one.

    That is the parent of its own group: a group that holds processes cannot bound subgroups.
    """
    try:
        lines = own.read_text().splitlines()
        path = next(line.removeprefix("0::") for line in lines if line.startswith("0::/"))
        if path == "/":
            return None
        parent = (mount / path.lstrip("/")).parent
        available = set((parent / "cgroup.controllers").read_text().split())
        if CONTROLLERS - available or not _is_ours(parent):
            return None
        enabled = set((parent / "cgroup.subtree_control").read_text().split())
        if missing := sorted(CONTROLLERS - enabled):
            wanted = " ".join(f"+{name}" for name in missing)
            (parent / "cgroup.subtree_control").write_text(wanted)
    except (OSError, StopIteration):
        return None
    return parent


@cache
def delegated_here() -> Path | None:
    """Return the same for this process, looked up once."""
    return delegated()


def in_words() -> str:
    """Return how containers of this process are bounded, for people."""
    folder = delegated_here()
    if folder is None:
        return "memory and processes are bounded by resource limits"
    return f"memory and processes are bounded by resource limits and control groups in {folder}"


def _is_ours(folder: Path) -> bool:
    """Return whether a group was given away to us: root may write anywhere, which says nothing."""
    if not os.access(folder, os.W_OK) or not os.access(folder / "cgroup.procs", os.W_OK):
        return False
    if os.geteuid() != 0:
        return True
    for name in ("trusted.delegate", "user.delegate"):
        with suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False
