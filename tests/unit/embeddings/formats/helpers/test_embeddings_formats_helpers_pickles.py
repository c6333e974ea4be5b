"""Pickles as descriptions: against Python's own on what they hold, and on bytes that are none."""

import pickle
import time
import tracemalloc
from collections import OrderedDict
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.embeddings.formats.helpers.pickles import Span, Thing, described
from plimsoll.errors import EmbeddingError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple),
    max_leaves=20,
)


def as_bytes(value):
    if isinstance(value, str):
        return value.encode()
    return type(value)(map(as_bytes, value)) if isinstance(value, (list, tuple)) else value


def look(raw: bytes, keys=()):
    return described(raw, frozenset(keys), "a.kv")


@given(PLAIN, st.integers(3, 5))
def test_plain_values_are_what_python_reads(value, protocol: int):
    assert look(pickle.dumps(value, protocol)) == as_bytes(value)


def test_of_dictionaries_only_the_asked_keys_are_kept():
    value = {"a": 1, "b": {"a": [2], "c": 3}, 7: 8, None: 9}
    for protocol in range(2, 6):
        assert look(pickle.dumps(value, protocol), [b"a", b"b"]) == {b"a": 1, b"b": {b"a": [2]}}


def test_objects_are_their_names_and_what_is_said_of_them():
    thing = look(pickle.dumps(OrderedDict(a=1), 4), [b"a"])
    assert isinstance(thing, Thing)
    assert (thing.name, thing.args, thing.state) == (b"collections.OrderedDict", (), None)
    thing = look(pickle.dumps(range(3), 2))
    assert (thing.name, thing.args) == (b"__builtin__.xrange", (0, 3, 1))
    assert look(b"\x80\x02cos\nsystem\n(X\x01\x00\x00\x00atR.").name == b"os.system"


def test_large_bytes_stay_in_the_file():
    data = bytes(range(256)) * 1000
    raw = pickle.dumps([data, b"small"], 4)
    span, small = look(raw)
    assert isinstance(span, Span)
    assert raw[span.begin : span.end] == data
    assert small == b"small"


def test_things_that_are_used_twice_are_one():
    inner = ["a"]
    first, second = look(pickle.dumps([inner, inner], 4))
    assert first is second
    itself = []
    itself.append(itself)
    looked = look(pickle.dumps(itself, 4))
    assert looked[0] is looked


@pytest.mark.parametrize(
    "raw",
    [
        b"", b".", b"\x80", b"\x80\x00.", b"\x80\x06N.", b"\x80\x04", b"\x80\x04N", b"\x80\x04e.", b"\x80\x040.",
        b"\x80\x04(.", b"\x80\x04h\x07.", b"\x80\x04j\xff\xff\xff\xff.", b"\x80\x04X\xff\xff\xff\x7fabc.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", b"\x80\x04\x8b\xff\xff\xff\x7f\x01.", b"\x80\x04\x94.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff.", b"\x80\x04cos", b"\x80\x04cos\n", b"\x80\x04\x93.",
        b"\x80\x04NN\x93.", b"\x80\x04R.", b"\x80\x04NR.", b"\x80\x04b.", b"\x80\x04\x87.", b"\x80\x04}(NNNu.",
        b"\x80\x04Px\n.", b"\x80\x04NQ.", b"\x80\x04\x82\x01.", b"\x80\x04Ix\n.", b"\x80\x04\x97.", b"\x80\x04M\x01",
    ],
)  # fmt: skip
def test_what_is_no_pickle_is_an_error(raw: bytes):
    with pytest.raises(
        EmbeddingError, match=r"a.kv is no whole pickle .* \(.* after byte \d+ of \d+: .*\): download it"
    ):
        look(raw)


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(raw: bytes):
    with suppress(EmbeddingError):
        look(b"\x80\x04" + raw)


def test_claims_cost_no_memory():
    claims = [
        b"\x80\x02Nr\xff\xff\xff\xff.",  # the last of 4 thousand million places of the memo: 64 GiB in Python's own
        b"\x80\x04B\xff\xff\xff\xff.",
        b"\x80\x04\x8d\xff\xff\xff\xff\x00\x00\x00\x00.",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
    ]
    tracemalloc.start()
    for raw in claims:
        with suppress(EmbeddingError):
            look(raw)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_depth_costs_no_stack():
    depth = 300_000
    assert look(b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b".")
    assert look(b"\x80\x04)" + b"\x85" * depth + b".")
    assert look(b"\x80\x04cos\nsystem\n" + b")R" * depth + b".")


def seconds_of_a_vocabulary(num_words):
    words = [f"word{number}" for number in range(num_words)]
    raw = pickle.dumps({"index_to_key": words, "key_to_index": {word: row for row, word in enumerate(words)}}, 4)
    start = time.process_time()
    assert len(look(raw, [b"index_to_key"])[b"index_to_key"]) == num_words
    return time.process_time() - start


@pytest.mark.long
def test_the_time_grows_with_the_words_and_not_with_their_square():
    small = min(seconds_of_a_vocabulary(5_000) for _ in range(3))
    assert seconds_of_a_vocabulary(100_000) < 5 * 20 * small
