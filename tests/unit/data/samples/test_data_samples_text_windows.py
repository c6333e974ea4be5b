"""Texts cut into spans: by hand, compared with a plain loop, in constant memory."""

import itertools
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.data.samples import text_windows as module
from plimsoll.data.samples.text_windows import Spans, cut_texts, open_spans, select_spans
from plimsoll.data.tokens.store import TokenStore
from plimsoll.errors import DataError
from plimsoll.files.store import stored
from token_stores import store_of, store_of_lengths


def contents(spans: Spans) -> list[list[int]]:
    places = zip(*spans.places(np.arange(len(spans))), strict=True)
    return [spans.store.tokens[start : start + length].tolist() for start, length in places]


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return store_of(tmp_path, [[1, 2, 3, 4, 5], [6], [], [7, 8]])


def test_long_texts_become_windows_that_know_their_text(store: TokenStore):
    spans = cut_texts(store, 2)
    assert contents(spans) == [[1, 2], [3, 4], [5], [6], [0], [7, 8]]  # the empty text consists of its end token
    ids = np.arange(6)
    assert spans.parents(ids).tolist() == [0, 0, 0, 1, 2, 3]
    assert spans.num_of_parents(np.arange(4)).tolist() == [3, 1, 1, 1]
    assert spans.num_repeated(ids).tolist() == [0] * 6
    assert (spans.num_long_texts, spans.num_truncated, spans.num_dropped_tokens, spans.num_tokens) == (1, 0, 0, 9)
    assert not spans.are_texts


def test_windows_may_overlap(store: TokenStore):
    spans = cut_texts(store, 3, stride=1)
    assert contents(spans) == [[1, 2, 3], [2, 3, 4], [3, 4, 5], [6], [0], [7, 8]]
    assert spans.num_repeated(np.arange(6)).tolist() == [0, 2, 2, 0, 0, 0]


def test_the_end_token_may_belong_to_its_text(store: TokenStore):
    assert contents(cut_texts(store, 3, with_end=True)) == [[1, 2, 3], [4, 5, 0], [6, 0], [0], [7, 8, 0]]


def test_truncation_is_counted_and_needs_no_table(store: TokenStore):
    spans = cut_texts(store, 2, long_texts="truncate")
    assert contents(spans) == [[1, 2], [6], [0], [7, 8]]
    assert (spans.num_truncated, spans.num_dropped_tokens, spans.num_tokens) == (1, 3, 6)
    assert spans.are_texts
    assert [path.name for path in spans.folder.iterdir()] == ["manifest.json"]
    assert spans.num_of_parents(np.arange(4)).tolist() == [1] * 4
    assert spans.num_repeated(np.arange(4)).tolist() == [0] * 4


def test_texts_that_fit_need_no_table(store: TokenStore):
    spans = cut_texts(store, 5, long_texts="stop")
    assert contents(spans) == [[1, 2, 3, 4, 5], [6], [0], [7, 8]]
    assert spans.are_texts
    assert spans.parents(np.array([2])).tolist() == [2]


def test_a_text_that_is_too_long_stops_if_asked(store: TokenStore):
    with pytest.raises(
        DataError,
        match=r"1 of 4 texts are longer than sequence_length = 4, the longest 5 tokens: set sequence_length=5, or use "
        "`window` or `truncate`",
    ):
        cut_texts(store, 4, long_texts="stop")
    assert not list(store.folder.parent.glob("spans-*[0-9a-f]"))


def test_a_stride_that_is_not_used_is_refused(store: TokenStore):
    with pytest.raises(DataError, match=r"stride = 2 works only with long_texts = window: leave stride out"):
        cut_texts(store, 4, long_texts="truncate", stride=2)
    with pytest.raises(DataError, match=r"stride = 5 would lose tokens"):
        cut_texts(store, 4, stride=5)


def test_spans_are_cut_once(store: TokenStore, monkeypatch: pytest.MonkeyPatch):
    first = cut_texts(store, 2)
    monkeypatch.setattr(module, "_written", None)
    assert contents(cut_texts(store, 2)) == contents(first)
    again = pickle.loads(pickle.dumps(first))
    assert len(pickle.dumps(first)) < 1000
    assert contents(again) == contents(first)


