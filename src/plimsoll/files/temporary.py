"""Temporary files named after the process that they are of, so that what a killed one has left can be told and removed.

    with own_folder() as folder: ...
    share_a_folder_with_children()    # of multiprocessing, whose processes would each make one
    remove_leftovers()

A process that is killed removes nothing. The supervisor of a run removes what its training process has left, and who
starts or goes on with a run what any run here has left. The name says whose it is: the namespace of process numbers,
the number, and when the process was started. Covers Linux; elsewhere nothing is taken for left over.
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

_LONGEST_SOCKET = 107  # unix(7): 108 bytes with the zero at the end
_RANDOM_CHARACTERS = 8  # of `tempfile`
_SHORT_FOLDER = "/tmp"

_OWN = re.compile(r"plimsoll-(\d+)-(\d+)-(\d+)-")


def own_prefix() -> str:
    """Return what names of temporary files of this process begin with."""
    pid = os.getpid()
    return f"plimsoll-{_namespace()}-{pid}-{start_ticks(pid) or 0}-"


@contextmanager
def own_folder() -> Iterator[Path]:
    """Have a temporary folder, which is gone after the block, or after a kill when somebody looks."""
    with tempfile.TemporaryDirectory(prefix=own_prefix(), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def share_a_folder_with_children() -> None:
    """Have the processes that are forked from this one use one folder for their sockets, which goes with this one.

    Each of them makes one else (``pymp-``), which stays where it is killed: so are those that read ahead, with the
    training process.
    """
    config: dict[str, object] = current_process()._config  # type: ignore[attr-defined]  # as in `get_temp_dir`
    if config.get("tempdir") is None:
        folder = tempfile.mkdtemp(prefix=own_prefix(), dir=_folder_for_sockets())
        Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)  # after what uses it
        config["tempdir"] = folder


def remove_leftovers() -> None:
    """Remove what processes that have ended have left in the folders for temporary files."""
    for folder in {Path(tempfile.gettempdir()), Path(_SHORT_FOLDER)}:
        with suppress(OSError):
            for name in os.listdir(folder):
                found = _OWN.match(name)
                if found is not None and _has_ended(*map(int, found.groups())):
                    _remove(folder / name)


def _folder_for_sockets() -> str:
    """The folder for temporary files, unless the path of a socket in one of ours there is too long."""
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
    """Whether a process has ended; of another namespace (a container that shares the folder) it is not known."""
    return bool(ticks) and namespace == _namespace() and start_ticks(pid) != ticks


def _namespace() -> int:
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0
