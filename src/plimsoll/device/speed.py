"""The speed of a device: measured here in two seconds, or taken from the table of GPUs.

    speed = measured_speed()              # measured once, then read from a file
    speed = speed_of(find_gpu("rtx3060"))

A measurement holds for a processor, a number of threads and a version of torch. It is cached in the folder
``PLIMSOLL_CACHE``, or in ``plimsoll`` in the user's cache folder.

The table of GPUs has peak rates. The shares of these rates that training reaches, and the overheads of calls, were
recorded on one card. Call overheads depend on the host more than on the card, so their range is wide.

Does NOT account for clocks that fall when a device gets hot, or for other programs.
"""

from __future__ import annotations

import hashlib
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from plimsoll.device.cpu.backend import processor_name
from plimsoll.device.launch_overhead import measure_launches
from plimsoll.errors import OutputError, RecordError
from plimsoll.records.base import Record, cache_folder
from plimsoll.records.device import DeviceSpec
from plimsoll.records.speed import Curve, MovingKind, Point, Speed

Kept = TypeVar("Kept", bound=Record)

_MIB = 1 << 20
_MEASURED_SPREAD, _TABLE_SPREAD = 0.25, 0.5
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# On a CPU, training calls ops from Python through modules and autograd. A call then takes 7 times as long as a bare
# call in a loop (benchmarks/plan_time_model.py: Hugging Face and torch.nn models with very small tensors).
_CALL_FACTOR = 7.0
# Shares of peak that an H200 reached (benchmarks/recorded). For matrix products: (arithmetic intensity relative to the
# ridge point, at which peak compute and peak bandwidth balance; share of peak FLOP/s). For other ops: share by kind.
_PRODUCT_SHARES = ((0.03, 0.02), (0.3, 0.1), (1.0, 0.33), (4.0, 0.6), (16.0, 0.75))
_MOVING_SHARES: dict[MovingKind, float] = {
    "plain": 0.8, "strided": 0.45, "transcendental": 0.65, "normalize": 0.65, "random": 0.35, "gather": 0.3,
}  # fmt: skip
# Call overheads on the host of that H200. The first is of a recorded bare call; the other two, for module forward and
# autograd, follow from recorded passes of five models. With one model left out they are 42 to 46 and 8 to 14
# microseconds (benchmarks/plan_time_gpu.py --hold-out).
_GPU_OP_SECONDS, _GPU_MODULE_OP_SECONDS, _GPU_BACKWARD_OP_SECONDS = 7.3e-6, 42e-6, 14e-6
_GPU_KERNEL_SECONDS = 3e-6
_LONGEST_SECONDS, _LEAST_RUNS = 0.02, 3  # of one measurement
_NUM_QUEUED = 8  # consecutive kernels, so that they hide the call overhead
# Bytes per second of AdamW on the host, inferred: 9.2 GB in the 0.33 s of a layer_streaming step outside its passes.
_HOST_BYTES_PER_SECOND = 27e9
_LINK_SHARE = 0.8
_FILE_SHARE = 0.5  # pages that have been written back to disk fault again at the next write
# Assumptions for cards without known rates: a low but usual bandwidth among cards of the table, and FLOPs per SM and
# cycle of Ampere and later, at a usual clock.
_UNKNOWN_BYTES_PER_SECOND, _UNKNOWN_SM_FLOPS, _UNKNOWN_NUM_SMS = 200e9, 256 * 1.7e9, 20
_UNKNOWN_LINK_BYTES_PER_SECOND = 12e9


def measured_speed(progress: Callable[[str], object] = lambda text: None, device: str = "cpu") -> Speed:
    """Return the speed of a device of this machine, from the cache file or measured now.

    Args:
        progress: callback that receives a message before a measurement.
        device: ``"cpu"``, or a CUDA device of this machine.
    """
    name = name_of(device)

    def measure() -> Speed:
        progress(f"measuring the speed of {name}, once")
        return measure_speed(device)

    return measured_once("speed", Speed, name, lambda speed: speed.device == name, measure)


def measured_once(
    prefix: str, kind: type[Kept], name: str, is_this: Callable[[Kept], bool], measure: Callable[[], Kept]
) -> Kept:
    """Return a measurement from its cache file, or measure and cache it.

    Args:
        prefix: prefix of the file name.
        kind: class of the record.
        name: identifies the measured device, see `name_of`.
        is_this: function that returns whether a cached record belongs to the measured device.
        measure: function that performs the measurement.
    """
    path = cache_folder() / f"{prefix}-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
    try:
        known = kind.load(path)
        if is_this(known):
            return known
    except RecordError:
        pass  # missing or incomplete: measure again
    found = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.save(path)
    except (OSError, OutputError):
        pass  # measured again next time
    return found


