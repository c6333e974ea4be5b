"""Choices of compression methods and their faults, checked without a model."""

from __future__ import annotations

import re

import pytest

from plimsoll.errors import WeightsError
from plimsoll.records.plan import Choice, Pin, parse_pin
from plimsoll.records.shrink import (
    METHODS,
    chain_of,
    count_fault,
    options_fault,
    options_of,
    share_fault,
    value_fault,
)

LAYERS = Choice(technique="layers", options={"keep": 1})


def test_what_is_given_takes_the_place_of_a_default():
    choice = Choice(technique="int4", options={"group": 64})
    assert options_of(choice) == {"group": 64, "compute": "bf16"}


def test_a_reason_names_the_option_also_where_it_is_the_only_one():
    assert Choice(technique="float8", options={"dynamic": True}).in_full == "float8(dynamic=true)"
    assert Choice(technique="int8").in_full == "int8"


def test_faults_say_what_can_be_given():
    assert value_fault((False, True), "dynamic", True) is None
    assert value_fault((False, True), "dynamic", 1) == "`dynamic` cannot be 1: give one of false, true"
    assert share_fault("share", 0.5) is None
    assert all(share_fault("share", wrong) for wrong in (0, 1, -1, True, "half"))
    assert count_fault("rank", 3) is None
    assert all(count_fault("rank", wrong) for wrong in (0, 2.5, True, "many"))


@pytest.mark.parametrize("method", METHODS)
def test_every_default_is_a_value_that_there_is(method):
    given = {name: value for name, value in METHODS[method].defaults.items() if value is not None}
    assert options_fault(Choice(technique=method, options=given)) is None


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ("heds=0.5", "there is no method `heds`; did you mean `heads`?"),
        ("layers(keeps=3)", "`layers` has no option `keeps` (3): it takes `keep`, `share`, `importance`"),
        ("int8=3", "`int8` has no option `value` (3): it takes no options"),
        ("heads=1.5", "--method 'heads(share=1.5)': `share` 1.5 is not a share to remove"),
        ("layers(keep=1,share=0.5)", "`layers` has keep 1 and share 0.5: give one of them"),
        ("low_rank(share=0.5,rank=3)", "`low_rank` has share 0.5 and rank 3: give one of them"),
        ("int4(group=5)", "`group` cannot be 5: give one of 32, 64, 128"),
        ("low_rank(aware=3)", "`aware` cannot be 3: give one of true, false"),
        ("int8 layers=1", "layers changes shapes, and int8 changes values, which must come last"),
        ("layers=1 int8 heads=0.5", "heads changes shapes, and int8 changes values, which must come last"),
    ],
)
def test_what_a_user_wrote_wrongly_is_refused(pins, said):
    with pytest.raises(WeightsError, match=re.escape(said)):
        chain_of([parse_pin(pin) for pin in pins.split()])


def test_a_value_is_of_the_first_option():
    pins = [Pin(technique="layers", value=1), parse_pin("heads(importance=taylor)")]
    assert chain_of(pins) == (LAYERS, Choice(technique="heads", options={"importance": "taylor"}))
    pins = [parse_pin(pin) for pin in ("layers=1", "int8", "int8_embeddings")]
    assert chain_of(pins) == (LAYERS, Choice(technique="int8"), Choice(technique="int8_embeddings"))
