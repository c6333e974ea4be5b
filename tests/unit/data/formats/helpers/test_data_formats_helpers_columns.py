"""The choice of the text columns, and the number of columns that a message shows."""

import pytest

from plimsoll.data.formats import Reading
from plimsoll.data.formats.helpers.columns import listed, text_columns
from plimsoll.errors import DataError


def test_the_columns_of_the_text():
    assert text_columns(Reading(), ["a", "text"], ["a", "text"]) == ("text",)
    assert text_columns(Reading(), ["a", "b"], ["b"]) == ("b",)
    assert text_columns(Reading(label="b"), ["a", "b"], ["a", "b"]) == ("a",)
    assert text_columns(Reading(text=("b", "a")), ["a", "b"], []) == ("b", "a")
    with pytest.raises(
        DataError, match="none of its columns 'a', 'b' is called text, and none of them could be the text"
    ):
        text_columns(Reading(), ["a", "b"], [])
    with pytest.raises(DataError, match="there is no column 'lable': did you mean 'label'"):
        text_columns(Reading(label="lable"), ["text", "label"], ["text"])


def test_not_all_of_many_columns_are_shown():
    assert listed([str(number) for number in range(22)]).endswith("'19' and 2 more")
