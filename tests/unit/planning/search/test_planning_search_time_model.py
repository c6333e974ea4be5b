"""Seconds of handmade traces: 100 flops/s for products, 10 bytes/s in memory, 5 bytes/s on the link, 1 s per call."""

import pytest

from hand_traces import trace_of
from plimsoll.memory.predict import count_on_cpu
from plimsoll.planning.search.time_model import (
    _REPLAY_CALLS,
    _of_all,
    learn_time,
    learned_ratio,
    moved_outside,
    step_duration,
    with_disk,
)
from plimsoll.records.allocator import FAST_HEAP, KEPT_HEAP, HeapRules
from plimsoll.records.comparison import Calibration, Learned
from plimsoll.records.plan import Duration
from plimsoll.records.prediction import Estimate
from plimsoll.records.speed import ExchangeSpeed, Point, Speed

SPEED = Speed(
    device="by hand",
    source="measured",
    flops_per_second={"float32": (Point(at=1, rate=100),)},
    bytes_per_second={"plain": (Point(at=1, rate=10),)},
    op_seconds=1,
    module_op_seconds=1,
    backward_op_seconds=1,
    link_bytes_per_second=5,
    host_bytes_per_second=2,
    spread=0.25,
)
MAPPED = HeapRules(mmap_threshold_bytes=4096, is_dynamic=False)
GPU = SPEED.model_copy(update={"overlaps": True, "kernel_seconds": 3})
NO_CALLS = dict.fromkeys(("op_seconds", "module_op_seconds", "backward_op_seconds"), 0)
# A step of two micro-batches and an update.
TWO = (
    ("setup", 0, ""), ("forward", 1, ""), ("forward", 2, ""), ("backward", 2, ""), ("forward", 2, ""),
    ("backward", 2, ""), ("clip", 2, ""), ("optimizer", 2, ""), ("evaluation", 2, ""),
)  # fmt: skip
TWO_WORK = {
    0: {"moved_bytes": 999}, 1: {"moved_bytes": 999}, 8: {"moved_bytes": 999},
    2: {"flops": 400, "moved_bytes": 10},  # 4 s of compute, more than 1 s for its bytes, plus the call
    3: {"moved_bytes": 50},  # 5 s
    4: {"flops": 400, "moved_bytes": 10},
    5: {"moved_bytes": 70},  # 7 s
    6: {"moved_bytes": 20},  # 2 s
    7: {"moved_bytes": 30},  # 3 s
}  # fmt: skip


def counted(trace, heap=KEPT_HEAP):
    return count_on_cpu(trace, Estimate(likely_bytes=0, low_bytes=0, high_bytes=0), heap)


def seconds_of(trace, speed=SPEED, batch=2, micro=1, dry_run=2, heap=KEPT_HEAP):
    sizes = {"batch_size": batch, "micro_batch": micro, "dry_run_samples": dry_run}
    return step_duration(counted(trace, heap), speed, **sizes).likely_seconds


def one(work, *ops, speed=SPEED, **options):
    return seconds_of(trace_of(*(ops or (("forward", 1, ""),)), work={0: work}), speed, **options)


def test_the_last_step_is_added_up_without_setup_and_evaluation():
    assert seconds_of(trace_of(*TWO, work=TWO_WORK)) == (5 + 6) + (5 + 8) + 3 + 4


@pytest.mark.parametrize(
    ("batch", "micro", "dry_run", "expected"),
    [
        (2, 1, 2, 11 + 13 + 7),
        (5, 1, 2, 11 + 4 * 13 + 7),  # from the second on, micro-batches add to existing gradients
        (9, 2, 3, 4 * 11 + 13 + 7),  # four micro-batches of 2 samples, then one
    ],
)
def test_micro_batches_without_a_dry_run(batch, micro, dry_run, expected):
    assert seconds_of(trace_of(*TWO, work=TWO_WORK), batch=batch, micro=micro, dry_run=dry_run) == expected


def test_of_whole_passes_and_a_smaller_one_the_second_stands_for_all_whole_ones_but_the_first():
    assert _of_all([11, 13, 5], num_micro_batches=6, ends_smaller=True) == 11 + 4 * 13 + 5
    assert _of_all([11, 5], num_micro_batches=2, ends_smaller=True) == 11 + 5


