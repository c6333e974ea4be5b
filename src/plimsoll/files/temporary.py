"""Temporary files that are named after their process, so that leftovers of killed processes can be removed.

    with own_folder() as folder: ...
    share_a_folder_with_children()    # otherwise each multiprocessing child creates its own
    remove_leftovers()

The supervisor of a run removes the leftovers of its training process. Starting or resuming a run removes the leftovers
of all runs on this machine. The name of a temporary file contains the PID namespace, the process ID and the start time
of its process. On systems other than Linux, nothing is treated as a leftover.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import current_process
from multiprocessing.util import Finalize
from pathlib import Path

from plimsoll.device.process_exit import start_ticks

_LONGEST_SOCKET = 107  # unix(7): 108 bytes with the terminating zero
_RANDOM_CHARACTERS = 8  # of `tempfile`
_SHORT_FOLDER = "/tmp"

_OWN = re.compile(r"plimsoll-(\d+)-(\d+)-(\d+)-")


def own_prefix() -> str:
    """Return the prefix of this process for names of temporary files."""
    pid = os.getpid()
    return f"plimsoll-{_namespace()}-{pid}-{start_ticks(pid) or 0}-"


@contextmanager
def own_folder() -> Iterator[Path]:
    """Create a temporary folder. It is deleted after the block, or by `remove_leftovers` if this process is killed."""
    with tempfile.TemporaryDirectory(prefix=own_prefix(), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def share_a_folder_with_children() -> None:
    """Make forked children share one folder for their sockets, which is deleted with this process.

    Otherwise each child creates a folder (``pymp-``) that remains if the child is killed, as data loader workers are
    when the training process is killed.
    """
    config: dict[str, object] = current_process()._config  # type: ignore[attr-defined]  # as in `get_temp_dir`
    if config.get("tempdir") is None:
        folder = tempfile.mkdtemp(prefix=own_prefix(), dir=_folder_for_sockets())
        Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)  # after all users of the folder
        config["tempdir"] = folder


def remove_leftovers() -> None:
    """Remove temporary files of processes that have ended."""
    for folder in {Path(tempfile.gettempdir()), Path(_SHORT_FOLDER)}:
        with suppress(OSError):
            for name in os.listdir(folder):
                found = _OWN.match(name)
                if found is not None and _has_ended(*map(int, found.groups())):
                    _remove(folder / name)


def _folder_for_sockets() -> str:
    """Return the folder for temporary files, or ``/tmp`` if the path of a socket in that folder would be too long."""
    usual = tempfile.gettempdir()
    longest = len(usual) + len("/") + len(own_prefix()) + _RANDOM_CHARACTERS + len("/listener-") + _RANDOM_CHARACTERS
    return usual if longest <= _LONGEST_SOCKET or not os.path.isdir(_SHORT_FOLDER) else _SHORT_FOLDER


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _has_ended(namespace: int, pid: int, ticks: int) -> bool:
    """Return whether a process has ended; False if it belongs to another PID namespace, such as a container's."""
    return bool(ticks) and namespace == _namespace() and start_ticks(pid) != ticks


def _namespace() -> int:
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0
