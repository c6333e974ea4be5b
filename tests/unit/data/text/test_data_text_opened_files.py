"""At most 64 files are open, and all are closed with the corpus."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from corpora import opened, written


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_few_of_many_files_are_open_at_once(tmp_path: Path):
    for number in range(150):
        written(tmp_path / "texts" / f"{number:03d}.txt", f"text {number}")
    corpus = opened(tmp_path / "texts")
    before = num_open()
    for _ in range(3):
        ids = np.random.default_rng(0).permutation(150)
        assert corpus.texts(ids) == [f"text {number}" for number in ids]
    assert num_open() - before == 64
    del corpus
    gc.collect()
    assert num_open() < before  # the memory map of the index is closed too


PROGRAM = """
import os, sys
from pathlib import Path
from plimsoll.data.formats import Reading
from plimsoll.data.text.index import open_corpus
corpus = open_corpus([sys.argv[1]], Reading(), Path(sys.argv[2]))
print(corpus[0])
os.kept = corpus  # to the very end, when what it was made of is gone
"""


def test_a_program_that_ends_with_files_open_says_nothing_of_it(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "a.txt"), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("text\n", "")