def test_the_range_is_the_speeds_spread():
    trace = counted(trace_of(*TWO, work=TWO_WORK))
    duration = step_duration(trace, SPEED, batch_size=2, micro_batch=1, dry_run_samples=2)
    assert (duration.low_seconds, duration.high_seconds) == (31 / 1.25, 31 * 1.25)


def test_a_view_costs_a_part_of_a_call():
    assert one({}) == pytest.approx(0.3)


def test_memory_outside_moves_over_the_link():
    assert one({"outside_bytes": 10}) == 1 + 2


@pytest.mark.parametrize(
    ("batch", "micro", "dry_run", "expected"), [(2, 1, 2, 1 + 20 + 300), (5, 1, 2, 1 + 4 * 20 + 300)]
)
def test_bytes_outside_are_added_up_over_micro_batches(batch, micro, dry_run, expected):
    trace = trace_of(
        *TWO,
        work={0: {"outside_bytes": 999}, 2: {"outside_bytes": 1}, 4: {"outside_bytes": 20}, 7: {"outside_bytes": 300}},
    )
    sizes = {"batch_size": batch, "micro_batch": micro, "dry_run_samples": dry_run}
    assert moved_outside(counted(trace), **sizes) == expected
    assert moved_outside(counted(trace_of()), **sizes) == 0


def test_a_disk_that_everything_comes_from_is_waited_for():
    duration = with_disk(Duration(likely_seconds=3, low_seconds=2, high_seconds=4), 1000, 100)
    assert duration == Duration(likely_seconds=13, low_seconds=7, high_seconds=24)


def test_an_op_that_is_of_no_known_kind_or_type_is_plain():
    speed = SPEED.model_copy(update={"bytes_per_second": {**SPEED.bytes_per_second, "random": (Point(at=1, rate=1),)}})
    assert one({"moved_bytes": 20}, speed=speed) == 1 + 2
    trace = trace_of(("forward", 1, ""), work={0: {"moved_bytes": 20}})
    texts = tuple(text.replace("aten.op0.default", "aten.bernoulli_.float") for text in trace.texts)
    assert seconds_of(trace.model_copy(update={"texts": texts}), speed) == 1 + 20


def test_the_ops_of_a_graph_wait_for_no_calls_but_those_of_its_launch():
    """Three kernels of 5 s per pass: calls of 9 s each limit them, but not the few calls of a graph launch."""
    ops = [("forward", 1, ""), ("forward", 1, ""), ("backward", 1, ""), ("optimizer", 1, "")]
    trace = trace_of(*ops, work={row: {"moved_bytes": 50} for row in range(3)})
    slow = GPU.model_copy(update={"op_seconds": 0.01, "module_op_seconds": 9, "backward_op_seconds": 9})
    update_seconds = 0.3 * 0.01
    assert seconds_of(trace, slow, micro=2) == pytest.approx(3 * 9 + 5 + update_seconds)
    graph = trace.model_copy(update={"captured": ((0, 3),)})
    assert seconds_of(graph, slow, micro=2) == pytest.approx(_REPLAY_CALLS * 0.01 + 3 * 5 + update_seconds)


@pytest.mark.parametrize(
    ("heap", "num_pages"),
    [
        (MAPPED, 2 * 257),  # each mapping is new, with its header
        (FAST_HEAP.model_copy(update={"trim_threshold_bytes": 1 << 20}), 2 * 256),  # the top is returned each time
        (KEPT_HEAP, 0),
    ],
)
def test_what_the_heap_has_given_back_is_cleared_anew(heap, num_pages):
    """In the second step; the first one has grown the heap to its final size."""
    names = {1: ("a", "b"), 2: ("c", "d")}
    ops = [("forward", step, f"+{name} activations {1 << 20} -{name}") for step in names for name in names[step]]
    speed = SPEED.model_copy(update={"fresh_seconds_per_byte": 1 / 4096} | NO_CALLS)
    assert seconds_of(trace_of(*ops), speed, heap=heap) == num_pages


def test_memory_outside_is_not_cleared():
    speed = SPEED.model_copy(update={"fresh_seconds_per_byte": 0.5} | NO_CALLS)
    assert one({}, ("forward", 1, "+large@host activations 64"), speed=speed, heap=MAPPED) == 0


