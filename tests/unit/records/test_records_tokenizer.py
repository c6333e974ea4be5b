"""The tokenizers that a job may request."""

import pytest
from pydantic import ValidationError

from plimsoll.records.tokenizer import TokenizerSource


def test_a_given_tokenizer_keeps_what_it_puts_around_a_text_unless_the_job_says_otherwise():
    assert TokenizerSource(path="folder").special_tokens
    assert not TokenizerSource(path="folder", special_tokens=False).special_tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"special_tokens": False}, "a trained one adds no special tokens: leave it out, or give a path"),
        ({"vocab_size": 100}, "needs at least 257 tokens"),
        ({"path": "folder", "train": "words"}, "leave out one of them"),
        ({"min_count": 2}, "min_count needs train: words"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(fields: dict, message: str):
    with pytest.raises(ValidationError, match=message):
        TokenizerSource(**fields)
