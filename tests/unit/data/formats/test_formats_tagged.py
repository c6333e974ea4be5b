"""The store of tagged words: words are read back, and their tags if requested."""

import numpy as np
import pytest

from plimsoll.data.formats import Layout, Reading
from plimsoll.data.formats.tagged import KEPT, decode, decode_run, look, stored_text, words_and_tags

WORDS, TAGS = ["Ada", "slept", "", "New York"], ["B-PER", "O", "O", "B-LOC"]


def test_words_and_tags_come_back():
    assert words_and_tags(stored_text(WORDS, TAGS)) == (WORDS, TAGS)


def test_as_a_text_words_stand_behind_each_other():
    raws = [stored_text(WORDS, TAGS).encode(), "é\tO".encode()]
    layout, begin = look("texts.packed", Reading(is_tagged=True))
    assert (layout, begin) == (Layout("tagged"), 0)
    assert decode(raws, layout) == ["Ada slept  New York", "é"]
    assert decode_run(b"".join(raws), np.array([0, len(raws[0]), sum(map(len, raws))]), layout) == decode(raws, layout)
    assert decode(raws, layout._replace(label=KEPT)) == [raw.decode() for raw in raws]


def test_what_is_no_such_text_is_found():
    with pytest.raises(ValueError, match="not found"):
        decode([b"no tag"], Layout("tagged"))
