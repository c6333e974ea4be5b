"""What the loop of the first of several ranks writes down of the others; real ranks are in tests/end_to_end."""

from types import SimpleNamespace

from plimsoll.distributed.ranks import Ranks
from plimsoll.records.run import OomEvent
from plimsoll.training.loop import _note_oom, _told_after_step


class FirstOfTwo(Ranks):
    """The first of two, of which the other has survived something in its update."""

    def __init__(self, event):
        super().__init__()
        self.world_size, self.event = 2, event

    def each(self, numbers):
        return [list(numbers), [0, 7, 1]]

    def gather(self, value):
        return [value, [self.event]]


def test_what_a_rank_alone_has_survived_is_written_down_with_its_rank():
    own, other = (OomEvent(family="cpu", phase="optimizer", step=3, live_bytes=live) for live in (1, 2))
    of_all = own.model_copy(update={"phase": "forward", "rank": 1})
    written, said = [], []
    training = SimpleNamespace(
        ranks=FirstOfTwo(other), stop=SimpleNamespace(signal_number=None), asked_all=None,
        directory=SimpleNamespace(append=written.append), sampler=SimpleNamespace(seconds=lambda: 0.0),
        view=SimpleNamespace(say=said.append),
    )  # fmt: skip
    for event in (of_all, own):  # as the step tells of them
        _note_oom(training, event)
    assert _told_after_step(training, 5, [of_all, own]) == (5, 7)
    assert [(event.rank, event.phase, event.live_bytes) for event in written] == [
        (1, "forward", 1), (0, "optimizer", 1), (1, "optimizer", 2)
    ]  # fmt: skip
    assert said[2].startswith("out of memory in optimizer on rank 1, step 3:")
