"""The search for rows and placement, on a model whose needs are known as whole numbers.

A row needs 10 MiB and computes for 1 s, in addition to 100 MiB and 1 s per pass. The six blocks have 50 MiB each, the
output layer 30, the tables 20, and the rest, which is always resident, 5.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.planning.search.placement import (
    Evaluation,
    Guess,
    Placer,
    Reading,
    candidate_rows,
    rejected_of,
    spread_out,
)
from plimsoll.records.prediction import Estimate
from plimsoll.techniques.mechanisms.parts import ModelPart
from prediction_records import MIB

BLOCKS = [ModelPart(f"h.{number}", "block", None, (), 50 * MIB) for number in range(6)]
PARTS = (
    *BLOCKS,
    ModelPart("output layer", "output", None, (), 30 * MIB),
    ModelPart("embeddings", "tables", None, (), 20 * MIB),
    ModelPart("the rest", "rest", None, (), 5 * MIB),
)
ALL_BYTES = sum(part.num_bytes for part in PARTS)
STREAMED_BYTES = 330 * MIB


def evaluate(rows: int, resident: frozenset[str]) -> Evaluation:
    weights_bytes = sum(part.num_bytes for part in PARTS if part.name in resident)
    need_bytes = (100 + 10 * rows) * MIB + weights_bytes
    peak = Estimate(likely_bytes=need_bytes, low_bytes=need_bytes, high_bytes=need_bytes, traced_bytes=need_bytes)
    return Evaluation(peak, True, (1.0 + rows,), 0.0)


def placer(limit_mib: int, **changes) -> Placer:
    reading = Reading(files_bytes_per_second=10.0 * MIB, free_bytes=changes.pop("free_mib", 10_000) * MIB)
    fields = {"most_rows": 256, "num_passes": 1, "reading": reading, "evaluate": evaluate} | changes
    return Placer(PARTS, frozenset({"the rest"}), limit_mib * MIB, **fields)


def planned(limit_mib: int, **changes) -> Guess | None:
    found = placer(limit_mib, **changes)
    return found.best(found.guesses())


def test_rows_are_powers_of_two_and_what_is_midway():
    assert candidate_rows(1) == (1,)
    assert candidate_rows(10) == (1, 2, 3, 4, 6, 8, 10)
    assert candidate_rows(256)[-3:] == (128, 192, 256)


@given(st.integers(1, 40), st.data())
def test_what_is_picked_is_spread_evenly(count, data):
    num_kept = data.draw(st.integers(0, count))
    picked = spread_out(range(count), num_kept)
    assert len(picked) == num_kept
    gaps = [after - before for before, after in pairwise(picked)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_with_room_for_all_nothing_is_streamed():
    guess = planned(100_000)
    assert guess.resident == frozenset(part.name for part in PARTS)
    assert (guess.read_bytes, guess.read_seconds) == (0, 0.0)


def test_what_the_page_cache_keeps_is_not_read_again():
    guess = planned(300, free_mib=10_000)
    assert guess.resident < frozenset(part.name for part in PARTS)
    assert (guess.read_bytes, guess.read_seconds) == (0, 0.0)


def test_reading_wants_large_passes_and_computing_does_not():
    # 330 MiB at 10 MiB/s take 33 s, which is also the compute time of a pass of 32 rows.
    reads = planned(600, free_mib=0)
    assert reads.rows == 48  # 100 + 480 MiB and the rest: nothing else fits
    assert reads.resident == {"the rest"}
    assert reads.rows_per_second == pytest.approx(48 / 49)
    room = planned(900, free_mib=0)
    assert room.rows > 32
    assert room.seconds == room.compute_seconds  # nothing waits for the disk


def test_the_output_layer_stays_first_then_blocks_at_equal_distances():
    # One row needs 115 MiB with the rest. The remaining 135 MiB hold the output layer (30) and two blocks (100).
    guess = next(one for one in placer(250).guesses() if one.rows == 1)
    assert guess.resident == {"the rest", "output layer", "h.2", "h.5"}


def test_weights_of_new_tokens_are_read_for_each():
    once, often = planned(300, free_mib=0, most_rows=4), planned(300, free_mib=0, most_rows=4, num_passes=5)
    assert often.resident == once.resident
    assert often.read_bytes == 5 * once.read_bytes
    assert often.compute_seconds == 5 * once.compute_seconds


def test_a_link_carries_all_that_is_streamed():
    guess = planned(115, reading=Reading(None, link_bytes_per_second=33.0 * MIB))
    assert (guess.rows, guess.read_bytes, guess.read_seconds) == (1, STREAMED_BYTES, 10.0)


def test_what_the_host_has_no_room_for_stays_on_the_device():
    # 330 MiB are streamed. If 180 of them fit, 150 remain, which are three blocks.
    room = Reading(180 * MIB, link_bytes_per_second=33.0 * MIB)
    assert placer(115, reading=room).least() == {"the rest", "h.1", "h.3", "h.5"}
    assert planned(115, reading=room) is None
    assert planned(115 + 130, reading=room) is None  # the output layer and two blocks: three need 200 MiB
    found = planned(115 + 180, reading=room)
    assert (found.rows, len(found.resident & {block.name for block in BLOCKS})) == (1, 3)
    assert placer(115, reading=Reading(None, link_bytes_per_second=33.0 * MIB)).least() == {"the rest"}


@pytest.mark.parametrize("free_mib", [0, 400, 10_000])
def test_more_memory_is_never_slower(free_mib):
    rates = [guess.rows_per_second for limit in range(115, 3000, 35) if (guess := planned(limit, free_mib=free_mib))]
    assert all(after >= before * 0.99 for before, after in pairwise(rates))


def test_where_one_row_does_not_fit_there_is_none():
    assert planned(114) is None
    assert planned(115).rows == 1


def test_a_plan_that_needs_more_than_was_guessed_is_taken_with_less():
    def worse(rows: int, resident: frozenset[str]) -> Evaluation:
        found = evaluate(rows, resident)
        if resident == {"the rest"}:
            return found
        peak = found.peak + Estimate(likely_bytes=60 * MIB, low_bytes=0, high_bytes=60 * MIB)
        return Evaluation(peak, True, found.steps_seconds, 0.0)

    found = placer(400, evaluate=worse, free_mib=0, most_rows=4)
    best = found.best(found.guesses())
    chosen, traced = found.verified(best)
    assert traced.peak.high_bytes <= 400 * MIB
    assert len(chosen.resident) < len(best.resident)
    assert chosen.need == traced.peak


def test_those_not_taken_say_why():
    found = placer(250, free_mib=0)
    guesses = found.guesses()
    chosen = found.best(guesses)
    rejected = rejected_of(guesses, chosen, 250 * MIB, lambda guess: len(guess.resident))
    assert chosen.rows not in [one.micro_batch for one in rejected]
    assert [one.micro_batch for one in rejected] == sorted(one.micro_batch for one in rejected)
    too_large = next(one for one in rejected if one.micro_batch == 24)
    assert too_large.reason == "may exceed the limit by 95.0 MiB even with the fewest weights on the device"
    slower = next(one for one in rejected if one.micro_batch == 6)
    assert slower.reason.endswith("% fewer rows a second")
    assert slower.rows_per_second < chosen.rows_per_second
