"""Fixed-size records with a word each: parsed together as one by one; wanted words; numbers that are not finite."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.embeddings.formats import Fault, Rows, rows_of
from plimsoll.embeddings.formats.helpers.blocks import Records, as_set, block_of, cut_off


def one_by_one(raw: bytes, tail_bytes: int) -> tuple[list[bytes], list[int]]:
    words, ends, begin = [], [], 0
    while (stop := raw.find(b" ", begin)) >= 0 and stop + 1 + tail_bytes <= len(raw):
        words.append(raw[begin:stop])
        begin = stop + 1 + tail_bytes
        ends.append(begin)
    return words, ends


@given(st.lists(st.sampled_from([b" ", b"a", b"\n", b"\0", b"\xff"]), max_size=40).map(b"".join), st.integers(1, 9))
def test_records_are_those_found_one_by_one(raw: bytes, tail_bytes: int):
    words, ends = Records(b" ", tail_bytes).split(raw)
    assert (words, ends.tolist()) == one_by_one(raw, tail_bytes)


def test_a_long_rest_takes_no_time():
    for raw in (b"x" * 3_000_000, b" " + b"x" * 3_000_000):
        assert Records(b" ", 4_000_000).split(raw)[0] == []


def test_a_block_has_the_wanted_words_and_the_faults_of_all():
    words = [b"a", b"\xff", b"b", b"a"]
    asked = []

    def rows_at(places):
        asked.append(places.tolist())
        return Rows(np.zeros((len(places), 1), np.float32))

    for wanted, kept, places in (
        (None, [b"a", b"b", b"a"], [0, 2, 3]),
        ({b"a"}, [b"a", b"a"], [0, 3]),
        (set(), [], []),
    ):
        block = block_of(words, wanted, rows_at)
        assert (block.words, block.places.tolist(), block.num_words) == (kept, places, 4)
        assert block.faults == (Fault("utf-8", 1, r"b'\xff'"),)
    block_of(words, {b"a"}, rows_at).rows(np.array([1, 0]))
    assert asked == [[3, 0]]


def test_two_words_are_not_one_letter():
    assert [fault.at for fault in block_of([b"\xc3", b"\xa9"], None, rows_of).faults] == [0, 1]


def test_faults_of_numbers_are_the_first_of_each_row():
    matrix = np.array([[1, np.nan, np.inf], [1, 2, 3], [-np.inf, 0, 0], [3e38, 3e38, 3e38]], np.float32)
    rows = rows_of(matrix)
    assert rows.matrix is matrix
    assert rows.faults == (
        Fault("finite", 0, "number 2 of 3 is nan"),
        Fault("finite", 2, "number 1 of 3 is -inf"),
    )
    assert rows_of(matrix[3:]).faults == ()


def test_a_block_that_says_that_the_file_ends():
    block = cut_off(0, "1 of 2 words")
    assert (block.words, block.num_words, block.faults) == ([], 0, (Fault("truncated", 0, "1 of 2 words"),))
    assert block.rows(np.empty(0, np.int64)).faults == ()


def test_what_is_wanted_is_looked_up_quickly():
    assert as_set(None) is None
    assert as_set([b"a"]) == {b"a"}
    wanted = {b"a": 1}
    assert as_set(wanted) is wanted
