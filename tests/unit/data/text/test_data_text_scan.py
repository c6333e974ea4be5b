"""Scanned parts of files come in order, from threads and from processes, and holes are not read."""

import errno
import os
import signal
from multiprocessing import get_context
from pathlib import Path

import pytest

from corpora import check_all_ways, cut_into, opened, written
from plimsoll.data.formats import Found, Layout, Part
from plimsoll.data.text import scan
from plimsoll.data.text.scan import Scanned, scan_files
from plimsoll.errors import DataError, PlimsollWarning


def test_parts_and_files_come_in_their_order(tmp_path: Path):
    files = []
    for number in range(40):
        path = written(tmp_path / str(number), b"x\n" * (number % 7 * 10 + 1))
        files.append(Scanned(str(path), path.stat().st_size, 0, Layout("text", "line")))
    with cut_into(32, 16):
        found = list(scan_files(files, 100, 0))
    expected = [
        (file.path, begin, min(begin + 32, file.num_bytes)) for file in files for begin in range(0, file.num_bytes, 32)
    ]
    assert [(part.path, part.begin, part.end) for part, _ in found] == expected


def test_processes_find_what_threads_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    texts = [f'row "{number}"\nsecond line' for number in range(3000)]
    rows = "".join('{},"{}"\n'.format(number % 3, text.replace('"', '""')) for number, text in enumerate(texts))
    path = written(tmp_path / "a.csv", rows)
    with cut_into(1 << 12, 1 << 12):
        key = opened(path, text="2", label="1").key
        monkeypatch.setattr(scan, "_FORK_BYTES", 0)
        corpus = opened(path, text="2", label="1")
    assert corpus.key == key
    check_all_ways(corpus, texts, [2999, 7, 123])


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a file that is large enough for processes."""
    monkeypatch.setattr(scan, "_FORK_BYTES", 0)
    return written(tmp_path / "a.txt", "a line\n" * 100_000)


def test_where_no_process_can_be_started_threads_scan(lines: Path, monkeypatch: pytest.MonkeyPatch):
    def refused() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", refused)
    assert len(opened(lines, unit="line")) == 100_000


def test_a_process_that_may_not_have_children_scans_with_threads(lines: Path):
    with get_context("fork").Pool(1) as pool:  # its processes are daemons, like DataLoader workers
        assert pool.apply(_num_lines, (lines,)) == 100_000


def _num_lines(path: Path) -> int:
    return len(opened(path, unit="line"))


_HERE, _SCAN_ALL = os.getpid(), scan._scan_all


def _killed_after_some(parts: list[Part]) -> list[Found | DataError]:
    if os.getpid() != _HERE and parts[0].begin > 200_000:
        os.kill(os.getpid(), signal.SIGKILL)
    return _SCAN_ALL(parts)


def test_a_process_that_is_killed_loses_nothing(lines: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scan, "_scan_all", _killed_after_some)
    with cut_into(1 << 15, 1 << 14), pytest.warns(PlimsollWarning, match="was killed, perhaps by the kernel"):
        corpus = opened(lines, unit="line")
    assert list(corpus) == ["a line"] * 100_000


def test_a_disk_that_cannot_be_read_is_not_taken_for_one_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = written(tmp_path / "a.txt", "a line\n")
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(DataError, match=r"cannot read .*a\.txt \(Input/output error\): check the disk"):
        opened(path)


def test_a_hole_is_known_without_reading_it(tmp_path: Path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.seek(64 << 20)
        file.write(b"x")
        file.truncate(128 << 20)
    size = path.stat().st_size
    if os.stat(path).st_blocks * 512 >= size:
        pytest.skip("this file system makes no holes")

    def is_hole(begin: int, end: int) -> bool:
        return scan._is_hole(Part(str(path), begin, end, size, Layout("text"), 100))

    assert is_hole(0, 1 << 20)
    assert not is_hole(63 << 20, 65 << 20)
    assert is_hole(127 << 20, 128 << 20)  # no data follows
