"""Stretches of bytes as strings, against one slice after the other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.data.formats.helpers.strings import strings


@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=3))))
def test_stretches_are_what_slices_are(texts: list[tuple[str, str]]):
    lengths = np.array([[len(text.encode()), len(between.encode())] for text, between in texts], np.int64).reshape(
        -1, 2
    )
    borders = np.cumsum([0, *lengths.ravel()])
    raw = "".join(text + between for text, between in texts).encode()
    assert strings(raw, borders[:-1:2], borders[1::2]) == [text for text, _ in texts]


def test_what_is_not_utf_8_is_an_error():
    with pytest.raises(UnicodeDecodeError, match="0xe9"):
        strings(b"caf\xe9", np.array([0]), np.array([4]))
