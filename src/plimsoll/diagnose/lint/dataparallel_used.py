"""`nn.DataParallel`: in each step, one process copies the model to every device and gathers outputs on the first."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import Hit, Source

_NAMES = {
    "torch.nn.DataParallel", "torch.nn.parallel.DataParallel", "DataParallel", "torch.nn.parallel.data_parallel",
}  # fmt: skip


def hits(source: Source) -> Iterator[Hit]:
    """Find uses of `nn.DataParallel` and of the function `data_parallel`."""
    for call in source.calls:
        if source.dotted(call.func) in _NAMES:
            yield Hit(
                call,
                "DataParallel gathers outputs and gradients on the first device, which is full while others are empty",
                "use DistributedDataParallel under torchrun, one process per device",
            )
