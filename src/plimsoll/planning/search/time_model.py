"""The time model: the seconds of one optimizer step, from its trace and the speed of the device.

    duration = step_duration(counted, speed, batch_size=64, micro_batch=8, dry_run_samples=16)

Each op takes the time of its floating-point operations or of its bytes, whichever is longer (a roofline). The time to
launch the op is added. `plimsoll.planning.search.stream_timeline` models the overlap of processor, device and link. A
dry run has at most two micro-batches, and the time of the real step is extrapolated from them.

The goal is that the faster of two plans is also predicted to be faster. `benchmarks/plan_time_model.py` checks this
with measured steps of a processor, and `benchmarks/plan_time_gpu.py` with recorded steps of a GPU. Not covered: reading
the data, evaluation, and waiting for slower ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from plimsoll.device.launch_overhead import VIEW_SHARE
from plimsoll.memory.annotations import captured_rows
from plimsoll.memory.compare import with_run
from plimsoll.memory.predict import Counted
from plimsoll.planning.search.stream_timeline import StreamTimeline
from plimsoll.records.comparison import Calibration, Learned, Target
from plimsoll.records.plan import MICRO_BATCH, Duration
from plimsoll.records.speed import ExchangeKind, ExchangeSpeed, MovingKind, Speed, rate_at
from plimsoll.records.trace import Phase, Trace

_OF_A_MICRO_BATCH: frozenset[Phase] = frozenset({"copy", "forward", "loss", "backward"})
_NOT_COUNTED: frozenset[Phase] = frozenset({"setup", "evaluation"})
# A call from Python (a forward, a recomputation) costs more than a call by autograd. A call in the phases below costs
# least.
_CALLED_BARE: frozenset[Phase] = frozenset({"copy", "clip", "optimizer"})
_REPLAY_CALLS = 20  # the inputs, the start of backward, and the launch of the graph itself
_CAST_BELOW = frozenset({"_to_copy"})  # called mostly by autocast, not from Python

# For ops with matrix products, moved bytes hardly ever matter. Ops without an entry are of the kind "plain".
_KIND_NAMES: dict[MovingKind, str] = {
    "strided": "clone copy_ _to_copy tril triu sum mean constant_pad_nd",
    "transcendental": (
        "tanh tanh_ gelu gelu_backward exp exp_ erf log silu silu_backward sigmoid sigmoid_ mish mish_backward "
        "softplus sin cos logsumexp"
    ),
    "normalize": (
        "_softmax _safe_softmax _log_softmax native_layer_norm native_layer_norm_backward cumsum _fused_rms_norm "
        "_fused_rms_norm_backward native_batch_norm native_batch_norm_backward"
    ),
    "random": "bernoulli_ bernoulli native_dropout normal_ uniform_ rand randn rand_like",
    "gather": (
        "embedding embedding_dense_backward index_select gather index index_put_ index_add_ index_add scatter_ "
        "scatter_add_ _index_put_impl_"
    ),
}
_KINDS: dict[str, MovingKind] = {name: kind for kind, names in _KIND_NAMES.items() for name in names.split()}
_EXCHANGES: dict[str, ExchangeKind] = {
    "allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
}  # fmt: skip


def step_duration(
    counted: Counted,
    speed: Speed,
    *,
    batch_size: int,
    micro_batch: int,
    dry_run_samples: int,
    learned: Learned | None = None,
    step: int | None = None,
    exchange: ExchangeSpeed | None = None,
) -> Duration:
    """Compute the seconds of one optimizer step, or of one inference pass.

    Args:
        counted: the counted memory of a dry run with one or two micro-batches a step and a smaller last one.
        speed: speed of the device that the trace was lowered to.
        batch_size: number of samples in a real step.
        micro_batch: number of samples in one pass.
        dry_run_samples: number of samples in a step of the trace.
        learned: ratio of measured to predicted seconds, from similar runs (`learned_ratio`).
        step: number of the step in the trace; by default the last step.
        exchange: speed of collectives, if the trace is for one of several ranks.
    """
    passes, once = _stretches(counted, speed, step, exchange)
    seconds = once + sum(passes)
    if dry_run_samples < batch_size:
        seconds = once + _of_all(passes, -(-batch_size // micro_batch), batch_size % micro_batch > 0)
    # The fastest run counts: other programs on the machine only slow a run down.
    likely, high = (learned.low, learned.high) if learned else (1.0, 1.0)
    return Duration(
        likely_seconds=seconds * likely,
        low_seconds=seconds * likely / (1 + speed.spread),
        high_seconds=seconds * high * (1 + speed.spread),
    )


def update_seconds(counted: Counted, speed: Speed, exchange: ExchangeSpeed | None = None) -> float:
    """Compute the seconds of a step's ops outside its micro-batches, mainly the update; see `step_duration`."""
    return _stretches(counted, speed, None, exchange)[1]