def measure_speed(device: str = "cpu") -> Speed:
    """Measure a device of this machine, in about two seconds.

    Args:
        device: see `measured_speed`.
    """
    probe, name = _Probe(device), name_of(device)
    launches = None if probe.is_cpu else measure_launches(device)
    with torch.no_grad(), torch.random.fork_rng([] if probe.is_cpu else [torch.device(device)]):
        gain = probe.gain_of_threads()
        with _one_thread():
            op_seconds = probe.call_seconds() * (_CALL_FACTOR if probe.is_cpu else 1.0)
            link_rate = probe.file_rate() if probe.is_cpu else probe.host_link_rate()
            return Speed(
                device=name,
                source="measured",
                flops_per_second={name: _faster(probe.products(dtype), gain) for name, dtype in _DTYPES.items()},
                bytes_per_second={kind: _faster(curve, gain) for kind, curve in probe.moving().items()},
                op_seconds=op_seconds,
                module_op_seconds=launches.module_op_seconds if launches else op_seconds,
                backward_op_seconds=launches.backward_op_seconds if launches else op_seconds,
                kernel_seconds=0.0 if probe.is_cpu else _GPU_KERNEL_SECONDS,
                fresh_seconds_per_byte=probe.fresh_seconds_per_byte() / gain if probe.is_cpu else 0.0,
                link_bytes_per_second=link_rate,
                host_bytes_per_second=link_rate if probe.is_cpu else _HOST_BYTES_PER_SECOND,
                overlaps=not probe.is_cpu,
                spread=_MEASURED_SPREAD,
            )


def speed_of(spec: DeviceSpec) -> Speed:
    """Return the expected speed of a GPU from its specification.

    If the specification lacks a rate, the rate of a small card is assumed.
    """
    moved = float(spec.memory_bytes_per_second or _UNKNOWN_BYTES_PER_SECOND)
    single = spec.flops.fp32 or (spec.num_sms or _UNKNOWN_NUM_SMS) * _UNKNOWN_SM_FLOPS
    # Without hardware support for a type, products run in float32 with casts.
    peaks = {"float32": single, "float16": spec.flops.fp16 or single, "bfloat16": spec.flops.bf16 or single / 2}
    return Speed(
        device=spec.name,
        source="table",
        flops_per_second={name: _shares_of(best, moved) for name, best in peaks.items()},
        bytes_per_second={kind: (Point(at=1, rate=share * moved),) for kind, share in _MOVING_SHARES.items()},
        op_seconds=_GPU_OP_SECONDS,
        module_op_seconds=_GPU_MODULE_OP_SECONDS,
        backward_op_seconds=_GPU_BACKWARD_OP_SECONDS,
        kernel_seconds=_GPU_KERNEL_SECONDS,
        link_bytes_per_second=_LINK_SHARE * (spec.host_link_bytes_per_second or _UNKNOWN_LINK_BYTES_PER_SECOND),
        host_bytes_per_second=_HOST_BYTES_PER_SECOND,
        overlaps=True,
        spread=_TABLE_SPREAD,
    )


def _shares_of(flops_per_second: float, bytes_per_second: float) -> Curve:
    ridge = flops_per_second / bytes_per_second
    return tuple(Point(at=at * ridge, rate=share * flops_per_second) for at, share in _PRODUCT_SHARES)


def name_of(device: str) -> str:
    """Return the text that identifies a measurement in the cache.

    It contains the device and the version of torch; for the CPU, also the number of threads.
    """
    if device == "cpu":
        what = f"{processor_name()}, {torch.get_num_threads()} threads"
    else:
        what = torch.cuda.get_device_name(device)
    return f"{what}, torch {torch.__version__}"


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _faster(curve: Curve, gain: float) -> Curve:
    return tuple(Point(at=point.at, rate=point.rate * gain) for point in curve)


