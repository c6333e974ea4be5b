"""Traces written by hand and counted by the allocators: every number is computed in MiB.

torch's caching allocator takes a segment of 2 MiB for requests up to 1 MiB, and of 20 MiB for requests below 10 MiB.
Larger requests take the next multiple of 2 MiB. glibc's heap maps blocks from 128 KiB on, in pages, with a header and
padding of 112 bytes.
"""

from math import ceil

import numpy as np
import pytest

from hand_traces import MIB, trace_of
from plimsoll.memory import predict
from plimsoll.memory.live import live_bytes
from plimsoll.memory.predict import MOST_ROWS, Counted, context_of, count_on_cpu, count_on_cuda
from plimsoll.records.allocator import FAST_HEAP, FRESH_HEAP, KEPT_HEAP, TIGHT_HEAP, AllocatorRules
from plimsoll.records.device import DeviceSpec
from plimsoll.records.prediction import Estimate
from plimsoll.records.trace import Assumption

CARD = DeviceSpec(
    name="card",
    architecture="8.0",
    capacity_bytes=1000 * MIB,
    capacity_high_bytes=1000 * MIB,
    capacity_source="by hand",
    context_low_bytes=300 * MIB,
    context_high_bytes=500 * MIB,
)
BASELINE = Estimate(likely_bytes=200 * MIB, low_bytes=190 * MIB, high_bytes=210 * MIB, measured_bytes=200 * MIB)


def mib(column) -> list[float]:
    return [size / MIB for size in column]


def step_trace(**fields):
    """Return a trace, in MiB: 16 weights, 12 activations, 16 gradients, 3 temporaries, 12 states in freed memory."""
    return trace_of(
        ("setup", 0, f"+w parameters {16 * MIB}"),
        ("forward", 1, f"+h activations {12 * MIB}"),
        ("backward", 1, f"+g gradients {16 * MIB} +t temporaries {3 * MIB} -t -h"),
        ("optimizer", 1, f"+s optimizer states {12 * MIB}"),
        **fields,
    )


def test_reserved_on_cuda_is_the_segments_and_the_context():
    counted = count_on_cuda(step_trace(), CARD)
    assert mib(counted.live.total) == [16, 28, 44, 47, 44, 32, 44]
    assert mib(counted.allocated) == [16, 28, 44, 47, 44, 32, 44]
    # 3 MiB take a segment of 20; the states take the block of 12 MiB that is free.
    assert mib(counted.reserved - 400 * MIB) == [16, 28, 44, 64, 64, 64, 64]
    assert counted.oom_row is None
    assert counted.oom_moment() is None


def test_the_peak_on_cuda_says_how_each_part_of_it_is_known():
    counted = count_on_cuda(step_trace(), CARD)
    spread_bytes = 64 * MIB * 0.02
    assert counted.peak == Estimate(
        likely_bytes=464 * MIB,
        low_bytes=364 * MIB - ceil(spread_bytes),
        high_bytes=564 * MIB + int(spread_bytes),
        traced_bytes=47 * MIB,
        modelled_bytes=17 * MIB,
        assumed_bytes=400 * MIB,
    )
    assert (counted.most_reserved.likely_bytes, counted.fixed_part.likely_bytes) == (64 * MIB, 400 * MIB)
    assert (counted.most_allocated.likely_bytes, counted.most_allocated.traced_bytes) == (47 * MIB, 47 * MIB)


def test_the_parts_are_what_is_alive_at_the_peak_and_add_up():
    counted = count_on_cuda(step_trace(), CARD)
    assert counted.parts() == {
        "parameters": 16 * MIB,
        "activations": 12 * MIB,
        "gradients": 16 * MIB,
        "temporaries": 3 * MIB,
        "context": 400 * MIB,
        "fragmentation": 17 * MIB,
    }
    assert sum(counted.parts().values()) == counted.peak.likely_bytes


