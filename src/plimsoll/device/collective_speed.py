"""Speed of all-reduce, all-gather and reduce-scatter between ranks: measured over gloo on the CPU, assumed for GPUs.

    exchange = measured_exchange(num_ranks=2)                 # measured once, then read from a file
    exchange = exchange_of(find_gpu("rtx3060"), num_ranks=4)

Does NOT cover several machines and their network, or other programs that use the links.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from plimsoll.device.speed import measured_once, name_of
from plimsoll.records.device import DeviceSpec
from plimsoll.records.speed import ExchangeKind, ExchangeSpeed, Point

_MIB = 1 << 20
_MOST_MEASURED_RANKS = 4
_SIZES_BYTES = (_MIB, 8 * _MIB)
_NUM_RUNS, _NUM_CALLS = 6, 30
_TIMEOUT = timedelta(seconds=60)

# Bytes per second in one direction, over all links of a card. This is half of the bidirectional rate in the data sheets
# of V100 SXM2, A100 SXM, H100 SXM, H200 SXM and B200.
_NVLINK_BYTES_PER_SECOND = {
    "V100-SXM2": 150e9,
    "A100-SXM4": 300e9,
    "H100 80GB HBM3": 450e9,
    "H200": 450e9,
    "B200": 900e9,
}
# Assumed share of the link rate that NCCL reaches. Cards without NVLink, and consumer cards without peer access, use
# host memory.
_NVLINK_SHARE, _HOST_LINK_SHARE = 0.7, 0.4
_UNKNOWN_LINK_BYTES_PER_SECOND = 12e9
# Assumed latencies in seconds: of an NCCL collective, and of an agreement over gloo on one machine (0.1 ms if idle, 0.8
# ms on two busy cores).
_NCCL_CALL_SECONDS, _AGREE_SECONDS = 30e-6, 3e-4


def measured_exchange(num_ranks: int, progress: Callable[[str], object] = lambda text: None) -> ExchangeSpeed:
    """Return the speed of collectives between ranks on this CPU, from the cache file or measured now.

    Args:
        num_ranks: the number of ranks, at least 2.
        progress: callback that receives a message before a measurement.
    """
    name = name_of("cpu")

    def measure() -> ExchangeSpeed:
        progress(f"measuring collectives of {num_ranks} ranks, once")
        return measure_exchange(num_ranks)

    def is_this(speed: ExchangeSpeed) -> bool:
        return (speed.device, speed.num_ranks) == (name, num_ranks)

    return measured_once(f"exchange-{num_ranks}", ExchangeSpeed, name, is_this, measure)


def measure_exchange(num_ranks: int) -> ExchangeSpeed:
    """Measure collectives between ranks on this CPU, in one or two seconds."""
    # Each rank is a thread with its own gloo group, over the loopback device as in `plimsoll train --nproc`.
    num_here = min(num_ranks, _MOST_MEASURED_RANKS)
    store = HashStore()
    with ThreadPoolExecutor(num_here) as ranks:
        found = list(ranks.map(lambda rank: _Rank(store, rank, num_here).measure(), range(num_here)))
    # A step waits for the slowest rank.
    seconds = {key: max(one[key] for one in found) for key in found[0]}
    # All ranks share the memory of one machine: the time grows with the bytes that all of them move.
    times = (num_ranks - 1) / (num_here - 1)
    call_seconds = seconds.pop(("all_reduce", 0)) * times
    rates: dict[ExchangeKind, list[Point]] = {}
    for (kind, num_bytes), one in seconds.items():
        rates.setdefault(kind, []).append(Point(at=num_bytes, rate=num_bytes / (one * times)))
    return ExchangeSpeed(
        device=name_of("cpu"),
        source="measured",
        num_ranks=num_ranks,
        bytes_per_second={kind: tuple(points) for kind, points in rates.items()},
        call_seconds=call_seconds,
        agree_seconds=call_seconds,
    )


def exchange_of(spec: DeviceSpec, num_ranks: int) -> ExchangeSpeed:
    """Return the assumed speed of collectives between GPUs of one machine.

    Args:
        spec: the GPU that each rank uses.
        num_ranks: the number of ranks, at least 2.
    """
    nvlink = next((rate for name, rate in _NVLINK_BYTES_PER_SECOND.items() if spec.name.startswith(name)), None)
    host_link = spec.host_link_bytes_per_second or _UNKNOWN_LINK_BYTES_PER_SECOND
    link = _NVLINK_SHARE * nvlink if nvlink is not None else _HOST_LINK_SHARE * host_link
    # For all-gather or reduce-scatter, a ring of N cards moves (N - 1) / N of a tensor through each link. All-reduce
    # moves twice as much (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    rate = link * num_ranks / (num_ranks - 1)
    return ExchangeSpeed(
        device=spec.name,
        source="assumed",
        num_ranks=num_ranks,
        bytes_per_second={
            "all_reduce": (Point(at=1, rate=rate / 2),),
            "all_gather": (Point(at=1, rate=rate),),
            "reduce_scatter": (Point(at=1, rate=rate),),
        },
        call_seconds=_NCCL_CALL_SECONDS,
        agree_seconds=_AGREE_SECONDS,
    )


class _Rank:
    """One rank of the measurement, which runs in a thread of this process."""

    def __init__(self, store: HashStore, rank: int, num_ranks: int) -> None:
        # `Any`, because torch's stubs lack the group's methods.
        self._group: Any = dist.ProcessGroupGloo(store, rank, num_ranks, _TIMEOUT)
        self._num_ranks = num_ranks

    def measure(self) -> dict[tuple[ExchangeKind, int], float]:
        """Return the seconds of each collective, by its kind and the bytes of the whole tensor.

        A tensor of one element measures the latency, and is listed with 0 bytes.
        """
        group, small = self._group, torch.zeros(1)
        found: dict[tuple[ExchangeKind, int], float] = {
            ("all_reduce", 0): self._best(partial(group.allreduce, [small]), _NUM_CALLS)
        }
        for num_bytes in _SIZES_BYTES:
            part = torch.zeros(num_bytes // 4 // self._num_ranks)
            whole = torch.zeros(len(part) * self._num_ranks)
            runs: tuple[tuple[ExchangeKind, Callable[[], Any]], ...] = (
                ("all_reduce", partial(group.allreduce, [whole])),
                ("all_gather", partial(group._allgather_base, whole, part)),
                ("reduce_scatter", partial(group._reduce_scatter_base, part, whole)),
            )
            for kind, run in runs:
                found[kind, num_bytes] = self._best(run, _NUM_RUNS)
        return found

    @staticmethod
    def _best(start: Callable[[], Any], num_runs: int) -> float:
        """Return the seconds of the fastest of several runs. All ranks must call this with the same number of runs."""
        seconds = []
        for _ in range(num_runs):
            started = time.perf_counter()
            start().wait()
            seconds.append(time.perf_counter() - started)
        return min(seconds)
