"""The identity of files: which changes affect it, and how much of a file is read for it."""

from pathlib import Path

import pytest

from plimsoll.data.text.sources import find_files
from plimsoll.errors import DataError
from plimsoll.files.identity import identity_of


def test_the_identity_says_path_size_time_and_a_sample(tmp_path: Path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x")
    files = find_files((str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))).files
    identity = identity_of(files)
    assert [entry[:2] for entry in identity] == [(str(tmp_path / "a.txt"), 1), (str(tmp_path / "b.txt"), 1)]
    (tmp_path / "b.txt").write_text("y")
    assert [one == other for one, other in zip(identity, identity_of(files), strict=True)] == [True, False]
    (tmp_path / "b.txt").unlink()
    with pytest.raises(DataError, match=r"cannot read .*b\.txt \(No such file or directory\): restore it"):
        identity_of(files)


def test_of_many_files_some_are_sampled(tmp_path: Path):
    for number in range(200):
        (tmp_path / f"{number:03d}.txt").write_text("x")
    samples = [entry[3] for entry in identity_of(find_files((str(tmp_path),)).files)]
    assert len([sample for sample in samples if sample]) == 50
