"""Pickles as plain data and as descriptions. A hostile pickle runs, imports and allocates nothing."""

import io
import itertools
import os
import pickle
import struct
import subprocess
import time
import tracemalloc
from collections import OrderedDict
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.files.pickles import BrokenPickle, Sealed, Span, Thing, described, load_plain
from processes import run_program


class Leave:
    def of_dict(self, container):
        return container

    def of_list(self, container):
        return container


def load(content, sealing=None):
    return load_plain(io.BytesIO(content), sealing or Leave())


PLAIN = {
    "numbers": [0, 1, 255, 256, 65535, 65536, -1, -(2**31), 2**31, 2**63, 2**64 - 1, -(2**63)],
    "others": [None, True, False, 1.5, b"bytes", b"b" * 300, "short", "ü", "long" * 1000, "x" * 70000],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "empty": [{}, []],
    "many": list(range(5000)),
    "large": {str(number): [number] for number in range(2500)},
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_comes_back(protocol):
    # Before protocol 3, pickle writes bytes as a call.
    plain = PLAIN if protocol > 2 else PLAIN | {"others": ["text", 1.5, None, True]}
    assert load(pickle.dumps(plain, protocol)) == plain


def test_what_is_shared_stays_so():
    shared = ["x"]
    first, second = load(pickle.dumps([shared, shared]))
    assert first is second


@pytest.mark.parametrize("num_bytes", [1, 7, 63, 64, 65, 1000])
def test_short_reads_are_put_together(num_bytes, monkeypatch):
    monkeypatch.setattr("plimsoll.files.pickles._CHUNK_BYTES", num_bytes)
    assert load(pickle.dumps(PLAIN, 4)) == PLAIN


def test_containers_without_items_as_torch_writes_them_in_cpp():
    assert load(b"\x80\x02}(X\x01\x00\x00\x00a](eX\x01\x00\x00\x00b}(uu.") == {"a": [], "b": {}}


class Runs:
    """A value that runs a call, such as ``touch``, when it is unpickled."""

    def __init__(self, *how):
        self.how = how

    def __reduce__(self):
        return self.how


def marked(path):
    """Return pickles that run ``touch path`` or another forbidden call, by the opcode they use."""
    command = f"touch {path}"
    text = command.encode()
    name = b"\x8c" + bytes([len(text)]) + text
    return {
        "REDUCE": pickle.dumps(Runs(os.system, (command,)), 4),
        "REDUCE of protocol 2": pickle.dumps(Runs(os.system, (command,)), 2),
        "GLOBAL": b"\x80\x02cos\nsystem\n" + name + b"\x85R.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + name + b"\x85R.",
        "INST": b"\x80\x02(" + name + b"ios\nsystem\n.",
        "OBJ": b"\x80\x02(cos\nsystem\n" + name + b"o.",
        "NEWOBJ": b"\x80\x02csubprocess\nPopen\n" + name + b"\x85\x81.",
        "NEWOBJ_EX": b"\x80\x04csubprocess\nPopen\n" + name + b"\x85}\x92.",
        "BUILD": b"\x80\x02}}b.",
        "BUILD of a class": b"\x80\x02cos\n_wrap_close\n)\x81}X\x01\x00\x00\x00xK\x01sb.",
        "EXT1": b"\x80\x02\x82\x01.",
        "EXT2": b"\x80\x02\x83\x01\x00.",
        "EXT4": b"\x80\x02\x84\x01\x00\x00\x00.",
        "PERSID": b"\x80\x02Pos.system\n.",
        "BINPERSID": b"\x80\x02" + name + b"Q.",
        "NEXT_BUFFER": b"\x80\x05\x97.",
        "BYTEARRAY8": b"\x80\x05\x96" + struct.pack("<Q", 1) + b"x.",
        "an iterator": pickle.dumps(itertools.count(), 4),
        "a set": pickle.dumps({1}, 4),
        "in a snapshot": pickle.dumps({"segments": [{"frames": Runs(subprocess.getoutput, (command,))}]}, 4),
    }


@pytest.mark.parametrize("way", marked("x"))
def test_nothing_of_a_hostile_pickle_is_run(tmp_path, way):
    path = tmp_path / "ran"
    with pytest.raises(BrokenPickle, match="has the operation .* may run code"):
        load(marked(path)[way])
    assert not path.exists()


def test_the_payloads_are_live(tmp_path):
    """The payloads refused above run if `pickle` loads them."""
    path = tmp_path / "ran"
    for way in ("REDUCE", "GLOBAL", "STACK_GLOBAL", "INST", "OBJ"):
        pickle.loads(marked(path)[way])
        path.unlink()


DAMAGED = {
    "empty": b"",
    "only its version": b"\x80\x04",
    "torn": pickle.dumps(PLAIN, 4)[:-20],
    "an end with nothing": b"\x80\x04.",
    "an end with two things": b"\x80\x04NN.",
    "a mark that is open": b"\x80\x04(N.",
    "a mark that is missing": b"\x80\x04]e.",
    "an item without its list": b"\x80\x04N(Ne.",
    "items without their dict": b"\x80\x04N(X\x01\x00\x00\x00aNu.",
    "a key without its item": b"\x80\x04}(X\x01\x00\x00\x00au.",
    "a key that is a tuple": b"\x80\x04}(N\x85Nu.",
    "an item and nothing": b"\x80\x04a.",
    "a pair of nothing": b"\x80\x04s.",
    "a tuple of too few": b"\x80\x04N\x87.",
    "a name that was not given": b"\x80\x04h\x05.",
    "a long name that was not given": b"\x80\x04j\xff\xff\xff\x7f.",
    "a place far off": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "a place of nothing": b"\x80\x04\x94.",
    "a text that is not there": b"\x80\x04X\x00\x00\x10\x00abc.",
    "half a number": b"\x80\x04J\x01",
    "half a float": b"\x80\x04G\x01",
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_pickle_is_refused(what):
    with pytest.raises(BrokenPickle, match="is torn or damaged"):
        load(DAMAGED[what])


@pytest.mark.parametrize("head", [b"X\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8, b"\x8e" + struct.pack("<Q", 1 << 62)])
def test_a_length_that_cannot_be_is_refused_before_it_is_allocated(head):
    with pytest.raises(BrokenPickle, match="declares a string of"):
        load(b"\x80\x04" + head + b"x")


@pytest.mark.parametrize("head", [b"\x8b" + b"\xff\xff\xff\x7f", b"\x8a\xff"])
def test_a_number_of_many_bytes_is_refused(head):
    with pytest.raises(BrokenPickle, match="LONG"):
        load(b"\x80\x04" + head + b"\x01" * 300)


def test_text_protocols_are_refused():
    with pytest.raises(BrokenPickle):
        load(pickle.dumps({"a": 1}, 0))


# Time and memory for deep nesting and shared parts are proportional to the file, and a cycle ends. This runs in a
# subprocess because a crash is a possible failure.
BOMBS = """
import io, resource, sys
from plimsoll.diagnose.snapshot.read import snapshot_of
from plimsoll.errors import InputError
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
levels = 200
laughs = b"]q\\x00" + b"".join(
    b"](h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(levels)
)
bombs = [
    b"\\x80\\x02" + laughs + b"(" + b"t" + b".",
    b"\\x80\\x02" + b"N" + b"\\x85" * 200_000 + b".",
    b"\\x80\\x02" + b"(" * 200_000 + b".",
    b"\\x80\\x02" + b"](" * 100_000 + b"e" * 100_000 + b".",
    b"\\x80\\x02]q\\x00h\\x00a.",
    b"\\x80\\x02}X\\x08\\x00\\x00\\x00segments" + b"]q\\x00(" + b"h\\x00" * 100_000 + b"es.",
    b"\\x80\\x04}X\\x08\\x00\\x00\\x00segments" + b"](" + b"K\\x00" * 200_000 + b"es.",
]
for bomb in bombs:
    try:
        snapshot_of(io.BytesIO(bomb), "a.pickle")
    except InputError as error:
        print(str(error)[:60])
    else:
        sys.exit("a bomb was taken for a snapshot")
"""


def test_bombs_are_refused_in_little_memory_and_time():
    done = run_program(BOMBS)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 7


class Seal(Sealed):
    __slots__ = ()


class Seals(Leave):
    def __init__(self):
        self.seal = Seal()

    def of_dict(self, container):
        return self.seal if "x" in container else container


def test_what_is_sealed_is_so_wherever_it_is_used_again():
    sealing = Seals()
    shared = {"x": 1}
    for protocol in (2, 4):
        found = load(pickle.dumps([shared, {"in": shared}, shared], protocol), sealing)
        assert found == [sealing.seal, {"in": sealing.seal}, sealing.seal]


def test_what_is_put_into_a_seal_is_left_out():
    # A pickler writes items in groups of a thousand: the second group meets the seal.
    assert load(pickle.dumps({"x": 1} | {str(number): 0 for number in range(1500)}), Seals()).__class__ is Seal


# -- descriptions ------------------------------------------------------------------------------------------------------


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple),
    max_leaves=20,
)


def as_bytes(value):
    if isinstance(value, str):
        return value.encode()
    return type(value)(map(as_bytes, value)) if isinstance(value, (list, tuple)) else value


def look(raw: bytes, keys=()):
    return described(raw, frozenset(keys))


@given(VALUES, st.integers(3, 5))
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
def test_what_is_no_pickle_has_no_description(raw: bytes):
    with pytest.raises(BrokenPickle, match="is torn|has the operation|uses protocol"):
        look(raw)


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(raw: bytes):
    with suppress(BrokenPickle):
        look(b"\x80\x04" + raw)


def test_claims_cost_no_memory():
    claims = [
        # the last of 4 billion memo entries, for which Python's unpickler would take 64 GiB
        b"\x80\x02Nr\xff\xff\xff\xff.",
        b"\x80\x04B\xff\xff\xff\xff.",
        b"\x80\x04\x8d\xff\xff\xff\xff\x00\x00\x00\x00.",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
    ]
    tracemalloc.start()
    for raw in claims:
        with suppress(BrokenPickle):
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
