"""Cached subsets: complete or absent, named after all their inputs, and shared by processes."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from plimsoll.embeddings.subsets import Subset, open_rows, take_subset
from plimsoll.errors import DataError
from processes import LONGEST_SECONDS, environment

RAW = b"the 1 2\nof 3 4\nand 5 6\n"
WORDS = ["of", "absent", "the"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "vectors").write_bytes(RAW)
    return tmp_path / "vectors"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def entries(cache: Path) -> list[str]:
    return sorted(entry.name for entry in cache.iterdir() if entry.suffix != ".lock")


def manifest_of(subset: Subset) -> Path:
    return subset.table.path.parent / "manifest.json"


def test_what_is_there_is_not_written_again(path: Path, cache: Path):
    first = take_subset(path, WORDS, cache=cache)
    written = manifest_of(first).stat()
    again = take_subset(str(path), tuple(WORDS), cache=cache, progress=lambda *_: pytest.fail("it is there"))
    assert again.rows.tobytes() == first.rows.tobytes()
    assert (first.facts.is_from_cache, again.facts.is_from_cache) == (False, True)
    assert again.facts.model_copy(update={"is_from_cache": False}) == first.facts
    assert again.digest == first.digest
    assert (manifest_of(again).stat().st_ino, manifest_of(again).stat().st_mtime_ns) == (
        written.st_ino,
        written.st_mtime_ns,
    )
    assert first.facts.folder == str(first.table.path.parent)
    assert {file.name for file in first.table.path.parent.iterdir()} == {"manifest.json", "table.safetensors"}


def test_the_users_cache_is_the_default(path: Path):
    subset = take_subset(path, WORDS)
    assert Path(os.environ["PLIMSOLL_CACHE"]) / "embeddings" in subset.table.path.parents


def test_another_option_word_or_order_is_another_entry(path: Path, cache: Path):
    calls = [
        {}, {"missing": "mean"}, {"missing": "zeros"}, {"ignore_case": False}, {"precision": "float16"},
        {"strict": True}, {"seed": 1}, {"padding": "absent"}, {"padding": "of", "missing": "zeros"},
    ]  # fmt: skip
    found = [take_subset(path, WORDS, cache=cache, **options) for options in calls]
    found += [
        take_subset(path, words, cache=cache) for words in (WORDS[::-1], ["of", "the"], [*WORDS, None], [*WORDS, "x"])
    ]
    assert len({subset.table.path for subset in found}) == len(found) == len(entries(cache))


def test_another_state_of_the_source_is_another_entry(path: Path, cache: Path):
    first = take_subset(path, WORDS, cache=cache)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    touched = take_subset(path, WORDS, cache=cache)
    path.write_bytes(RAW.replace(b"3 4", b"7 8"))  # the same size ...
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # ... and modification time
    edited = take_subset(path, WORDS, cache=cache)
    assert edited.rows[0].tolist() == [7, 8]
    path.write_bytes(RAW + b"more 1 1\n")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    longer = take_subset(path, WORDS, cache=cache)
    assert len({subset.table.path for subset in (first, touched, edited, longer)}) == 4


def test_a_file_that_was_moved_has_its_entry_still(path: Path, cache: Path, tmp_path: Path):
    first = take_subset(path, WORDS, cache=cache)
    path.rename(tmp_path / "elsewhere")
    again = take_subset(tmp_path / "elsewhere", WORDS, cache=cache)
    assert again.table.path == first.table.path
    assert again.facts.source == str(tmp_path / "elsewhere")


def places(num_bytes: int) -> Iterator[int]:
    generator = np.random.default_rng(0)
    yield from (0, 8, num_bytes - 1, *generator.choice(num_bytes, 40).tolist())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["table.safetensors", "manifest.json"])
@pytest.mark.parametrize("num_words", [3, 6000])
def test_a_damaged_byte_is_found_and_the_entry_is_written_again(cache: Path, tmp_path: Path, name: str, num_words: int):
    """A damaged byte is found and the entry is written again, also if the byte is far behind the file's head."""
    path = tmp_path / "vectors"
    path.write_bytes(b"".join(b"w%d %d %d\n" % (number, number, -number) for number in range(num_words)))
    words = [f"w{number}" for number in range(num_words)]
    first = take_subset(path, words, cache=cache)
    file = first.table.path.with_name(name)
    whole, right = file.read_bytes(), first.table.path.read_bytes()
    for place in places(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        found = take_subset(path, words, cache=cache)
        assert found.table.path.read_bytes() == right
        other = {"seconds", "is_from_cache"}  # a damaged byte of the recorded duration changes nothing else
        assert found.facts.model_dump(exclude=other) == first.facts.model_dump(exclude=other)
        assert found.digest == first.digest


@pytest.mark.parametrize("name", ["table.safetensors", "manifest.json"])
def test_an_entry_that_is_cut_or_lacks_a_file_is_written_again(path: Path, cache: Path, name: str):
    first = take_subset(path, WORDS, cache=cache)
    file, right = first.table.path.with_name(name), first.rows.tobytes()
    whole = file.read_bytes()
    for kept in (0, 1, len(whole) // 2, len(whole) - 1, None):
        file.unlink() if kept is None else file.write_bytes(whole[:kept])
        assert take_subset(path, WORDS, cache=cache).rows.tobytes() == right
    (file.parent / "more").touch()
    assert take_subset(path, WORDS, cache=cache).rows.tobytes() == right
    assert entries(cache) == [file.parent.name]
    assert not (file.parent / "more").exists()


def test_rows_are_opened_by_their_folder(path: Path, cache: Path):
    subset = take_subset(path, WORDS, cache=cache)
    assert open_rows(subset.table.path.parent).vectors.tobytes() == subset.rows.tobytes()
    subset.table.path.unlink()
    with pytest.raises(
        DataError, match="the word vectors .* are missing from the cache, or damaged: prepare them again"
    ):
        open_rows(subset.table.path.parent)


# Takes a subset. Reports its start and the first part that it has read, and then waits for a line on standard input.
TAKER = """
import json, sys
from pathlib import Path
from plimsoll.embeddings.subsets import take_subset

def progress(*_):
    print("writing", flush=True)
    sys.stdin.readline()

print("taking", flush=True)
found = take_subset(sys.argv[1], ["of", "absent", "the"], cache=Path(sys.argv[2]), progress=progress)
print(json.dumps([found.rows.tolist(), found.facts.seconds]), flush=True)
"""


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment(), stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_of_two_processes_at_once_one_writes_and_both_have_it(path: Path, cache: Path):
    writer = start(TAKER, path, cache)
    assert [writer.stdout.readline() for _ in range(2)] == ["taking\n", "writing\n"]
    waiter = start(TAKER, path, cache)
    assert waiter.stdout.readline() == "taking\n"
    (written,) = writer.communicate("go on\n", timeout=LONGEST_SECONDS)[0].splitlines()
    (waited,) = waiter.communicate("go on\n", timeout=LONGEST_SECONDS)[0].splitlines()  # this process did not write
    assert json.loads(waited) == json.loads(written)
    assert entries(cache) == [take_subset(path, WORDS, cache=cache).table.path.parent.name]


def test_a_process_that_is_killed_leaves_nothing_that_is_used(path: Path, cache: Path):
    killed = start(TAKER, path, cache)
    assert [killed.stdout.readline() for _ in range(2)] == ["taking\n", "writing\n"]
    assert [name.endswith(".part") for name in entries(cache)] == [True]
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert [name.endswith(".part") for name in entries(cache)] == [True]
    found = take_subset(path, WORDS, missing="normal", cache=cache)
    assert found.rows[[0, 2]].tolist() == [[3, 4], [1, 2]]
    assert entries(cache) == [found.table.path.parent.name]


def test_a_full_disk_is_an_output_error_and_leaves_nothing(path: Path, cache: Path):
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))" + TAKER
    taker = start(code, path, cache)
    _, said = taker.communicate("go on\n", timeout=LONGEST_SECONDS)
    assert "plimsoll.errors.OutputError: cannot write the cache" in said
    assert entries(cache) == []


