"""Local copies of remote files: listed, complete or absent, evicted and copied again, and refused after a change."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest
from tests.web_server import Site, serving

from plimsoll.errors import DataError, OutputError
from plimsoll.files import addresses, remote
from plimsoll.files.remote import descriptor_of, find, head_of, held, is_copy, name_of

pytest.importorskip("aiohttp", reason="http addresses need aiohttp")

CONTENT = bytes(range(256)) * 64


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_PAUSES_SECONDS", (0.0,) * 4)


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    """Return an empty memory:// file system."""
    opened = fsspec.filesystem("memory")
    opened.store.clear()
    opened.pseudo_dirs[:] = [""]
    yield opened
    opened.store.clear()


def present(path: str) -> Path:
    """Copy a file unless a copy exists."""
    os.close(descriptor_of(path))
    return Path(path)


def test_a_glob_and_a_folder_mean_their_files(memory, tmp_path: Path):
    for name in ("/c/b.txt", "/c/a.txt", "/c/d/e.txt", "/c/a.csv"):
        memory.pipe(name, b"x")
    assert [name_of(file.path) for file in find("memory://c/*.txt", tmp_path)] == [
        "memory://c/a.txt",
        "memory://c/b.txt",
    ]
    assert len(find("memory://c", tmp_path)) == 4
    (one,) = find("memory://c/a.csv", tmp_path)
    assert (one.is_named, one.num_bytes, Path(one.path).name) == (True, 1, "a.csv")
    assert not os.path.exists(one.path)
    assert is_copy(one.path)
    assert present(one.path).read_bytes() == b"x"


def test_without_a_folder_places_are_addresses(memory):
    memory.pipe("/a.txt", b"x")
    assert [file.path for file in find("memory://a.txt", None)] == ["memory://a.txt"]


def test_a_copy_is_there_once(tmp_path: Path):
    with serving(Site({"a.txt": CONTENT})) as site:
        (file,) = find(f"{site.address}/a.txt?token=1", tmp_path)
        assert present(file.path).read_bytes() == CONTENT
        assert os.stat(file.path).st_mtime_ns == file.mtime_ns
        present(file.path)
        assert site.num_answers["a.txt"] == 1
    assert {path.name for path in Path(file.path).parent.iterdir()} == {"a.txt", "a.txt.from.json", "a.txt.lock"}


def test_what_keeps_failing_leaves_nothing(tmp_path: Path):
    with serving(Site({"a.txt": CONTENT}, faults={"a.txt": ("cut", 99)})) as site:
        (file,) = find(f"{site.address}/a.txt", tmp_path)
        with pytest.raises(DataError, match="5 tries failed"):
            present(file.path)
    assert {path.name for path in Path(file.path).parent.iterdir()} == {"a.txt.from.json", "a.txt.lock"}


def test_a_file_that_changed_is_another_and_its_old_copy_is_refused(tmp_path: Path):
    with serving(Site({"a.txt": CONTENT})) as site:
        (before,) = find(f"{site.address}/a.txt", tmp_path)
        site.files["a.txt"] = CONTENT[::-1]
        with pytest.raises(DataError, match="has changed since the run started"):
            present(before.path)
        (after,) = find(f"{site.address}/a.txt", tmp_path)
        assert (after.path, after.mtime_ns == before.mtime_ns) == (before.path, False)
        assert present(after.path).read_bytes() == CONTENT[::-1]


