"""Where commands write: a file or standard output, of which a full disk and a closed pipe may ask nothing more than one line."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from texvlm.cli import Complaint

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def writing(name: str, mode: str = "w") -> Iterator[IO[Any]]:
    """A file that is open while it is written to, or standard output where the name is "-".

    Args:
        name: of the file.
        mode: "w" for text, "wb" for bytes.

    Raises:
        Complaint: where it cannot be opened or written. What standard output refuses is told by `main`, as that of any `print`.
    """
    if name == "-":
        if sys.stdout is None:
            raise Complaint("standard output is closed")
        yield sys.stdout.buffer if "b" in mode else sys.stdout
        return
    try:
        with open(name, mode) as file:
            yield file
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Complaint(f"cannot write {name}: {error.strerror or error}") from None


def is_plain(path: Path) -> bool:
    """Whether a name is that of a file or free to become one; else it is a device or a pipe, whose name says nothing of its format."""
    return path.is_file() or not path.exists()


def refused(error: OSError) -> bool:
    """Whether this is standard output that takes no more: errors of files that have names are told where they are written."""
    return error.filename is None and error.errno in FULL


def give_up() -> None:
    """Lets go of what standard output has not taken, so that Python does not try again, and complain again, when it ends."""
    if sys.stdout is None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
