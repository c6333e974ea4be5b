"""The values that `augment:` of a job accepts."""

import pytest
from pydantic import ValidationError

from plimsoll.records.augmentation import DEFAULT_SYNONYM, Augmentation


def test_nothing_is_changed_by_default():
    assert not Augmentation().changes_tokens
    assert not Augmentation().changes_text


def test_it_says_what_is_changed():
    config = Augmentation(mask=0.1, delete=0.05, swap=0.05, synonyms="file.tsv", function="module:fn")
    assert config.changes_tokens
    assert config.changes_text
    assert config.synonym_share == DEFAULT_SYNONYM
    assert not Augmentation(synonyms="file.tsv", synonym=0.0).changes_text
    assert Augmentation.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"mask": 1.5}, "less than or equal to 1"),
        ({"delete": -0.1}, "greater than or equal to 0"),
        ({"swap_distance": 0}, "greater than or equal to 1"),
        ({"synonym": 0.2}, "synonym = 0.2 needs words: add `synonyms: table.tsv`"),
        ({"function": "module.fn"}, "write it as `module:function`"),
        ({"token_function": "a:b:c"}, "write it as `module:function`"),
        ({"insert": 0.1}, "Extra inputs are not permitted"),
    ],
)
def test_a_fault_is_said(fields: dict[str, object], fault: str):
    with pytest.raises(ValidationError, match=fault):
        Augmentation(**fields)
