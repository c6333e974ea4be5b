"""When the ops of a stretch of a training are done, in modelled time: what runs beside what, and who waits for whom.

    timeline = StreamTimeline(overlaps=True)
    timeline.run(call_seconds, kernel_seconds)                         # a kernel, or a copy in the device's queue
    timeline.copy(row, call_seconds, copy_seconds, to_device=True)     # one on a stream of its own
    timeline.wait(row, by_processor=False)
    timeline.seconds

Does NOT know that a link is slower in each direction while both are in use, nor how long the queue may get.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StreamTimeline:
    """The seconds from the begin of a stretch from which on processor, device and link run nothing.

    ``waited`` is what ranks take to add up gradients when a pass has ended, ``fetched`` what a pass exchanges with them
    beside its kernels. Where nothing overlaps, the processor does it all, and copies are ops like others.
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
        """Call an op of the device, which takes so long there."""
        self.processor += call_seconds
        if not self.overlaps:
            self.processor += seconds
        elif seconds:  # it begins when it has been called and the one before it in the queue has ended
            self.device = max(self.device, self.processor) + seconds

    def copy(self, row: int, call_seconds: float, seconds: float, *, to_device: bool) -> None:
        """Ask for a copy beside the queue, by which ``row`` it will be waited for."""
        self.processor += call_seconds
        # The link carries one at a time in each direction. It begins when what was asked of the device before is done
        # (`plimsoll.techniques.mechanisms.side_stream`).
        begin = max(self.link[to_device], self.device, self.processor)
        self.link[to_device] = self.arrivals[row] = begin + seconds

    def wait(self, row: int, *, by_processor: bool, in_backward: bool = False) -> None:
        """Begin what comes next when a copy has ended: on the device, or on the processor, too.

        In backward it is the thread that adds up gradients which waits, and what the device does goes on.
        """
        arrival = self.arrivals.get(row, 0.0)
        if by_processor and in_backward:
            self.adding = max(self.adding, arrival)
            return
        self.device = max(self.device, arrival)
        if by_processor:
            self.processor = max(self.processor, arrival)

    def work(self, seconds: float, *, adds_up: bool) -> None:
        """Let the processor work itself, in memory of the host; what adds up gradients has a thread of its own."""
        if adds_up and self.overlaps:
            self.adding += seconds
        else:
            self.processor += seconds

    @property
    def seconds(self) -> float:
        """When everything is done."""
        if not self.overlaps:
            return self.processor + self.fetched + self.waited
        timeline = (self.processor, self.adding, self.device, self.fetched, *self.link.values())
        return max(timeline) + self.waited
