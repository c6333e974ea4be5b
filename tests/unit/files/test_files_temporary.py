"""Leftovers of killed processes in the folder for temporary files, distinguished from files of living processes."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from plimsoll.files.temporary import _folder_for_sockets, own_folder, own_prefix, remove_leftovers
from processes import environment, run_program

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is told by /proc")

LEAVES = """
import os, tempfile
from multiprocessing import get_context, util
from pathlib import Path
from plimsoll.files.temporary import own_prefix, share_a_folder_with_children
share_a_folder_with_children()
share_a_folder_with_children()
tempfile.NamedTemporaryFile(prefix=own_prefix(), delete=False)
(Path(util.get_temp_dir()) / "listener").touch()

def look(pipe):
    pipe.send(util.get_temp_dir())
    os.kill(os.getpid(), 9)

ours, theirs = get_context("fork").Pipe()
child = get_context("fork").Process(target=look, args=(theirs,))
child.start()
print(ours.recv() == util.get_temp_dir(), sorted(os.listdir(tempfile.gettempdir()))[0][:9], flush=True)
child.join()
"""


@pytest.fixture
def folder(monkeypatch):
    """Create a folder for temporary files with a short name, because socket paths must not be long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_children_share_a_folder_that_goes_with_their_parent(folder):
    done = run_program(LEAVES, TMPDIR=str(folder))
    assert (done.returncode, done.stdout) == (0, "True plimsoll-\n"), done.stderr
    # only the file is left, because the process did not remove it
    assert [path.is_dir() for path in folder.iterdir()] == [False]
    remove_leftovers()
    assert not list(folder.iterdir())


def test_what_a_killed_process_has_left_is_removed_and_nothing_else(folder):
    (folder / "plimsoll-notes").write_text("mine")
    (folder / "pymp-of-others").mkdir()
    program = LEAVES + "import time\ntime.sleep(600)\n"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=environment(TMPDIR=str(folder)), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline()
        with own_folder() as own:
            assert own.name.startswith(own_prefix())
            remove_leftovers()
            assert len(list(folder.iterdir())) == 5  # both processes are alive
            process.send_signal(signal.SIGKILL)
            process.wait()
            remove_leftovers()
            assert sorted(folder.iterdir()) == sorted([own, folder / "plimsoll-notes", folder / "pymp-of-others"])
    assert not own.exists()


def test_sockets_are_where_their_paths_are_not_too_long(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", f"/var/{'long' * 20}")
    assert _folder_for_sockets() == "/tmp"
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    assert _folder_for_sockets() == "/var/tmp"


def test_a_process_of_another_namespace_is_not_taken_for_dead(folder):
    inode = os.stat("/proc/self/ns/pid").st_ino
    for namespace, pid in ((inode + 1, 1), (inode, os.getpid())):
        (folder / f"plimsoll-{namespace}-{pid}-77-a").touch()
    remove_leftovers()
    assert [path.name for path in folder.iterdir()] == [f"plimsoll-{inode + 1}-1-77-a"]
