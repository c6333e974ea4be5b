"""A simulated timeline of part of a training step: overlapping ops of processor, device and link, and waits.

    timeline = StreamTimeline(overlaps=True)
    timeline.run(call_seconds, kernel_seconds)                         # a kernel, or a copy in the device's queue
    timeline.copy(row, call_seconds, copy_seconds, to_device=True)     # a copy on a separate stream
    timeline.wait(row, by_processor=False)
    timeline.seconds

Not modelled: the link is slower if both directions are in use, and the queue of a device has a maximum length.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StreamTimeline:
    """The seconds at which processor, device and link become idle, relative to the start.

    ``link`` has a time for each direction; ``True`` is to the device. ``adding`` is the time of the thread that adds up
    gradients. ``waited`` is the time of the all-reduce of gradients after the last pass.

    ``fetched`` is the time of a pass's other exchanges with other ranks, which run in parallel with its kernels.
    ``arrivals`` are the times at which copies end, by row. If nothing overlaps, the processor does all work, and copies
    are ordinary ops.
    """

    overlaps: bool
    processor: float = 0.0
    adding: float = 0.0
    device: float = 0.0
    fetched: float = 0.0
    waited: float = 0.0
    link: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    arrivals: dict[int, float] = field(default_factory=dict)

    def run(self, call_seconds: float, seconds: float) -> None:
        """Add a device op: ``call_seconds`` on the processor, then ``seconds`` of its kernel on the device."""
        self.processor += call_seconds
        if not self.overlaps:
            self.processor += seconds
        elif seconds:  # it begins after its call and after the previous op in the queue
            self.device = max(self.device, self.processor) + seconds

    def copy(self, row: int, call_seconds: float, seconds: float, *, to_device: bool) -> None:
        """Add a copy on a separate stream. A later `wait` refers to it by ``row``."""
        self.processor += call_seconds
        # The link carries one copy at a time in each direction. A copy begins when the device has finished the work
        # queued before (`plimsoll.techniques.mechanisms.side_stream`).
        begin = max(self.link[to_device], self.device, self.processor)
        self.link[to_device] = self.arrivals[row] = begin + seconds

    def wait(self, row: int, *, by_processor: bool, in_backward: bool = False) -> None:
        """Delay later ops until a copy has ended: on the device and, with ``by_processor``, on the processor.

        If the processor waits in backward, only the thread that adds up gradients waits, and the device continues.
        """
        arrival = self.arrivals.get(row, 0.0)
        if by_processor and in_backward:
            self.adding = max(self.adding, arrival)
            return
        self.device = max(self.device, arrival)
        if by_processor:
            self.processor = max(self.processor, arrival)

    def work(self, seconds: float, *, adds_up: bool) -> None:
        """Add work of the processor in host memory.

        If work overlaps and ``adds_up`` is True, the thread that adds up gradients does it. Otherwise, it delays the
        processor.
        """
        if adds_up and self.overlaps:
            self.adding += seconds
        else:
            self.processor += seconds

    @property
    def seconds(self) -> float:
        """The time in seconds at which all work is done."""
        if not self.overlaps:
            return self.processor + self.fetched + self.waited
        timeline = (self.processor, self.adding, self.device, self.fetched, *self.link.values())
        return max(timeline) + self.waited
