"""The files that a source names, and the reasons for files that are not read."""

import ctypes
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plimsoll.data.formats import Reading
from plimsoll.data.text.index import open_corpus
from plimsoll.data.text.sources import find_files
from plimsoll.errors import DataError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt", "sub/deep/c.txt", "sub/d.md", ".git/HEAD", "sub/.hidden"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


def names(tree: Path, *sources: str) -> list[str]:
    return [
        str(Path(file.path).relative_to(tree))
        for file in find_files(tuple(str(tree / source) for source in sources)).files
    ]


def left_out(tree: Path, *sources: str, skips: bool = False) -> dict[str, str]:
    found = find_files(tuple(str(tree / source) for source in sources), skips=skips)
    return {str(Path(path).relative_to(tree)): why for path, why in found.left_out.items()}


def test_files_folders_and_globs_are_sorted_and_taken_once(tree: Path):
    assert names(tree, "b.txt", "a.txt") == ["a.txt", "b.txt"]
    assert names(tree, "") == ["a.txt", "b.txt", "sub/d.md", "sub/deep/c.txt"]
    assert names(tree, "**/*.txt") == ["a.txt", "b.txt", "sub/deep/c.txt"]
    assert names(tree, "*") == ["a.txt", "b.txt"]  # a matching folder does not stand for its files
    assert names(tree, "", "*.txt", "sub/../a.txt") == names(tree, "")


def test_only_a_path_given_itself_is_named(tree: Path):
    files = find_files((str(tree), str(tree / "b.txt"))).files
    assert [Path(file.path).name for file in files if file.named] == ["b.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tree: Path):
    (tree / "[x].txt").write_text("x")
    assert names(tree, "[x].txt") == ["[x].txt"]


def test_relative_paths_become_absolute(tree: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tree)
    assert find_files(("a.txt",)) == find_files((str(tree / "a.txt"),))


@pytest.mark.parametrize("source", ["", "*"])
def test_a_link_to_nothing_is_an_error_and_not_left_out(tree: Path, source: str):
    (tree / "lost.txt").symlink_to("moved/lost.txt")
    with pytest.raises(DataError, match=r"lost\.txt as text: it is a symbolic link to moved/lost\.txt \(No such file"):
        find_files((str(tree / source),))


def test_a_file_that_goes_away_while_its_folder_is_listed_is_an_error(tree: Path, monkeypatch: pytest.MonkeyPatch):
    scan = os.scandir

    @contextmanager
    def scan_then_remove(folder: str) -> Iterator[list[os.DirEntry[str]]]:
        with scan(folder) as entries:
            yield list(entries)
        (tree / "b.txt").unlink(missing_ok=True)

    monkeypatch.setattr(os, "scandir", scan_then_remove)
    with pytest.raises(DataError, match=r"b\.txt as text: it was there a moment ago \(No such file"):
        find_files((str(tree),))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("absent.txt", "there is no file or folder"),
        ("*.absent", "no file matches"),
        ("empty", "holds no file"),
    ],
)
def test_a_source_that_means_nothing_is_an_error_with_its_own_text(tree: Path, source: str, message: str):
    (tree / "empty").mkdir()
    with pytest.raises(DataError, match=message) as caught:
        find_files((str(tree / source),))
    assert source in str(caught.value)


@pytest.mark.parametrize("source", ["", "**/*.txt"])
def test_what_is_in_a_linked_folder_is_read(tree: Path, source: str, tmp_path_factory: pytest.TempPathFactory):
    far = tmp_path_factory.mktemp("far")
    (far / "e.txt").write_text("e")
    (tree / "sub" / "part2").symlink_to(far)
    assert "sub/part2/e.txt" in names(tree, source)
    assert not left_out(tree, source)


@pytest.mark.parametrize("source", ["", "**", "**/*"])
def test_a_folder_with_two_names_is_read_once_and_the_other_said(tree: Path, source: str):
    (tree / "link").symlink_to("sub")
    (tree / "sub" / "deep" / "up").symlink_to("..")
    assert names(tree, source) == ["a.txt", "b.txt", "sub/d.md", "sub/deep/c.txt"]
    said = left_out(tree, source)
    assert set(said) == {"link", "sub/deep/up"}
    assert said["link"] == f"it is another name of the folder {tree}/sub, which is read"


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_file_with_two_names_is_read_once_and_the_other_said(tree: Path, link):
    (tree / "sub" / "d.md").unlink()
    link(tree / "b.txt", tree / "sub" / "again.txt")
    assert names(tree, "") == ["a.txt", "b.txt", "sub/deep/c.txt"]
    assert left_out(tree, "") == {"sub/again.txt": f"it is another name of {tree}/b.txt, which is read"}
    assert names(tree, "", "sub/again.txt") == ["a.txt", "sub/again.txt", "sub/deep/c.txt"]  # the given name is used


