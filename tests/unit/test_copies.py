"""Files elsewhere: listed, copied whole or not at all, let go and copied again, and refused when they have changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from tests.web_server import Site, serving

from plimsoll import copies
from plimsoll.copies import find, is_copy, is_remote, name_of, present, shown
from plimsoll.errors import DataError, OutputError

pytest.importorskip("aiohttp", reason="http addresses need aiohttp")

CONTENT = bytes(range(256)) * 64


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_PAUSES_SECONDS", (0.0,) * 4)


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    """An empty memory:// file system."""
    opened = fsspec.filesystem("memory")
    opened.store.clear()
    opened.pseudo_dirs[:] = [""]
    yield opened
    opened.store.clear()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("s3://a/b", True), ("https://h/a.txt", True), ("memory://a", True), ("hf:imdb", False), ("a/b.txt", False),
        ("C:/a.txt", False), ("/a://b", False),
    ],
)  # fmt: skip
def test_what_is_elsewhere_has_a_protocol(source: str, expected: bool):
    assert is_remote(source) == expected


def test_a_password_is_not_shown():
    assert shown("https://me:secret@host/a.txt") == "https://me:***@host/a.txt"
    assert shown("https://host/a.txt") == "https://host/a.txt"


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
    assert Path(present(one.path)).read_bytes() == b"x"


def test_without_a_folder_places_are_addresses(memory):
    memory.pipe("/a.txt", b"x")
    assert [file.path for file in find("memory://a.txt", None)] == ["memory://a.txt"]


@pytest.mark.parametrize("source", ["memory://none.txt", "memory://none/*.txt"])
def test_nothing_found_is_said(memory, tmp_path: Path, source: str):
    with pytest.raises(DataError, match="there is no file at memory://none"):
        find(source, tmp_path)


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize("fault", ["", "cut", "500"])
def test_a_copy_is_whole_whatever_happens_on_the_way(tmp_path: Path, monkeypatch, has_ranges: bool, fault: str):
    monkeypatch.setattr(copies, "_PIECE_BYTES", 5000)
    with serving(Site({"a.txt": CONTENT}, has_ranges, {"a.txt": (fault, 2)} if fault else {})) as site:
        (file,) = find(f"{site.address}/a.txt?token=1", tmp_path)
        assert Path(present(file.path)).read_bytes() == CONTENT
        assert os.stat(file.path).st_mtime_ns == file.mtime_ns
        asked = site.num_answers["a.txt"]
        present(file.path)
        assert site.num_answers["a.txt"] == asked  # it is there
    assert [path.name for path in Path(file.path).parent.iterdir() if ".tmp-" in path.name] == []


def test_what_keeps_failing_is_said_and_leaves_nothing(tmp_path: Path):
    with serving(Site({"a.txt": CONTENT}, faults={"a.txt": ("cut", 99)})) as site:
        (file,) = find(f"{site.address}/a.txt", tmp_path)
        with pytest.raises(DataError, match=r"cannot read http://127.*: 5 tries failed, the last with"):
            present(file.path)
    assert not os.path.exists(file.path)
    with pytest.raises(DataError, match="there is no file at"):  # and nobody listens there any more
        find(f"{site.address}/a.txt", tmp_path)


def test_a_file_that_is_not_there_is_not_asked_for_again(tmp_path: Path):
    with serving(Site({})) as site, pytest.raises(DataError, match="there is no file at http"):
        find(f"{site.address}/a.txt", tmp_path)


def test_a_file_that_changed_is_another_and_its_old_copy_is_refused(tmp_path: Path):
    with serving(Site({"a.txt": CONTENT})) as site:
        (before,) = find(f"{site.address}/a.txt", tmp_path)
        site.files["a.txt"] = CONTENT[::-1]
        with pytest.raises(DataError, match="has changed since it was first looked at"):
            present(before.path)
        (after,) = find(f"{site.address}/a.txt", tmp_path)
        assert (after.path, after.mtime_ns == before.mtime_ns) == (before.path, False)
        assert Path(present(after.path)).read_bytes() == CONTENT[::-1]


def test_copies_that_were_used_longest_ago_make_room_and_come_back(memory, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_COPIES", "250B")
    for name in "abc":
        memory.pipe(f"/{name}.txt", name.encode() * 100)
    places = [file.path for file in find("memory:///*.txt", tmp_path)]
    for number, place in enumerate((*places[:2], places[0], places[2])):
        with open(present(place), "rb") as opened:
            os.utime(place, ns=(number * 10**9, os.stat(place).st_mtime_ns))
            assert len(opened.read()) == 100
    assert [os.path.exists(place) for place in places] == [True, False, True]  # b was used longest ago
    assert Path(present(places[1])).read_bytes() == b"b" * 100


def test_a_file_that_no_folder_of_that_size_holds_is_refused(memory, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_COPIES", "99B")
    memory.pipe("/a.txt", b"a" * 100)
    (file,) = find("memory://a.txt", tmp_path)
    with pytest.raises(OutputError, match="has 100 B, copies may take 99 B: set PLIMSOLL_COPIES to more"):
        present(file.path)


@pytest.mark.parametrize(
    ("source", "words"),
    [("nothing://a/b.txt", "is of no known protocol"), ("s3://bucket/a.txt", "pip install fsspec s3fs")],
)
def test_protocols_that_are_not_to_be_had_say_what_to_install(tmp_path: Path, source: str, words: str):
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(DataError, match=words):
            find(source, tmp_path)
    else:
        pytest.skip("s3fs is installed, so its protocol is known")


def test_a_password_stays_in_a_note_that_only_its_owner_can_read(tmp_path: Path):
    with serving(Site({"a.txt": CONTENT})) as site:
        address = site.address.replace("http://", "http://me:secret@")
        (file,) = find(f"{address}/a.txt", tmp_path)
        assert "secret" not in name_of(file.path)
        note = Path(file.path + ".from.json")
        assert note.stat().st_mode & 0o077 == 0
