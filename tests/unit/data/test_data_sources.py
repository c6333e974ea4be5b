"""Which files a source means."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll.data.sources import find_files
from plimsoll.errors import DataError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt", "sub/deep/c.txt", "sub/d.md", ".git/HEAD", "sub/.hidden"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


def names(tree: Path, *sources: str) -> list[str]:
    return [
        str(Path(file.path).relative_to(tree)) for file in find_files(tuple(str(tree / source) for source in sources))
    ]


def test_files_folders_and_globs_are_sorted_and_taken_once(tree: Path):
    assert names(tree, "b.txt", "a.txt") == ["a.txt", "b.txt"]
    assert names(tree, "") == ["a.txt", "b.txt", "sub/d.md", "sub/deep/c.txt"]
    assert names(tree, "**/*.txt") == ["a.txt", "b.txt", "sub/deep/c.txt"]
    assert names(tree, "*") == ["a.txt", "b.txt"]  # a folder that matches is not its content
    assert names(tree, "", "*.txt", "sub/../a.txt") == names(tree, "")


def test_only_a_path_given_itself_is_named(tree: Path):
    files = find_files((str(tree), str(tree / "b.txt")))
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
    walk = os.walk

    def walk_then_remove(folder: str) -> Iterator[object]:
        yield from walk(folder)
        (tree / "b.txt").unlink(missing_ok=True)

    monkeypatch.setattr(os, "walk", lambda folder: iter(list(walk_then_remove(folder))))
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