def test_on_a_gpu_a_kernel_begins_when_it_is_called_and_the_one_before_it_has_ended():
    assert one({"moved_bytes": 50}, speed=GPU) == 1 + 5
    assert one({"moved_bytes": 10}, speed=GPU) == 1 + 3  # the minimum duration of a kernel
    large, small, view = {"moved_bytes": 80}, {"moved_bytes": 40}, {}
    assert in_a_row(large, small, small) == 1 + 8 + 4 + 4  # called in the meantime
    assert in_a_row(*[view] * 20, small) == pytest.approx(20 * 0.3 + 1 + 4)  # the queue is waited for
    assert in_a_row(large, *[view] * 40, small) == pytest.approx(1 + 40 * 0.3 + 1 + 4)  # the queue has run empty
    assert one({}, speed=GPU) == pytest.approx(0.3)


COPY = {"moved_bytes": 35, "outside_bytes": 35}  # 7 s on the link, and 3 s to start it
KERNEL = {"moved_bytes": 80}


def test_on_a_gpu_a_copy_is_an_op_of_the_queue_like_others():
    assert in_a_row(COPY, KERNEL) == 1 + 7 + 8


@pytest.mark.parametrize(
    ("waits", "seconds"),
    [
        ((), 1 + 3 + 7),  # next to the kernel, from 2 to 10
        (((1, 0, False),), 1 + 3 + 7 + 8),
        (((1, 0, True),), 1 + 3 + 7 + 1 + 8),  # the kernel is called after the copy
        (((2, 0, True),), 1 + 3 + 7),  # after the last op
    ],
)
def test_one_on_a_stream_of_its_own_runs_beside_them_until_it_is_waited_for(waits, seconds):
    trace = trace_of(("forward", 1, ""), ("forward", 1, ""), work={0: COPY, 1: KERNEL})
    trace = trace.model_copy(update={"copies": ((0, True),), "waits": waits})
    assert seconds_of(trace, GPU) == seconds
    assert seconds_of(trace) == seconds_of(trace.model_copy(update={"copies": (), "waits": ()}))  # a CPU


def test_gradients_that_left_the_device_are_added_up_on_the_host_while_backward_goes_on():
    ops = [("backward", 1, "")] * 3
    trace = trace_of(*ops, work={0: COPY, 1: {"outside_bytes": 20}, 2: KERNEL})
    by_autograd = trace.ops.model_copy(update={"by_autograd": (True,) * 3})
    trace = trace.model_copy(update={"ops": by_autograd, "copies": ((0, False),), "waits": ((1, 0, True),)})
    assert seconds_of(trace, GPU) == 1 + 3 + 7 + 20 / 2


def test_memory_of_the_host_is_worked_on_by_the_processor_that_calls():
    assert in_a_row({"outside_bytes": 20}, {"moved_bytes": 30}) == 1 + 20 / 2 + 1 + 3


@pytest.mark.parametrize(
    ("phase", "name", "by_autograd", "seconds"),
    [
        ("forward", "aten.add.Tensor", False, 40),
        ("forward", "aten._to_copy.default", False, 16),  # autocast's
        ("loss", "aten.add.Tensor", False, 40),
        ("backward", "aten.add.Tensor", True, 16),
        ("backward", "aten.add.Tensor", False, 40),  # recomputed
        ("clip", "aten.add.Tensor", False, 7),
        ("optimizer", "aten.add.Tensor", False, 7),
    ],
)
def test_a_call_costs_what_it_takes_where_it_comes_from(phase, name, by_autograd, seconds):
    calls = {"op_seconds": 7, "module_op_seconds": 40, "backward_op_seconds": 16}
    trace = trace_of((phase, 1, ""), work={0: {"moved_bytes": 30}})
    texts = tuple(text.replace("aten.op0.default", name) for text in trace.texts)
    ops = trace.ops.model_copy(update={"by_autograd": (by_autograd,)})
    trace = trace.model_copy(update={"texts": texts, "ops": ops})
    assert seconds_of(trace, GPU.model_copy(update=calls)) == seconds + 3


def in_a_row(*works):
    ops = [("forward", 1, "")] * len(works)
    return seconds_of(trace_of(*ops, work={number: work for number, work in enumerate(works) if work}), GPU)


def test_an_empty_trace_takes_no_time():
    assert seconds_of(trace_of()) == 0