def test_the_workspace_of_cublas_is_of_the_context_and_counted_as_torch_counts_it():
    trace = step_trace()
    texts = tuple(text.replace("aten.op1.default", "aten.mm.default") for text in trace.texts)
    with_product = trace.model_copy(update={"texts": texts})
    card = CARD.model_copy(update={"cublas_workspace_bytes": 32 * MIB})
    assert count_on_cuda(trace, card).parts()["context"] == 400 * MIB
    counted = count_on_cuda(with_product, card)
    assert mib(counted.reserved) == [448, 460, 476, 496, 496, 496, 496]
    assert counted.parts()["context"] == 432 * MIB
    # torch's own counters include the workspace, so the prediction can be compared with them.
    assert (counted.fixed_part.likely_bytes, counted.fixed_part.modelled_bytes) == (400 * MIB, 0)
    assert (counted.most_reserved.likely_bytes, counted.most_allocated.likely_bytes) == (96 * MIB, 79 * MIB)
    assert sum(counted.parts().values()) == counted.peak.likely_bytes == 496 * MIB


def test_the_allocator_counts_by_the_rules_it_is_given():
    counted = count_on_cuda(step_trace(), CARD, rules=AllocatorRules(large_segment_bytes=4 * MIB))
    assert counted.peak.likely_bytes == 448 * MIB


def test_memory_of_the_host_is_not_the_cards():
    counted = count_on_cuda(trace_of(("copy", 1, f"+b@host inputs {99 * MIB} +c inputs {16 * MIB}")), CARD)
    assert (mib(counted.live.total), counted.peak.likely_bytes) == ([16], 416 * MIB)
    assert [one.shape for one in counted.largest()] == ["c"]


def test_what_finds_no_free_block_is_said_with_its_moment():
    counted = count_on_cuda(step_trace(), CARD, limit_bytes=440 * MIB)  # 40 without the context; the gradients need 44
    assert counted.oom_row == 2
    moment = counted.oom_moment()
    assert moment is not None
    assert (moment.step, moment.phase, moment.op, moment.module, moment.line) == (
        *(1, "backward", "op2"),
        *("layer2", "train.py:2"),
    )
    assert counted.peak.likely_bytes == 464 * MIB  # the peak without a limit


def test_a_context_that_leaves_nothing_runs_out_at_the_first_event():
    assert count_on_cuda(step_trace(), CARD, limit_bytes=100 * MIB).oom_row == 0
    card = CARD.model_copy(update={"cublas_workspace_bytes": 32 * MIB})
    assert count_on_cuda(step_trace(), card, limit_bytes=401 * MIB).oom_row == 0


def test_near_the_limit_the_allocator_gives_back_what_it_keeps_and_it_fits():
    # 16 and 12 are freed and kept; 24 fits neither: 52 are reserved without a limit, 24 after they were given back.
    trace = trace_of(
        ("forward", 1, f"+a activations {16 * MIB} +b activations {12 * MIB}"),
        ("backward", 1, f"-a -b +c gradients {24 * MIB}"),
    )
    assert mib(count_on_cuda(trace, CARD).reserved - 400 * MIB) == [16, 28, 28, 28, 52]
    counted = count_on_cuda(trace, CARD, limit_bytes=440 * MIB)
    assert mib(counted.reserved - 400 * MIB) == [16, 28, 28, 28, 24]
    assert (counted.oom_row, counted.peak.likely_bytes) == (None, 428 * MIB)
    assert count_on_cuda(trace, CARD, limit_bytes=452 * MIB).peak.likely_bytes == 452 * MIB  # there is room for all


def test_the_context_is_the_cards_or_the_widest_that_is_known():
    assert context_of(CARD) == Estimate(
        likely_bytes=400 * MIB, low_bytes=300 * MIB, high_bytes=500 * MIB, assumed_bytes=400 * MIB
    )
    context = context_of(CARD.model_copy(update={"context_low_bytes": None}))
    assert (context.low_bytes, context.likely_bytes, context.high_bytes) == (200 * MIB, 508 * MIB, 816 * MIB)


def test_reserved_on_the_cpu_is_the_heap_and_the_process():
    counted = count_on_cpu(step_trace(), BASELINE, TIGHT_HEAP)
    page = 4096  # every block is a mapping, of one page more for its header; the small objects of all share one
    in_heap = counted.reserved - 200 * MIB
    expected = np.array([16, 28, 44, 47, 44, 32, 44]) * MIB + np.array([2, 3, 4, 5, 4, 3, 4]) * page
    assert in_heap.tolist() == expected.tolist()
    assert counted.peak.likely_bytes == 247 * MIB + 5 * page
    assert counted.peak.measured_bytes == 200 * MIB
    assert counted.peak.traced_bytes + counted.peak.modelled_bytes == 47 * MIB + 5 * page
    assert counted.peak.low_bytes == 190 * MIB + int((47 * MIB + 5 * page) * 0.94)
    assert counted.parts()["baseline"] == 200 * MIB
    assert counted.parts()["fragmentation"] == 5 * page
    assert sum(counted.parts().values()) == counted.peak.likely_bytes