def test_spans_that_are_gone_are_named(store: TokenStore):
    spans = cut_texts(store, 2)
    (spans.folder / "starts.bin").unlink()
    with pytest.raises(DataError, match=r"the spans .* are missing from the cache, or damaged: prepare them again"):
        open_spans(store, spans.folder)


def test_progress_is_in_tokens(store: TokenStore):
    told: list[tuple[str, int, int]] = []
    cut_texts(store, 2, progress=lambda *step: told.append(step))
    assert told == [("spans", 11, 12)]  # the end token after the last text belongs to no span


def windows_of(lengths: list[int], most: int, stride: int, with_end: bool) -> list[tuple[int, int, int]]:
    """Return (text, start, length) of each window, by plain loops."""
    windows, begin = [], 0
    for text, length in enumerate(lengths):
        num = max(length + with_end, 1)
        start = 0
        while True:
            windows.append((text, begin + start, min(most, num - start)))
            if start + most >= num:
                break
            start += stride
        begin += length + 1
    return windows


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    most=st.integers(1, 15),
    with_end=st.booleans(),
    items_per_pass=st.integers(1, 9),
    data=st.data(),
)
def test_any_texts_are_cut_as_by_a_plain_loop(lengths, most, with_end, items_per_pass, data):
    stride = data.draw(st.integers(1, most))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ITEMS_PER_PASS", items_per_pass)
        spans = cut_texts(store_of_lengths(Path(folder), lengths), most, stride=stride, with_end=with_end)
        ids = np.arange(len(spans))
        cut = list(zip(spans.parents(ids).tolist(), *(part.tolist() for part in spans.places(ids)), strict=True))
        repeated = spans.num_repeated(ids).tolist()
        nums = spans.num_of_parents(np.arange(len(lengths))).tolist()
    expected = windows_of(lengths, most, stride, with_end)
    assert cut == expected
    assert spans.num_tokens == sum(length for _, _, length in expected)
    assert nums == [len(list(group)) for _, group in itertools.groupby(expected, lambda window: window[0])]
    for number, (text, start, _) in enumerate(expected):
        before = expected[number - 1]
        is_same = number > 0 and before[0] == text
        assert repeated[number] == (before[1] + before[2] - start if is_same else 0)


CUT_WITHIN_A_LIMIT = """
import resource, sys
from pathlib import Path
from plimsoll.data.samples.packing import pack
from plimsoll.data.samples.text_windows import cut_texts
from plimsoll.data.tokens.store import open_tokens

store = open_tokens(Path(sys.argv[1]))
status = Path("/proc/self/status").read_text()
used_bytes = 1024 * int(next(line for line in status.splitlines() if line.startswith("VmData")).split()[1])
resource.setrlimit(resource.RLIMIT_DATA, (used_bytes + (96 << 20),) * 2)
for kind in (None, "sentence"):
    spans = cut_texts(store, 16, borders=kind)
    print(len(spans), len(pack(spans)))
"""


@pytest.mark.long
def test_memory_does_not_depend_on_the_texts(tmp_path: Path):
    tokens = np.ones(20_000_000, np.uint16)  # one text, whose windows would need 160 MiB as two lists of numbers
    tokens[9::10] = 2
    tokens[-1] = 0

    def write(place: Path) -> dict[str, object]:
        tokens.tofile(place / "tokens.bin")
        np.concatenate(([0], tokens[:-1] == 2)).astype(np.uint8).tofile(place / "marks.bin")
        np.array([len(tokens) - 1]).tofile(place / "ends.bin")
        return {"dtype": "uint16", "has_marks": True}

    stored(tmp_path / "tokens", write)
    command = [sys.executable, "-c", CUT_WITHIN_A_LIMIT, str(tmp_path / "tokens")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1250000", "1250000", "2000000", "2000000"]


def test_chosen_texts_keep_all_their_windows(store: TokenStore):
    spans = cut_texts(store, 3, stride=2)
    chosen = select_spans(spans, "even", lambda texts: texts % 2 == 0)
    assert contents(chosen) == [[1, 2, 3], [3, 4, 5], [0]]
    assert chosen.parents(np.arange(3)).tolist() == [0, 0, 2]
    assert chosen.num_repeated(np.arange(3)).tolist() == [0, 1, 0]
    assert chosen.num_of_parents(np.array([0, 2])).tolist() == [2, 1]
    assert chosen.num_tokens == 7