def test_a_link_that_comes_first_by_its_name_gives_way_to_the_file(tree: Path):
    (tree / "0.txt").symlink_to("b.txt")
    assert names(tree, "*.txt") == ["a.txt", "b.txt"]
    assert set(left_out(tree, "*.txt")) == {"0.txt"}


def test_special_files_are_named_and_not_waited_for(tree: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tree)  # the path of a socket may have at most 107 characters
    os.mkfifo("fifo.txt")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.txt")
        assert {path: why[:12] for path, why in left_out(tree, "").items()} == {
            "fifo.txt": "it is a pipe",
            "socket.txt": "it is a sock",
        }
    with pytest.raises(DataError, match=r"fifo\.txt is left out: it is a pipe, which can be read only once: write"):
        find_files(("fifo.txt",))
    with pytest.raises(DataError, match=r"/dev/null is left out: it is a device"):
        find_files(("/dev/null",))


def test_a_folder_that_a_pattern_matches_is_named_if_nothing_in_it_is(tree: Path):
    (tree / "empty").mkdir()
    assert left_out(tree, "*") == {
        "sub": f"it is a folder, but the pattern must match files: {tree}/sub/** matches all files below it"
    }
    assert not left_out(tree, "**/*")


@contextmanager
def nobody() -> Iterator[None]:
    """Access files with the rights of another user in this thread, because root may read everything."""
    library = ctypes.CDLL(None)
    before = library.setfsuid(65534)
    try:
        yield
    finally:
        library.setfsuid(before)


@pytest.fixture
def closed() -> Iterator[Path]:
    """Create a folder in which one subfolder may not be listed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in ("a.txt", "shut/b.txt"):
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text("x")
        folder.chmod(0o755)
        (folder / "shut").chmod(0)
        try:
            with nobody():
                yield folder
        finally:
            (folder / "shut").chmod(stat.S_IRWXU)


@pytest.mark.parametrize("source", ["", "**/*.txt", "*/*.txt"])
def test_a_folder_that_cannot_be_listed_is_an_error_or_said(closed: Path, source: str):
    with pytest.raises(
        DataError, match=r"shut: its files cannot be listed \(Permission denied\): allow .*on_error: skip"
    ):
        find_files((str(closed / source),))
    if source != "*/*.txt":  # this pattern matches no other file
        found = find_files((str(closed / source),), skips=True)
        assert [Path(file.path).name for file in found.files] == ["a.txt"]
        assert found.left_out.keys() == {str(closed / "shut")}


def test_a_file_in_a_folder_that_may_not_be_looked_into_is_not_taken_for_missing(closed: Path):
    with pytest.raises(DataError, match=r"shut/b\.txt \(Permission denied\): allow looking into its folder"):
        find_files((str(closed / "shut" / "b.txt"),))


def test_hidden_files_and_folders_below_a_folder_are_counted(tmp_path: Path):
    for name in ("a.txt", "sub/b.txt", ".h.txt", "sub/.h.txt", ".git/c.txt", ".git/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one\n")
    assert find_files((str(tmp_path),)).num_hidden == 3
    assert find_files((str(tmp_path), str(tmp_path / ".h.txt"))).num_hidden == 2  # the given hidden file is read
    assert find_files((str(tmp_path / "*.txt"),)).num_hidden == 0  # a glob never matches hidden files
    corpus = open_corpus([str(tmp_path)], Reading("line"), tmp_path / "sub" / ".cache")
    assert (len(corpus), corpus.num_hidden, corpus.num_skipped) == (2, 3, 0)
    (tmp_path / ".swap").write_text("one\n")
    again = open_corpus([str(tmp_path)], Reading("line"), tmp_path / "sub" / ".cache")
    assert (again.folder, again.num_hidden) == (corpus.folder, 5)  # the files of the cache are hidden too
    for name in ("a.txt", "sub/b.txt"):
        (tmp_path / name).unlink()
    with pytest.raises(DataError, match="holds no file that is not hidden"):
        find_files((str(tmp_path),))