class _Probe:
    """The measurements of one device."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self.is_cpu = self._device.type == "cpu"

    def best_seconds(self, run: Callable[[], object]) -> float:
        """Return the shortest time of several runs after a warm-up. On a GPU, each run queues several kernels."""
        num_queued = 1 if self.is_cpu else _NUM_QUEUED
        run()
        found: list[float] = []
        ends = time.perf_counter() + _LONGEST_SECONDS
        while len(found) < _LEAST_RUNS or time.perf_counter() < ends:
            self._wait()
            started = self._now()
            for _ in range(num_queued):
                run()
            self._wait()
            found.append((self._now() - started) / num_queued)
        return min(found)  # other programs can only make a run slower

    def _now(self) -> float:
        return time.thread_time() if self.is_cpu else time.perf_counter()

    def gain_of_threads(self) -> float:
        """Return how many times faster all threads together are than one thread, for matrix products.

        Each thread computes its own products, and only its CPU time counts. Wall time would also depend on how busy the
        machine is. The effect of shared resources (units of a core, caches, clocks) is included.
        """
        num_threads = torch.get_num_threads()
        if not self.is_cpu or num_threads == 1:
            return 1.0
        with (
            _one_thread(),
            ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as threads,
        ):
            alone = self._seconds_of_products()
            at_once = list(threads.map(lambda _: self._seconds_of_products(), range(num_threads)))
        return sum(min(alone / seconds, 1.0) for seconds in at_once)

    def _seconds_of_products(self) -> float:
        left, right = self._random(256, 256), self._random(256, 256)
        result = left @ right
        found, ends = [], time.perf_counter() + 0.1
        while time.perf_counter() < ends:
            started = time.thread_time()
            torch.mm(left, right, out=result)
            found.append(time.thread_time() - started)
        return statistics.median(found)

    def products(self, dtype: torch.dtype) -> Curve:
        """Measure the FLOPs per second of matrix products whose left factor has more and more rows."""
        side = 512 if self.is_cpu else 4096
        points = []
        for rows in (1, 8, 32, 128, side) if dtype == torch.float32 else (32, side):
            left, right = self._random(rows, side).to(dtype), self._random(side, side).to(dtype)
            result = left @ right
            flops = 2 * rows * side * side
            moved_bytes = sum(one.numel() * one.element_size() for one in (left, right, result))
            seconds = self.best_seconds(lambda: torch.mm(left, right, out=result))  # noqa: B023 -- called at once
            points.append(Point(at=flops / moved_bytes, rate=flops / seconds))
        return tuple(points)

    def moving(self) -> dict[MovingKind, Curve]:
        """Measure the bytes per second of memory-bound ops of each kind. Plain ops are measured at several sizes."""
        sides = (_MIB // 32, _MIB // 4, 2 * _MIB, 8 * _MIB) if self.is_cpu else (_MIB // 4, 4 * _MIB, 64 * _MIB)
        num = _MIB // 2 if self.is_cpu else 16 * _MIB
        source, result = self._random(num // 256, 256), self._random(num // 256, 256)
        turned = source.view(-1, 8, 8, 256).transpose(1, 2)
        rows = torch.randint(len(source), (len(source) // 4,), device=self._device)
        picked = torch.empty(len(rows), 256, device=self._device)
        kinds: dict[MovingKind, tuple[int, Callable[[], object]]] = {
            "strided": (8 * num, lambda: result.view(-1, 8, 8, 256).copy_(turned)),
            "transcendental": (8 * num, lambda: torch.tanh(source, out=result)),
            "normalize": (8 * num, lambda: functional.log_softmax(source, -1)),
            "random": (4 * num, lambda: result.bernoulli_(0.9)),
            "gather": (2 * num, lambda: torch.index_select(source, 0, rows, out=picked)),
        }
        found: dict[MovingKind, Curve] = {"plain": tuple(self._plain(side) for side in sides)}
        for kind, (num_bytes, run) in kinds.items():
            found[kind] = (Point(at=num_bytes, rate=num_bytes / self.best_seconds(run)),)
        return found

    def _plain(self, num: int) -> Point:
        first, second, result = (self._random(num) for _ in range(3))
        seconds = self.best_seconds(lambda: torch.add(first, second, out=result))
        return Point(at=12 * num, rate=12 * num / seconds)

    def call_seconds(self) -> float:
        """Measure the overhead of a call, in seconds, with an op on a tiny tensor."""
        small, num_calls = self._random(8), 500

        def run() -> None:
            for _ in range(num_calls):
                small.add(1.0)

        return self.best_seconds(run) / num_calls

    def fresh_seconds_per_byte(self) -> float:
        """Measure how much longer the first write to new memory takes than the second, in seconds per byte."""
        num_bytes = 32 * _MIB

        def fill() -> float:
            with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
                memory = torch.frombuffer(mapped, dtype=torch.float32)
                started = time.thread_time()
                memory.fill_(1.0)
                first = time.thread_time()
                memory.fill_(2.0)
                ended = time.thread_time()
                del memory
            return (first - started) - (ended - first)

        return max(min(fill() for _ in range(4)), 0.0) / num_bytes

    def file_rate(self) -> float:
        """Return the assumed bytes per second of writing to and reading from a mapped file.

        This is half of the rate measured with pages in memory, because pages that were written back fault at the next
        write.
        """
        num_bytes = 32 * _MIB
        with tempfile.TemporaryFile() as file:
            file.truncate(num_bytes)
            with mmap.mmap(file.fileno(), num_bytes) as mapped:
                return _FILE_SHARE * 2 * num_bytes / self._seconds_of_copies(mapped)

    def _seconds_of_copies(self, mapped: mmap.mmap) -> float:
        there = torch.frombuffer(mapped, dtype=torch.float32)
        here = torch.ones_like(there)
        return self.best_seconds(lambda: here.copy_(there.copy_(here)))

    def host_link_rate(self) -> float:
        """Measure the bytes per second copied from pinned memory to the device."""
        source = torch.ones(16 * _MIB, pin_memory=True)
        there = torch.empty_like(source, device=self._device)
        return 64 * _MIB / self.best_seconds(lambda: there.copy_(source, non_blocking=True))

    def _random(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self._device)

    def _wait(self) -> None:
        if not self.is_cpu:
            torch.cuda.synchronize(self._device)
