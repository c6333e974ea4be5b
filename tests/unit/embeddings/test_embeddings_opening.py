"""Opening of word vectors: the content determines the format, or an error lists the alternatives."""

import os
import signal
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from plimsoll.embeddings import opening
from plimsoll.embeddings.formats import Block
from plimsoll.embeddings.formats.helpers import lines
from plimsoll.embeddings.opening import FORMATS, open_file, read_parts
from plimsoll.errors import EmbeddingError

GLOVE = b"the 1 2\nof 3 4\n"


def test_what_opens_is_the_format_and_the_vectors(tmp_path: Path):
    (tmp_path / "x.bin").write_bytes(GLOVE)
    opened = open_file(tmp_path / "x.bin")
    assert (opened.format, opened.title, opened.source.name) == ("glove", "GloVe text", str(tmp_path / "x.bin"))
    assert opened.vectors.dimension == 2


def test_a_file_of_an_archive_is_named_as_in_a_folder(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "glove.6B.zip", "w") as archive:
        archive.writestr("glove.6B.2d.txt", GLOVE)
        archive.writestr("inside/glove.6B.3d.txt", b"the 1 2 3\n")
    assert open_file(tmp_path / "glove.6B.zip" / "glove.6B.2d.txt").vectors.dimension == 2
    assert open_file(tmp_path / "glove.6B.zip" / "inside" / "glove.6B.3d.txt").vectors.dimension == 3
    with pytest.raises(
        EmbeddingError, match=r"glove.6B.zip holds 2 files \(glove.6B.2d.txt, .*\): name one as .*2d.txt"
    ):
        open_file(tmp_path / "glove.6B.zip")
    with pytest.raises(EmbeddingError, match=r"glove.6B.zip holds no file x but glove.6B.2d.txt, .*: name one of them"):
        open_file(tmp_path / "glove.6B.zip" / "x")


def test_no_file_says_what_formats_there_are(tmp_path: Path):
    with pytest.raises(
        EmbeddingError, match=r"there is no file .*x: give a file of word vectors \(GloVe .*\.gz and \.zip"
    ):
        open_file(tmp_path / "x")
    with pytest.raises(EmbeddingError, match=r"there is no file nothing-there.txt \(relative to .*\): give"):
        open_file(Path("nothing-there.txt"))
    with pytest.raises(EmbeddingError, match="is a folder: name the file with the vectors in it"):
        open_file(tmp_path)


def test_a_file_that_is_no_embedding_says_how_it_begins_and_what_formats_there_are(tmp_path: Path):
    (tmp_path / "novel.txt").write_bytes(b"It was the best of times,\n")
    with pytest.raises(EmbeddingError) as raised:
        open_file(tmp_path / "novel.txt")
    assert str(raised.value) == (
        f"{tmp_path}/novel.txt is not in a known format of word vectors (it begins with b'It was the best of times'): "
        f"give one of {', '.join(module.TITLE for module in FORMATS.values())}; .gz and .zip of these"
    )


def test_an_empty_file_is_an_error(tmp_path: Path):
    (tmp_path / "x.txt").write_bytes(b"")
    with pytest.raises(EmbeddingError, match="x.txt holds 0 bytes that can be read: download it again"):
        open_file(tmp_path / "x.txt")


class Parts:
    """Vectors in parts of one word each, too few for a process."""

    num_parts = 0

    def __init__(self, num_parts: int) -> None:
        self.handed_out = 0
        self._num_parts = num_parts

    def share_read(self) -> float:
        return self.handed_out / self._num_parts

    def parts(self, wanted):
        for number in range(self._num_parts):
            self.handed_out += 1
            yield lambda number=number: Block([b"%d" % number], np.array([0]), 1, lambda indexes: number)


@pytest.mark.parametrize("num_parts", [0, 1, 100])
def test_parts_come_in_order_from_whatever_thread(num_parts: int):
    parts = Parts(num_parts)
    found = list(read_parts(parts, None, lambda block: (block.rows(None), threading.get_ident())))
    assert [block.words for block, _, _ in found] == [[b"%d" % number] for number in range(num_parts)]
    assert [number for _, (number, _), _ in found] == list(range(num_parts))
    assert threading.get_ident() not in {thread for _, (_, thread), _ in found}
    if found:
        with pytest.raises(AssertionError, match="freed once it has been read"):
            found[0][0].rows(np.array([0]))


def test_few_parts_are_read_ahead_and_none_after_one_stops():
    parts = Parts(1000)
    reading = read_parts(parts, None, lambda block: None)
    next(reading)
    assert parts.handed_out <= 2 * opening._MOST_WORKERS + 1
    reading.close()
    assert parts.handed_out <= 2 * opening._MOST_WORKERS + 1


def test_an_error_of_a_part_comes_through():
    def fail(block: Block) -> None:
        raise EmbeddingError(f"{block.words[0].decode()}: give another")

    with pytest.raises(EmbeddingError, match="0: give another"):
        list(read_parts(Parts(50), None, fail))


class TestForked:
    """Parallel reading of files with many parts."""

    @pytest.fixture
    def many_parts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(lines, "_PART_BYTES", 64)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
        (tmp_path / "x").write_bytes(b"".join(b"w%d %d.5 -1\n" % (number, number) for number in range(2000)))
        return tmp_path / "x"

    def test_parts_come_in_the_order_of_the_file(self, many_parts: Path):
        vectors = open_file(many_parts).vectors
        assert vectors.num_parts > 300
        read = list(read_parts(vectors, None, lambda block: (os.getpid(), block.rows(np.arange(len(block.words))))))
        assert [word for block, _, _ in read for word in block.words] == [b"w%d" % number for number in range(2000)]
        assert np.concatenate([rows.matrix[:, 0] for _, (_, rows), _ in read]).tolist() == [
            number + 0.5 for number in range(2000)
        ]
        assert os.getpid() not in {process for _, (process, _), _ in read}
        assert [share for _, _, share in read] == pytest.approx([n / len(read) for n in range(1, len(read) + 1)])

    def test_an_error_in_a_process_is_the_error_here(self, many_parts: Path):
        def fail(block: Block) -> None:
            raise EmbeddingError(f"{block.num_words} words: give others")

        with pytest.raises(EmbeddingError, match="words: give others"):
            list(read_parts(open_file(many_parts).vectors, None, fail))

    def test_where_a_process_is_killed_this_one_goes_on(self, many_parts: Path):
        here = os.getpid()

        def read(block: Block) -> int:
            if os.getpid() != here and b"w1000" in block.words:
                os.kill(os.getpid(), signal.SIGKILL)
            return os.getpid()

        found = list(read_parts(open_file(many_parts).vectors, None, read))
        assert [word for block, _, _ in found for word in block.words] == [b"w%d" % number for number in range(2000)]
        assert found[-1][1] == here
