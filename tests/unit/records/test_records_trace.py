"""A trace is read back unchanged, and each event reports the bytes that it adds or frees."""

import pytest
from pydantic import ValidationError

from hand_traces import trace_of
from plimsoll.errors import RecordError
from plimsoll.records.trace import CATEGORIES, Assumption, StorageTable, Trace

TRACE = trace_of(
    ("setup", 0, "+w parameters 100 +b@host inputs 7"),
    ("forward", 1, "+h activations 30"),
    ("backward", 1, "+g gradients 100 -h -b@host"),
    assumptions=(Assumption(text="a mask keeps every élément", low_bytes=-12),),
)


def test_it_is_read_back_as_it_was_written():
    assert Trace.from_json(TRACE.to_json()) == TRACE
    assert Trace.from_json(trace_of().to_json()) == trace_of()


def test_it_is_read_back_from_a_file(tmp_path):
    TRACE.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == TRACE


def test_deltas_are_of_one_place_in_order():
    assert list(TRACE.deltas()) == [(0, 0, 100), (2, 2, 30), (3, 3, 100), (4, 2, -30)]
    assert list(TRACE.deltas(on_host=True)) == [(1, 1, 7), (5, 1, -7)]
    assert list(trace_of().deltas()) == []


def test_what_lives_at_the_end_adds_up_to_the_sum_of_the_deltas():
    assert sum(num_bytes for _, _, num_bytes in TRACE.deltas()) == 200  # the weight and its gradient
    assert sum(num_bytes for _, _, num_bytes in TRACE.deltas(on_host=True)) == 0


def test_a_storage_of_an_unknown_category_is_refused():
    with pytest.raises(ValidationError):
        StorageTable(
            num_bytes=(1,), category=("weights",), born=(0,), died=(0,), shape=(0,), name=(0,), on_host=(False,)
        )
    text = TRACE.to_json().replace('"parameters"', '"weights"')
    with pytest.raises(RecordError, match=r"storages\.category\.0"):
        Trace.from_json(text)


def test_another_record_is_not_a_trace():
    with pytest.raises(RecordError, match="'prediction', but 'trace' is needed"):
        Trace.from_json(TRACE.to_json().replace('"record": "trace"', '"record": "prediction"'))


def test_the_categories_are_each_said_once():
    assert len(CATEGORIES) == len(set(CATEGORIES)) == 11
