"""The positions of stream slots and the reach of gradients: numbers by hand, and all small streams by counting."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.data.samples.stream_slots import (
    StreamSlots,
    first_tokens,
    slots_of_stream,
    training_slots,
    truncated_reach,
)
from plimsoll.errors import DataError, InputError
from plimsoll.records.run import GradientReach


def windows_of(slots: StreamSlots) -> list[tuple[int, int]]:
    """Return the first and the last token of each sample."""
    starts, lengths = slots.places(np.arange(slots.num_samples))
    return list(zip(starts.tolist(), (starts + lengths - 1).tolist(), strict=True))


def test_two_stream_slots_of_eleven_tokens():
    """Two stream slots of 11 tokens predict 5 tokens each.

    Windows of 4 tokens predict 3 tokens, then 2.
    """
    slots = StreamSlots(100, 11, 2, 4)
    assert (slots.slot_tokens, slots.num_windows, slots.num_samples, slots.num_dropped_tokens) == (5, 2, 4, 0)
    assert windows_of(slots) == [(100, 103), (105, 108), (103, 105), (108, 110)]


@given(num_tokens=st.integers(2, 80), num_slots=st.integers(1, 9), length=st.integers(2, 9), begin=st.integers(0, 5))
def test_each_token_but_the_first_is_predicted_once_and_few_are_left_over(
    num_tokens: int, num_slots: int, length: int, begin: int
):
    if num_tokens <= num_slots:
        with pytest.raises(DataError, match=f"a stream of {num_tokens} tokens is too short for batch_size = "):
            StreamSlots(begin, num_tokens, num_slots, length)
        return
    slots = StreamSlots(begin, num_tokens, num_slots, length)
    windows = windows_of(slots)
    predicted = sorted(place for first, last in windows for place in range(first + 1, last + 1))
    assert predicted == list(range(begin + 1, begin + num_tokens - slots.num_dropped_tokens))
    assert 0 <= slots.num_dropped_tokens < num_slots
    assert all(1 <= last - first <= length - 1 for first, last in windows)
    for earlier, later in zip(windows, windows[num_slots:], strict=False):
        assert earlier[1] == later[0]
    for step in range(slots.num_windows):
        batch = windows[step * num_slots : (step + 1) * num_slots]
        assert len({last - first for first, last in batch}) == 1


@given(
    num_tokens=st.integers(2, 60),
    num_slots=st.integers(1, 5),
    length=st.integers(2, 9),
    ends=st.sets(st.integers(0, 70), max_size=12),
    with_texts=st.booleans(),
    segment_steps=st.one_of(st.none(), st.integers(1, 12)),
)
def test_the_reach_is_what_counting_gives(
    num_tokens: int, num_slots: int, length: int, ends: set[int], with_texts: bool, segment_steps: int | None
):
    if num_tokens <= num_slots:
        return
    slots = StreamSlots(3, num_tokens, num_slots, length)
    text_ends = np.array(sorted(ends), np.int64)
    reaches = []
    for first, last in windows_of(slots):
        reach = 0
        for place in range(first, last):  # each token that is read predicts the next
            is_cut = segment_steps is not None and (place - first) % segment_steps == 0
            reach = 1 if is_cut or (with_texts and place - 1 in ends) else reach + 1
            reaches.append(reach)
    found = slots.reach(text_ends if with_texts else None, segment_steps)
    assert found.most_tokens == max(reaches)
    assert found.mean_tokens == pytest.approx(np.mean(reaches))


def test_the_mean_reach_of_full_windows_is_half_of_them():
    reach = StreamSlots(0, 10 * 4 * 9 + 1, 4, 10).reach()
    assert (reach.most_tokens, reach.mean_tokens) == (9, 5.0)


def test_a_share_is_held_out_from_the_end_and_both_are_in_one_piece():
    train, held_out = slots_of_stream(1000, 0.1, 4, 10)
    assert (train.begin, train.num_tokens) == (0, 900)
    assert held_out is not None
    assert (held_out.begin, held_out.num_tokens) == (900, 100)
    assert slots_of_stream(1000, 0.0, 4, 10)[1] is None


def test_too_little_text_is_refused_in_numbers():
    assert training_slots(37, 4, 10).num_windows == 1
    few = r"has 36 tokens, but batch_size = 4 stream slots with one window of sequence_length = 10 each need 37: .*=3$"
    with pytest.raises(DataError, match=few):
        training_slots(36, 4, 10)
    with pytest.raises(
        DataError, match=r"a stream of 4 tokens is too short for batch_size = 4 stream slots.*larger share"
    ):
        slots_of_stream(400, 0.01, 4, 10)


def test_the_first_tokens_of_texts_are_found():
    """The first tokens of texts are marked.

    Texts end at 2, 5 and 6, so they begin at 3, 6 and 7. The first text begins at 0, which is not marked.
    """
    ends = np.array([2, 5, 6])
    found = first_tokens(ends, np.array([0, 3, 6, 8]), 4)
    assert found.tolist() == [
        [False, False, False, True],
        [True, False, False, True],
        [True, True, False, False],
        [False, False, False, False],
    ]


def test_truncated_segments_reach_back_to_their_begin():
    """Gradients reach back to the beginning of a segment.

    For tokens 0 to 6 in segments of 3, the reach is 1, 2, 3, 1, 2, 3, 1 tokens.
    """
    assert truncated_reach(7, 3) == GradientReach(most_tokens=3, mean_tokens=13 / 7)
    assert truncated_reach(7, 99) == GradientReach(most_tokens=7, mean_tokens=4.0)


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ((-5, 100, 4, 36), "begin = -5: give at least 0"),
        ((0, 100, 0, 36), "num_slots = 0: give at least 1"),
        ((0, 100, 4, 1), "sequence_length = 1: give at least 2"),
    ],
)
def test_numbers_that_are_none_are_refused(numbers, reason):
    with pytest.raises(InputError, match=reason):
        StreamSlots(*numbers)


def test_a_smaller_batch_is_suggested_only_if_it_works():
    with pytest.raises(DataError, match=r"a shorter sequence_length \(at most 31 with one stream slot\)$"):
        training_slots(31, 4, 100)
    with pytest.raises(DataError, match=r"batch_size=3$"):
        training_slots(31, 4, 11)