def test_calibration_moves_and_widens_the_answer():
    learned = Learned(num_runs=2, mean=2, low=1.5, high=3)
    trace = counted(trace_of(*TWO, work=TWO_WORK))
    duration = step_duration(trace, SPEED, batch_size=2, micro_batch=1, dry_run_samples=2, learned=learned)
    assert (duration.likely_seconds, duration.low_seconds, duration.high_seconds) == (
        31 * 1.5,  # the fastest run: others were slowed down
        31 * 1.5 / 1.25,
        31 * 3 * 1.25,
    )


def test_times_are_learned_by_the_set_of_techniques():
    known = learn_time(Calibration(), "cpu", ["micro_batch"], predicted_seconds=2, measured_seconds=3)
    known = learn_time(known, "cpu", ["micro_batch", "cache", "autocast"], predicted_seconds=2, measured_seconds=5)
    known = learn_time(known, "cpu", [], predicted_seconds=2, measured_seconds=2)
    assert learned_ratio(known, "cpu", ["micro_batch"]) == Learned(num_runs=2, mean=1.25, low=1, high=1.5)
    assert learned_ratio(known, "cpu", ["autocast", "cache"]) == Learned(num_runs=1, mean=2.5, low=2.5, high=2.5)
    assert Calibration.from_json(known.to_json()) == known


def test_a_set_that_was_never_run_is_as_the_others():
    known = learn_time(Calibration(), "cpu", [], predicted_seconds=2, measured_seconds=2)
    known = learn_time(known, "cpu", ["cache"], predicted_seconds=1, measured_seconds=2)
    assert learned_ratio(known, "cpu", ["autocast"]) == Learned(num_runs=2, mean=1.5, low=1.5, high=2)
    assert learned_ratio(known, "cuda 8.6", []) is None


# A gathered block takes 1 s for the request, 2 s to start and 1 s per 4 bytes; sums take 1 s per 2 bytes.
EXCHANGE = ExchangeSpeed(
    device="by hand",
    source="measured",
    num_ranks=2,
    bytes_per_second={
        "all_gather": (Point(at=1, rate=4),), "reduce_scatter": (Point(at=1, rate=4),),
        "all_reduce": (Point(at=1, rate=2),),
    },
    call_seconds=2,
    agree_seconds=1,
)  # fmt: skip


def of_ranks(*named, speed=SPEED, **sizes):
    """Return the seconds of a step of micro-batches; each op is `(phase, name, moved bytes)`."""
    trace = trace_of(
        *((phase, 1, "") for phase, _, _ in named),
        work={number: {"moved_bytes": moved} for number, (_, _, moved) in enumerate(named)},
    )
    texts = {f"aten.op{number}.default": f"{name}.default" for number, (_, name, _) in enumerate(named)}
    trace = trace.model_copy(update={"texts": tuple(texts.get(text, text) for text in trace.texts)})
    sizes = {"batch_size": 2, "micro_batch": 1, "dry_run_samples": 2} | sizes
    return step_duration(counted(trace), speed, **sizes, exchange=EXCHANGE).likely_seconds


GATHERED = ("forward", "c10d._allgather_base_", 8)  # 1 + 2 + 2 s
SCATTERED = ("backward", "c10d._reduce_scatter_base_", 8)
ADDED = ("backward", "c10d.allreduce_", 8)  # 2 + 4 s
PRODUCT = ("forward", "aten.add", 20)  # 2 s, and 1 s for the call


def test_what_ranks_exchange_takes_the_time_of_their_link():
    assert of_ranks(GATHERED) == 5
    assert of_ranks(ADDED) == 6
    assert of_ranks(PRODUCT, GATHERED, SCATTERED) == 3 + 5 + 5


def test_each_micro_batch_gathers_and_gradients_are_added_up_once():
    passes = (GATHERED, SCATTERED, GATHERED, SCATTERED, ADDED)
    assert of_ranks(*passes) == 4 * 5 + 6
    assert of_ranks(*passes, batch_size=5) == 10 * 5 + 6


def test_a_gpu_fetches_beside_its_kernels_and_waits_for_sums():
    assert of_ranks(PRODUCT, GATHERED, speed=GPU) == 5
    assert of_ranks(PRODUCT, GATHERED, ADDED, speed=GPU) == 5 + 6
