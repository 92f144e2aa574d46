"""What the C library does with freed memory: it keeps small blocks and gives large ones back.

    ordinary passes   blocks come from the heap and return to it: no page is ever cleared twice
    long passes       blocks come from the system and return to it: `blocks_from_system`

glibc raises the size from which blocks come from the system each time one of them is freed, up to
32 MiB. A pass that forgets and makes its activations anew, layer by layer, then scatters them over
the heap, which takes up to two and a half times what is live at its peak, and keeps it; one that
keeps them all does not. A block from the system costs clearing its pages: 1.7 times the CPU time at
1,024 tokens of a base 256 wide, 1.4 times at 576, ever less with width and with length.

Elsewhere than on glibc nothing is changed, and nothing is promised.
"""

import ctypes
import ctypes.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of `mallopt`, from <malloc.h>."""

HEAP_BLOCK_BYTES = 32 << 20
"""Ordinarily smaller blocks lie in the heap: what glibc itself arrives at after some passes."""

SYSTEM_BLOCK_BYTES = 1 << 17
"""In a long pass larger blocks come from the system."""

KEPT_BYTES = 64 << 20
"""A free end of the heap longer than this goes back: twice the above, as glibc has it."""


@contextmanager
def blocks_from_system() -> Iterator[None]:
    """Take large blocks from the system inside, so that what is freed does not stay."""
    library = _library()
    if library is None:
        yield
        return
    library.mallopt(M_MMAP_THRESHOLD, SYSTEM_BLOCK_BYTES)
    # Setting one ends glibc's own adjusting, of the other as well.
    library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    try:
        yield
    finally:
        library.mallopt(M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES)


def give_back() -> None:
    """Return free pages of the heap to the system."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)


@cache
def _library() -> ctypes.CDLL | None:
    """Return the C library of this process if it is glibc."""
    library = ctypes.CDLL(None)
    is_glibc = hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")
    return library if is_glibc else None
