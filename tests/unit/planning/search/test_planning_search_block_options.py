"""The blocks that are offered for checkpointing, for models with a handmade trace.

Each block saves 10 MiB for backward, or 2 MiB if it is checkpointed. Checkpointing all blocks saves 8 MiB per block.
"""

from torch import nn

from hand_traces import trace_of
from plimsoll.models.workload import Workload, model_loss
from plimsoll.planning.search.block_options import some_blocks

MIB = 1 << 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x)


class Model(nn.Module):
    def __init__(self, num_blocks):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def workload(num_blocks=4):
    return Workload(Model(num_blocks), None, model_loss, "samples")


def trace(*work, saved_mib=8):
    """Return a trace with two ops per block: its inner op, which does `work`, and its output."""
    ops = []
    for block in range(len(work)):
        ops += [
            ("forward", 1, f"+a{block} activations {saved_mib * MIB}"),
            ("forward", 1, f"+o{block} activations {2 * MIB}"),
        ]
    made = trace_of(*ops, work={2 * block: done for block, done in enumerate(work)})
    names = {f"layer{number}": f"layers.{number // 2}.inner" for number in range(2 * len(work))}
    return made.model_copy(update={"texts": tuple(names.get(text, text) for text in made.texts)})


WORK = [{"moved_bytes": 2}, {"flops": 30}, {"flops": 10}, {"flops": 10}]  # moving a byte takes as long as 10 operations


def test_the_cheapest_blocks_for_a_quarter_a_half_and_three_quarters_of_what_all_save():
    """The last block is never offered: nothing runs after it that could use the freed memory."""
    found = some_blocks(workload(), trace(*WORK))
    assert [one.choice.options["blocks"] for one in found] == ["2", "0,2", "0-2"]
    assert [one.bytes_share for one in found] == [1 / 4, 2 / 4, 3 / 4]
    assert [one.seconds_share for one in found] == [10 / 70, 30 / 70, 60 / 70]
    assert {one.choice.technique for one in found} == {"checkpointing"}


def test_the_same_subset_is_offered_once():
    """Of two blocks only the first can help, both for a quarter and for a half of the savings."""
    (one,) = some_blocks(workload(2), trace({"flops": 10}, {"flops": 10}))
    assert (one.choice.options["blocks"], one.bytes_share, one.seconds_share) == ("0", 1 / 2, 1 / 2)


def test_blocks_that_keep_no_more_than_their_output_are_not_offered():
    assert some_blocks(workload(), trace(*WORK, saved_mib=0)) == ()


def test_a_model_without_blocks_has_no_subsets():
    assert some_blocks(Workload(nn.Linear(2, 2), None, model_loss, "samples"), trace({"flops": 1})) == ()