def moved_outside(counted: Counted, *, batch_size: int, micro_batch: int, dry_run_samples: int) -> int:
    """Count the bytes outside device memory that one optimizer step reads and writes; see `step_duration`."""
    ops = counted.trace.ops
    last_step = max(ops.step, default=0)
    passes: list[int] = []
    once, last_phase = 0, None
    for phase, step, num_bytes in zip(ops.phase, ops.step, ops.outside_bytes, strict=True):
        if phase in _NOT_COUNTED or step != last_step:
            continue
        if phase not in _OF_A_MICRO_BATCH:
            once += num_bytes
            continue
        if not passes or (last_phase == "backward" and phase != "backward"):
            passes.append(0)
        passes[-1] += num_bytes
        last_phase = phase
    if dry_run_samples >= batch_size:
        return once + sum(passes)
    return once + int(_of_all(passes, -(-batch_size // micro_batch), batch_size % micro_batch > 0))


def with_disk(duration: Duration, moved_bytes: int, disk_bytes_per_second: float) -> Duration:
    """Add the time in which a step waits for a disk, if the machine's memory cannot hold the offloaded files.

    Passes use all offloaded bytes in order, so the bytes needed next were evicted from memory longest ago. Each moved
    byte is therefore read from or written to the disk. The lower end of the range assumes that half of the bytes stay
    in memory.
    """
    seconds = moved_bytes / disk_bytes_per_second
    return Duration(
        likely_seconds=duration.likely_seconds + seconds,
        low_seconds=duration.low_seconds + seconds / 2,
        high_seconds=duration.high_seconds + 2 * seconds,
    )


def learned_ratio(calibration: Calibration, lowered_to: str, techniques: Iterable[str]) -> Learned | None:
    """Return the learned ratio of measured to predicted step times for a set of techniques.

    For an untried set, return the average over known sets; ``None`` if there are no known sets. Without the average, an
    untried set would seem faster than sets whose runs were slower than predicted.
    """
    target = calibration.targets.get(lowered_to)
    if target is None or not target.step_ratios:
        return None
    known = list(target.step_ratios.values())
    return target.step_ratios.get(_set_name(techniques)) or Learned(
        num_runs=sum(one.num_runs for one in known),
        mean=sum(one.mean for one in known) / len(known),
        low=sum(one.low for one in known) / len(known),
        high=max(one.high for one in known),
    )


def learned_peak(calibration: Calibration, lowered_to: str, techniques: Iterable[str]) -> Learned | None:
    """Return the learned ratio of measured to predicted peaks for a set of techniques; ``None`` for an untried set."""
    target = calibration.targets.get(lowered_to)
    return target.peak_ratios.get(_set_name(techniques)) if target else None


def learn_time(
    calibration: Calibration,
    lowered_to: str,
    techniques: Iterable[str],
    predicted_seconds: float,
    measured_seconds: float,
) -> Calibration:
    """Return the calibration of step times, updated with one more run.

    Args:
        calibration: the previous calibration.
        lowered_to: name of the target in traces.
        techniques: names of the techniques in force.
        predicted_seconds: predicted seconds of a step, without calibration.
        measured_seconds: measured seconds of a step, the median over the run.
    """
    target = calibration.targets.get(lowered_to, Target())
    ratios = _with_run(target.step_ratios, _set_name(techniques), measured_seconds / predicted_seconds)
    return _with_target(calibration, lowered_to, target.model_copy(update={"step_ratios": ratios}))


def learn_peak(
    calibration: Calibration, lowered_to: str, techniques: Iterable[str], predicted_bytes: int, measured_bytes: int
) -> Calibration:
    """Return the calibration of a process's peaks, updated with one more run; see `learn_time`."""
    target = calibration.targets.get(lowered_to, Target())
    ratios = _with_run(target.peak_ratios, _set_name(techniques), measured_bytes / predicted_bytes)
    return _with_target(calibration, lowered_to, target.model_copy(update={"peak_ratios": ratios}))


def _with_run(ratios: dict[str, Learned], name: str, ratio: float) -> dict[str, Learned]:
    return {**ratios, name: with_run(ratios.get(name), ratio)}


def _with_target(calibration: Calibration, lowered_to: str, target: Target) -> Calibration:
    return calibration.model_copy(update={"targets": {**calibration.targets, lowered_to: target}})


def _set_name(techniques: Iterable[str]) -> str:
    """Return the key of a set of techniques. It leaves out the micro-batch, which every plan has."""
    return "+".join(sorted(set(techniques) - {MICRO_BATCH}))


def _of_all(passes: Sequence[float], num_micro_batches: int, ends_smaller: bool) -> float:
    """Extrapolate the seconds of all micro-batches together from the traced micro-batches.

    The first pass has no gradients to add to. All later passes do, and only the last pass may be smaller.
    """
    if not passes:
        return 0.0
    first, last = passes[0], passes[-1]
    if not ends_smaller:
        return first + last * (num_micro_batches - 1)
    whole = passes[1] if len(passes) > 2 else first
    return first + whole * (num_micro_batches - 2) + last


def _stretches(
    counted: Counted, speed: Speed, step: int | None, exchange: ExchangeSpeed | None
) -> tuple[list[float], float]:
    """Return the seconds of each traced micro-batch of a step, and the seconds of all ops outside micro-batches."""
    trace, fresh_bytes = counted.trace, counted.fresh_bytes
    ops = trace.ops
    names = [_plain_name(text) for text in trace.texts]
    passes: list[StreamTimeline] = []
    once, last_phase = StreamTimeline(speed.overlaps), None
    beside, waits = dict(trace.copies) if speed.overlaps else {}, _waits_by_row(trace)
    is_captured = captured_rows(trace)
    kernels: dict[Hashable, float] = {}  # cached, because ops of the same kind and size repeat
    rows = [row for row, phase in enumerate(ops.phase) if phase not in _NOT_COUNTED]
    wanted = max((ops.step[row] for row in rows), default=0) if step is None else step
    for row in rows:
        if ops.step[row] != wanted:
            continue
        stretch, phase = once, ops.phase[row]
        if phase in _OF_A_MICRO_BATCH:
            if not passes or (last_phase == "backward" and phase != "backward"):
                passes.append(StreamTimeline(speed.overlaps))
            stretch, last_phase = passes[-1], phase
        for copy, by_processor in waits.get(row, ()):
            stretch.wait(copy, by_processor=by_processor, in_backward=phase == "backward")
        name = names[ops.name[row]]
        if exchange is not None and name in _EXCHANGES:
            kind = _EXCHANGES[name]
            seconds = exchange.seconds_of(kind, ops.moved_bytes[row])
            if kind == "all_reduce":  # gradients are reduced after the last micro-batch
                once.waited += seconds
            else:
                stretch.fetched += seconds
            continue
        asked = name, ops.flops[row], ops.moved_bytes[row], ops.outside_bytes[row], ops.dtype[row]
        if asked not in kernels:
            kernels[asked] = _kernel_seconds(trace, row, name, speed)
        # On a processor, the step also clears fresh pages: memory that the heap returned is mapped anew.
        kernel_seconds = kernels[asked] + fresh_bytes.get(row, 0) * speed.fresh_seconds_per_byte
        if row in beside:
            seconds = speed.kernel_seconds + ops.outside_bytes[row] / speed.link_bytes_per_second
            stretch.copy(row, speed.op_seconds, seconds, to_device=beside[row])
            continue
        call_seconds, copy_seconds, work_seconds = _host_seconds(trace, row, name, speed)
        if is_captured[row]:  # the ops of a graph are launched at once
            call_seconds = 0.0 if row and is_captured[row - 1] else _REPLAY_CALLS * speed.op_seconds
        stretch.run(call_seconds, kernel_seconds + copy_seconds)
        stretch.work(work_seconds, adds_up=phase == "backward" and ops.by_autograd[row])
    return [one.seconds for one in passes], once.seconds


def _waits_by_row(trace: Trace) -> dict[int, list[tuple[int, bool]]]:
    found: dict[int, list[tuple[int, bool]]] = {}
    for row, copy, by_processor in trace.waits:
        found.setdefault(row, []).append((copy, by_processor))
    return found


def _host_seconds(trace: Trace, row: int, name: str, speed: Speed) -> tuple[float, float, float]:
    """Return the seconds of an op's call, of its copy over the link, and of reading and writing host memory."""
    ops = trace.ops
    moved_bytes, outside_bytes = ops.moved_bytes[row], ops.outside_bytes[row]
    call_seconds = _call_seconds(ops.phase[row], ops.by_autograd[row] or name in _CAST_BELOW, speed)
    if not (moved_bytes or ops.flops[row] or outside_bytes):
        return call_seconds * VIEW_SHARE, 0.0, 0.0
    if speed.overlaps and not moved_bytes:
        return call_seconds, 0.0, outside_bytes / speed.host_bytes_per_second
    return call_seconds, outside_bytes / speed.link_bytes_per_second, 0.0


def _call_seconds(phase: Phase, is_below: bool, speed: Speed) -> float:
    if phase in _CALLED_BARE:
        return speed.op_seconds
    return speed.backward_op_seconds if is_below else speed.module_op_seconds


def _kernel_seconds(trace: Trace, row: int, name: str, speed: Speed) -> float:
    ops = trace.ops
    flops, moved_bytes = ops.flops[row], ops.moved_bytes[row]
    if not (moved_bytes or flops) or (speed.overlaps and ops.outside_bytes[row]):  # a view, or a copy over the link
        return 0.0
    curves = speed.bytes_per_second
    seconds = moved_bytes / rate_at(curves.get(_KINDS.get(name, "plain")) or curves["plain"], moved_bytes or 1)
    if flops:
        products = speed.flops_per_second
        curve = products.get(trace.texts[ops.dtype[row]]) or products["float32"]
        seconds = max(seconds, flops / rate_at(curve, flops / (moved_bytes or 1)))
    return max(seconds, speed.kernel_seconds)


def _plain_name(op: str) -> str:
    """Return the short name of an op: ``add`` for ``aten.add.Tensor``."""
    parts = op.split(".")
    return parts[1] if len(parts) == 3 else op