def test_copies_that_were_used_longest_ago_make_room_and_come_back(memory, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_COPIES", "250B")
    for name in "abc":
        memory.pipe(f"/{name}.txt", name.encode() * 100)
    places = [file.path for file in find("memory:///*.txt", tmp_path)]
    for number, place in enumerate((*places[:2], places[0], places[2])):
        with open(descriptor_of(place), "rb") as opened:
            os.utime(place, ns=(number * 10**9, os.stat(place).st_mtime_ns))
            assert len(opened.read()) == 100
    assert [os.path.exists(place) for place in places] == [True, False, True]  # b is the least recently used
    assert present(places[1]).read_bytes() == b"b" * 100


def test_a_file_that_no_folder_of_that_size_holds_is_refused(memory, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_COPIES", "99B")
    memory.pipe("/a.txt", b"a" * 100)
    (file,) = find("memory://a.txt", tmp_path)
    with pytest.raises(
        OutputError, match="has 100 B, but local copies are limited to 99 B: set PLIMSOLL_COPIES to more"
    ):
        present(file.path)


def test_a_password_stays_in_a_note_that_only_its_owner_can_read(tmp_path: Path):
    with serving(Site({"a.txt": CONTENT})) as site:
        address = site.address.replace("http://", "http://me:secret@")
        (file,) = find(f"{address}/a.txt", tmp_path)
        assert "secret" not in name_of(file.path)
        note = Path(file.path + ".from.json")
        assert note.stat().st_mode & 0o077 == 0


def test_what_is_no_longer_what_was_copied_is_copied_again(memory, tmp_path: Path):
    memory.pipe("/a.txt", b"abc")
    (file,) = find("memory://a.txt", tmp_path)
    present(file.path).write_bytes(b"torn and longer")
    assert present(file.path).read_bytes() == b"abc"


def test_what_is_in_use_stays_and_is_waited_for(memory, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_COPIES", "150B")
    monkeypatch.setattr(remote, "_WAIT_SECONDS", 0.3)
    for name in "ab":
        memory.pipe(f"/{name}.txt", name.encode() * 100)
    first, second = (file.path for file in find("memory:///*.txt", tmp_path))
    with held(first):
        with pytest.raises(OutputError, match="it has 100 B, but copies in use leave 50 B of 150 B"):
            present(second)
        with held(first):  # held a second time
            assert Path(first).read_bytes() == b"a" * 100
    present(second)
    assert not os.path.exists(first)


def test_what_a_killed_process_has_left_counts_and_makes_room_first(memory, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_COPIES", "250B")
    for name in "abc":
        memory.pipe(f"/{name}.txt", name.encode() * 100)
    places = [file.path for file in find("memory:///*.txt", tmp_path)]
    torn = Path(places[0] + ".copying")
    torn.write_bytes(bytes(100))
    present(places[1])
    assert torn.exists()
    present(places[2])
    assert [torn.exists(), *map(os.path.exists, places)] == [False, False, True, True]


def test_a_copy_that_becomes_whole_meanwhile_still_counts(memory, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_COPIES", "250B")
    for name in "abc":
        memory.pipe(f"/{name}.txt", name.encode() * 100)
    places = [file.path for file in find("memory:///*.txt", tmp_path)]
    being_copied = Path(places[0] + ".copying")
    being_copied.write_bytes(bytes(100))
    present(places[1])
    lacking_bytes = remote._lacking_bytes

    def whole_by_now(*arguments) -> int:
        if being_copied.exists():
            being_copied.rename(places[0])
        return lacking_bytes(*arguments)

    monkeypatch.setattr(remote, "_lacking_bytes", whole_by_now)
    present(places[2])
    assert list(map(os.path.exists, places)) == [True, False, True]


_MANY = """
import os, random, sys
from plimsoll.files.remote import descriptor_of
places = sys.argv[1:] * 3
random.shuffle(places)
for place in places:
    with open(descriptor_of(place), "rb") as file:
        content = file.read()
    assert content == content[:1] * 70_000, (place, content[:10])
"""


def test_processes_that_copy_at_once_share_copies_and_the_room(tmp_path: Path):
    files = {f"{name}.txt": name.encode() * 70_000 for name in "abcdef"}
    with serving(Site(files)) as site:
        places = [find(f"{site.address}/{name}", tmp_path)[0].path for name in files]
        environment = os.environ | {"PLIMSOLL_COPIES": "210000B"}
        started = [subprocess.Popen([sys.executable, "-c", _MANY, *places], env=environment) for _ in range(3)]
        most_bytes = 0
        while any(process.poll() is None for process in started):
            most_bytes = max(most_bytes, _taken_bytes(tmp_path))
            time.sleep(0.002)
        assert [process.returncode for process in started] == [0, 0, 0]
    assert 0 < most_bytes <= 210_000


def _taken_bytes(folder: Path) -> int:
    """Return the total size of all copies, or 0 if a copy changed during the measurement."""
    before, after = _sizes(folder), _sizes(folder)
    return sum(size for _, _, _, size in before) if before == after else 0


def _sizes(folder: Path) -> set[tuple[str, int, int, int]]:
    found = set()
    for path in [*folder.glob("*/*.txt"), *folder.glob("*/*.copying")]:
        with suppress(FileNotFoundError):
            status = path.stat()
            found.add((path.name, status.st_ino, status.st_ctime_ns, status.st_size))
    return found


def test_one_process_copies_and_the_others_wait(tmp_path: Path):
    with serving(Site({"a.txt": b"a" * 70_000})) as site:
        (file,) = find(f"{site.address}/a.txt", tmp_path)
        started = [subprocess.Popen([sys.executable, "-c", _MANY, file.path]) for _ in range(3)]
        assert [process.wait() for process in started] == [0, 0, 0]
        assert site.num_answers["a.txt"] == 1


def test_the_begin_of_a_large_file_needs_no_copy(memory, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(remote, "_WORTH_A_HEAD_BYTES", 3)
    memory.pipe("/a.txt", b"abc")
    memory.pipe("/b.txt", b"ab")
    large, small = (file.path for file in find("memory:///*.txt", tmp_path))
    assert (head_of(large, 2), head_of(large, 9), head_of(small, 2)) == (b"ab", b"abc", None)
    assert head_of(str(present(large)), 2) is None


@pytest.mark.parametrize("is_found_before", [True, False])
def test_a_folder_that_cannot_be_written_is_said(memory, tmp_path: Path, is_found_before: bool):
    memory.pipe("/a.txt", b"abc")
    folder = tmp_path / "copies"
    if is_found_before:
        (file,) = find("memory://a.txt", folder)
        Path(file.path + ".copying").mkdir()
        with pytest.raises(OutputError, match="cannot write .*; free some space, or use another --cache"):
            present(file.path)
    else:
        folder.write_text("no folder")
        with pytest.raises(OutputError, match="cannot write .*; free some space, or use another --cache"):
            find("memory://a.txt", folder)
