"""Stores open complete or not at all: after kills, with full disks and torn files, and with two writers at once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll.errors import OutputError
from plimsoll.files.store import Facts, Store, kept, read_facts, require_space, stored

WRITER = """
import os, sys, time
from pathlib import Path
from plimsoll.files.store import stored

def write(folder):
    with open(sys.argv[2], "a") as log:
        log.write("written\\n")
    (folder / "data").write_bytes(b"x" * int(sys.argv[3]))
    if sys.argv[4] == "hang":
        print("halfway", flush=True)
        time.sleep(60)
    time.sleep(0.2)
    return {"answer": 42}

print(stored(Path(sys.argv[1]), write))
"""


def start(folder: Path, log: Path, num_bytes: int = 10, mode: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), str(log), str(num_bytes), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def write_one(folder: Path) -> dict[str, int]:
    (folder / "data").write_bytes(b"0123456789")
    return {"answer": 1}


def test_a_store_is_written_once(tmp_path: Path):
    folder = tmp_path / "cache" / "store"
    assert read_facts(folder) is None
    assert stored(folder, write_one) == {"answer": 1}
    assert stored(folder, lambda folder: pytest.fail("it was there")) == {"answer": 1}
    assert sorted(path.name for path in folder.parent.iterdir()) == ["store", "store.lock"]


@pytest.mark.parametrize(
    "tear",
    [
        lambda folder: (folder / "data").write_bytes(b"01234"),
        lambda folder: (folder / "data").write_bytes(b"0123456780"),  # same size, other head
        lambda folder: (folder / "data").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_text("{}"),
        lambda folder: (folder / "manifest.json").write_text(
            (folder / "manifest.json").read_text().replace('"facts"', '"fakts"')
        ),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "more").touch(),
    ],
)
def test_a_torn_store_is_written_again(tmp_path: Path, tear):
    folder = tmp_path / "store"
    stored(folder, write_one)
    tear(folder)
    assert read_facts(folder) is None
    assert stored(folder, write_one) == {"answer": 1}
    assert (folder / "data").read_bytes() == b"0123456789"
    assert not (folder / "more").exists()


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path):
    def fail(folder: Path) -> dict[str, int]:
        write_one(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stored(tmp_path / "store", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["store.lock"]


def test_a_writer_that_is_killed_leaves_no_store_and_no_rubbish_for_the_next(tmp_path: Path):
    killed = start(tmp_path / "store", tmp_path / "log", mode="hang")
    assert killed.stdout.readline() == "halfway\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert read_facts(tmp_path / "store") is None
    assert stored(tmp_path / "store", write_one) == {"answer": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "store", "store.lock"]


def test_of_two_writers_at_once_one_writes_and_both_have_it(tmp_path: Path):
    writers = [start(tmp_path / "store", tmp_path / "log") for _ in range(2)]
    assert [writer.communicate()[0] for writer in writers] == ["{'answer': 42}\n"] * 2
    assert (tmp_path / "log").read_text() == "written\n"


def test_a_file_that_cannot_grow_is_an_output_error_and_leaves_nothing(tmp_path: Path):
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))" + WRITER
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "store"), str(tmp_path / "log"), "2000", ""],
        capture_output=True,
        text=True,
    )
    assert "plimsoll.errors.OutputError: cannot write the cache" in done.stderr
    assert "File too large" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "store.lock"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
def test_a_full_disk_is_an_output_error(tmp_path: Path):
    def write(folder: Path) -> dict[str, int]:
        with open("/dev/full", "wb") as file:
            file.write(b"x")
        return {}

    with pytest.raises(OutputError, match="No space left on device; free some space"):
        stored(tmp_path / "store", write)


def test_space_that_is_not_there_is_refused_in_numbers(tmp_path: Path):
    require_space(tmp_path, 1)
    with pytest.raises(OutputError, match=r"needs about 1024\.0 PiB more in .* but the disk has .* free"):
        require_space(tmp_path, 1 << 60)


def test_what_is_kept_is_declared_before_it_is_made_and_made_once(tmp_path: Path):
    written: list[Path] = []

    @kept
    def squares(number: int, folder: Path) -> Store[list[int]]:
        """Return the squares below a number."""

        def write(place: Path) -> Facts:
            written.append(place)
            return {"squares": [one * one for one in range(number)]}

        return Store(folder / f"squares-{number}", write, lambda _, facts: facts["squares"])

    store = squares.declare(4, tmp_path)
    assert store.folder == tmp_path / "squares-4"
    assert not store.is_there
    assert not written
    assert squares(4, tmp_path) == squares(4, folder=tmp_path) == store.made() == [0, 1, 4, 9]
    assert store.is_there
    assert len(written) == 1
    assert squares.__doc__ == "Return the squares below a number."