def test_on_the_cpu_a_hole_below_a_live_block_stays_resident():
    small = 64 << 10  # below the mapping threshold
    trace = trace_of(("forward", 1, f"+a activations {small} +b activations {small} -a"))
    counted = count_on_cpu(trace, BASELINE, FRESH_HEAP)
    assert counted.live.total.tolist() == [small, 2 * small, small]
    assert counted.reserved[2] - 200 * MIB >= 2 * small


def test_a_limit_holds_what_an_lstm_asks_for_and_never_writes():
    """Each of two workspaces of 30 has 10 written. Requests peak in forward, written memory in the update."""
    trace = trace_of(
        ("forward", 1, f"+first activations {30 * MIB} +second activations {30 * MIB}"),
        ("backward", 1, "-first -second"),
        ("optimizer", 1, f"+s temporaries {25 * MIB}"),
    )
    trace = trace.model_copy(update={"unwritten": ((0, 20 * MIB), (1, 20 * MIB))})
    without, limited = (count_on_cpu(trace, BASELINE, TIGHT_HEAP, has_limit) for has_limit in (False, True))
    assert limited.live.total.tolist() == [10 * MIB, 20 * MIB, 10 * MIB, 0, 25 * MIB]
    assert without.unwritten_bytes == 0
    assert limited.unwritten_bytes == pytest.approx(
        (60 - 25) * MIB, abs=256 << 10
    )  # the tolerance is the growth step of the heap
    assert limited.peak.likely_bytes == without.peak.likely_bytes
    assert limited.peak.high_bytes == without.peak.high_bytes + limited.unwritten_bytes


def test_the_nodes_of_a_graph_take_memory_of_the_heap_from_their_op_to_the_end_of_backward():
    """9,999 nodes are made before the second op's storage and freed before the fourth's.

    Four nodes take 3,488 bytes: thirteen chunks of 32 bytes (blocks of 16 and 24), and two of 48 (of 32). Two more have
    192 (of 176 and 184). One each has 80, 320, 480, 496, 560 and 656 (of 64, 312, 464, 488, 552 and 640).
    """
    nodes_bytes = 2500 * 3488
    small = 64 << 10
    script = ("forward", "forward", "backward", "optimizer")
    trace = trace_of(*((phase, 1, f"+{name} activations {small}") for phase, name in zip(script, "abcd", strict=True)))
    without = count_on_cpu(trace, BASELINE, FRESH_HEAP)
    counted = count_on_cpu(trace.model_copy(update={"nodes": ((1, 3, 9_999),)}), BASELINE, FRESH_HEAP)
    more_bytes = (counted.reserved - without.reserved).tolist()
    assert more_bytes[0] == 0
    assert more_bytes[1:3] == pytest.approx([nodes_bytes] * 2, abs=16 * 4096)
    assert counted.live.total.tolist() == without.live.total.tolist()
    stays = count_on_cpu(trace.model_copy(update={"nodes": ((1, -1, 9_999),)}), BASELINE, FRESH_HEAP)
    assert stays.allocated.tolist() == counted.allocated.tolist()
    assert stays.reserved[3] - without.reserved[3] == pytest.approx(nodes_bytes, abs=16 * 4096)


def test_where_large_blocks_are_kept_the_steps_that_follow_the_traced_ones_count():
    """Each step leaves a hole of 6 MiB, too small for its block of 8. Memory of the setup does not change."""
    trace = trace_of(
        ("setup", 0, f"+w parameters {MIB}"),
        ("forward", 1, f"+a activations {6 * MIB} +b activations {MIB} -a -b"),
        ("forward", 2, f"+c activations {6 * MIB} +d activations {8 * MIB} -c +e activations {7 * MIB} -d -e"),
    )
    for rules, may_grow in ((KEPT_HEAP, True), (FAST_HEAP, False)):
        short, long = (count_on_cpu(trace, BASELINE, rules, is_long=is_long) for is_long in (False, True))
        assert (long.reserved >= short.reserved).all()
        assert (long.reserved > short.reserved).any() == may_grow
        assert (long.reserved[:5] == short.reserved[:5]).all()  # no row of the last step
        assert len(long.reserved) == len(short.reserved)
        assert long.live.total.tolist() == short.live.total.tolist()