# Maps a subset like `embeddings.load`, reads all of it, and reports when it is done. Reports its memory on request.
SHARER = """
import sys
from pathlib import Path
from plimsoll.embeddings.table import open_table

table = open_table(Path(sys.argv[1]), "copy")
total = table.vectors.sum()
print("mapped", flush=True)
sys.stdin.readline()
mapping, sizes = False, {"Rss": 0, "Pss": 0}
for line in open("/proc/self/smaps"):
    first = line.split()[0]
    if not first.endswith(":"):
        mapping = line.rstrip().endswith(sys.argv[1])
    elif mapping and first[:-1] in sizes:
        sizes[first[:-1]] += 1024 * int(line.split()[1])
print(sizes["Rss"], sizes["Pss"], flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="only Linux says which pages are shared")
def test_processes_share_the_pages_of_a_subset(tmp_path: Path):
    dimension, num_words = 256, 8192
    numbers = b" 0.5" * dimension
    (tmp_path / "x").write_bytes(b"".join(b"w%d%b\n" % (number, numbers) for number in range(num_words)))
    subset = take_subset(tmp_path / "x", [f"w{number}" for number in range(num_words)])
    num_bytes = subset.rows.nbytes
    assert num_bytes == 8 << 20
    sharers = [start(SHARER, subset.table.path) for _ in range(4)]
    assert [sharer.stdout.readline() for sharer in sharers] == ["mapped\n"] * 4
    sizes = []
    for sharer in sharers:
        sharer.stdin.write("\n")
        sharer.stdin.flush()
        sizes.append([*map(int, re.findall(r"\d+", sharer.stdout.readline()))])
    for sharer in sharers:
        sharer.communicate("\n", timeout=LONGEST_SECONDS)
    assert all(resident >= 0.9 * num_bytes for resident, _ in sizes)
    assert sum(share for _, share in sizes) < 1.3 * num_bytes


def test_the_files_beside_an_array_are_part_of_what_it_says(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.array([[1, 1], [2, 2]], np.float32))
    (tmp_path / "x.txt").write_text("the\nof\n")
    first = take_subset(tmp_path / "x.npy", ["the", "of"], cache=tmp_path / "cache")
    (tmp_path / "x.txt").write_text("of\nthe\n")
    other = take_subset(tmp_path / "x.npy", ["the", "of"], cache=tmp_path / "cache")
    assert (first.rows.tolist(), other.rows.tolist()) == ([[1, 1], [2, 2]], [[2, 2], [1, 1]])


def test_what_there_is_of_a_binary_file_that_is_cut_off_is_taken(tmp_path: Path):
    rows = np.array([[1, 2], [3, 4], [5, 6]], "<f4")
    raw = b"3 2\n" + b"".join(word + b" " + row.tobytes() for word, row in zip((b"a", b"b", b"c"), rows, strict=True))
    (tmp_path / "x.bin").write_bytes(raw[:-3])
    found = take_subset(tmp_path / "x.bin", ["b", "c"], missing="zeros", cache=tmp_path / "cache")
    assert found.rows.tolist() == [[3, 4], [0, 0]]
    assert [fault.kind for fault in found.facts.faults] == ["cut off"]