def test_what_a_model_is_built_of_goes_back_where_its_blocks_are_mapped_until_the_first_step():
    """Four parameters of 1 MiB are built, then all but the last are freed, which leaves holes below it."""
    names = "abcd"
    trace = trace_of(
        *(("setup", 0, f"+{name} parameters {MIB}") for name in names),
        ("setup", 0, "-a -b -c"),
        ("forward", 1, f"+e activations {2 * MIB}"),
        ("backward", 1, f"+f activations {2 * MIB} -e"),
    )
    apart = FAST_HEAP.model_copy(update={"build_threshold_bytes": 128 << 10})
    in_heap, mapped = (count_on_cpu(trace, BASELINE, rules).reserved.tolist() for rules in (FAST_HEAP, apart))
    shared_out = 6  # the rows of the deaths are 4, 5 and 6
    assert in_heap[shared_out] - mapped[shared_out] == pytest.approx(3 * MIB, abs=64 << 10)
    assert mapped[shared_out] - BASELINE.likely_bytes == pytest.approx(MIB, abs=64 << 10)
    assert len(mapped) == len(in_heap) == 10


def test_the_largest_are_those_alive_at_the_peak_with_where_they_were_made():
    sizes = list(range(11, 31))  # 20 storages; one more is freed before the peak
    births = " ".join(f"+x{size} activations {size * MIB}" for size in sizes)
    trace = trace_of(("setup", 0, f"+gone temporaries {99 * MIB} -gone"), ("forward", 1, births))
    largest = count_on_cuda(trace, CARD).largest()
    assert [one.num_bytes // MIB for one in largest] == sizes[:-11:-1]
    first = largest[0]
    assert (first.shape, first.category) == ("x30", "activations")
    assert (first.made.step, first.made.phase, first.made.line) == (1, "forward", "train.py:1")


def test_alike_storages_are_one_holding():
    trace = trace_of(
        ("setup", 0, f"+h.0.w parameters {5 * MIB} +h.0.w' parameters {5 * MIB} +bias parameters {7 * MIB}"),
        ("forward", 1, f"+y activations {4 * MIB} +y' activations {4 * MIB} +y'' activations {3 * MIB}"),
    )
    largest = count_on_cuda(trace, CARD).largest()
    assert [(one.num_bytes // MIB, one.count, one.category, one.name) for one in largest] == [
        (11, 3, "activations", ""),
        (7, 1, "parameters", "bias"),
        (5, 1, "parameters", "h.0.w"),
        (5, 1, "parameters", "h.0.w'"),
    ]
    assert largest[0].made.module == "layer1"


def test_what_differs_by_a_number_in_its_name_is_alike():
    names = [f"h.{layer}.w" for layer in range(12)]
    trace = trace_of(("setup", 0, " ".join(f"+{name} parameters {layer + 1}" for layer, name in enumerate(names))))
    shapes = (trace.storages.shape[0],) * 12
    trace = trace.model_copy(update={"storages": trace.storages.model_copy(update={"shape": shapes})})
    (one,) = count_on_cuda(trace, CARD).largest()
    assert (one.num_bytes, one.count, one.name, one.shape) == (sum(range(1, 13)), 12, "h.*.w", "h.0.w")


def test_a_short_timeline_has_every_event():
    counted = count_on_cuda(step_trace(), CARD)
    timeline = counted.timeline()
    assert mib(timeline.used_bytes) == [416, 428, 444, 447, 444, 432, 444]
    assert mib(timeline.reserved_bytes) == [416, 428, 444, 464, 464, 464, 464]
    assert timeline.phase == ("setup", "forward", *["backward"] * 4, "optimizer")
    assert timeline.step == (0, 1, 1, 1, 1, 1, 1)
    assert (timeline.label[0], timeline.label[-1]) == ("op0 layer0", "op3 layer3")
    assert timeline.peak_row == 3
    assert mib(timeline.categories["gradients"]) == [0, 0, 16, 16, 16, 16, 16]
    for row, used_bytes in enumerate(timeline.used_bytes):
        assert sum(column[row] for column in timeline.categories.values()) == used_bytes


def sawtooth(num_events: int, peak_at: int) -> Counted:
    """Count a trace of births and deaths of storages of all sizes, with one largest storage."""
    script = []
    for pair in range(num_events // 2):
        num_bytes = 100 * MIB if pair == peak_at // 2 else (pair * 7919) % MIB + 1
        script.append(f"+x{pair} temporaries {num_bytes} -x{pair}")
    return count_on_cuda(trace_of(("forward", 1, " ".join(script))), CARD)


@pytest.mark.parametrize(("num_events", "peak_at"), [(MOST_ROWS, 10), (MOST_ROWS + 2, 4000), (30_000, 17_354)])
def test_a_long_timeline_is_thinned_and_keeps_the_peak(num_events: int, peak_at: int):
    counted = sawtooth(num_events, peak_at)
    timeline = counted.timeline()
    assert len(counted.live.total) == num_events
    assert len(timeline.used_bytes) <= MOST_ROWS + 2  # and the first and the last
    assert timeline.used_bytes[timeline.peak_row] == max(timeline.used_bytes) == 500 * MIB
    assert timeline.used_bytes[-1] == 400 * MIB


def test_a_thinned_timeline_keeps_the_most_that_is_reserved():
    # On the CPU the heap may be largest when few bytes are alive, and then shrink.
    counted = sawtooth(30_000, 17_354)
    stretch = counted.live.total[101:115]
    row = 101 + int(np.argsort(stretch)[len(stretch) // 2])
    reserved = counted.live.total.copy()
    reserved[row] += 900 * MIB
    thinned = Counted(counted.trace, counted.live, counted.live.total, reserved, {}, 0.05).timeline()
    assert max(thinned.reserved_bytes) == reserved[row]


def test_assumptions_widen_the_range_by_their_signed_bytes():
    plain = count_on_cuda(step_trace(), CARD).peak
    assumptions = (
        Assumption(text="nonzero keeps all", low_bytes=-10 * MIB),
        Assumption(text="cuDNN's buffers", low_bytes=-1 * MIB, high_bytes=5 * MIB),
    )
    wide = count_on_cuda(step_trace(assumptions=assumptions), CARD).peak
    assert wide.likely_bytes == plain.likely_bytes
    assert plain.low_bytes - wide.low_bytes == 11 * MIB
    assert wide.high_bytes - plain.high_bytes == 5 * MIB


def test_no_assumption_takes_the_low_end_below_what_is_there_from_the_start():
    assumptions = (Assumption(text="everything", low_bytes=-(1 << 40)),)
    assert count_on_cuda(step_trace(assumptions=assumptions), CARD).peak.low_bytes == 300 * MIB


@pytest.mark.parametrize("limit_mib", [None, 420, 464, 900])
@pytest.mark.parametrize("low_mib", [0, -10, -9_999])
def test_every_range_holds_its_likely_value(limit_mib: int | None, low_mib: int):
    trace = step_trace(assumptions=(Assumption(text="x", low_bytes=low_mib * MIB, high_bytes=7),))
    limit_bytes = None if limit_mib is None else limit_mib * MIB
    for counted in (count_on_cuda(trace, CARD, limit_bytes), count_on_cpu(trace, BASELINE, FRESH_HEAP)):
        for one in (counted.peak, counted.most_reserved, counted.most_allocated, counted.fixed_part):
            assert 0 <= one.low_bytes <= one.likely_bytes <= one.high_bytes
            known_bytes = one.traced_bytes + one.measured_bytes + one.modelled_bytes + one.assumed_bytes
            assert known_bytes == one.likely_bytes


def test_an_op_is_named_as_a_person_would():
    moment = predict.moment_of(step_trace(), 0)
    assert moment.op == "op0"
    assert predict._short("custom.thing.default") == "custom.thing.default"


def test_the_columns_are_those_of_the_live_bytes():
    trace = step_trace()
    counted = count_on_cpu(trace, BASELINE, FRESH_HEAP)
    assert counted.live.total.tolist() == live_bytes(trace).total.tolist() == counted.allocated.tolist()
