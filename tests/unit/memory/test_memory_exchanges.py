"""What is exchanged in a trace whose ops are named by hand."""

from hand_traces import trace_of
from plimsoll.memory.exchanges import exchange_of, kept_by_exchanges

MIB = 1 << 20
NAMES = {1: "c10d._allgather_base_", 2: "c10d._allgather_base_", 3: "c10d._reduce_scatter_base_", 4: "c10d.allreduce_"}


def exchanging(names=NAMES):
    work = {0: {"moved_bytes": 99 * MIB}, 1: {"moved_bytes": 3 * MIB}, 2: {"moved_bytes": 5 * MIB}}
    work |= {3: {"moved_bytes": 5 * MIB}, 4: {"moved_bytes": 8}}
    phases = ("forward", "forward", "backward", "backward", "backward")
    trace = trace_of(*((phase, 1 + (number > 0), "") for number, phase in enumerate(phases)), work=work)
    renamed = {f"aten.op{number}.default": f"{name}.default" for number, name in names.items()}
    return trace.model_copy(update={"texts": tuple(renamed.get(text, text) for text in trace.texts)})


def test_the_last_step_is_added_up_and_what_only_says_how_it_went_is_left_out():
    trace = exchanging({0: "c10d.allreduce_"} | NAMES)
    kept = kept_by_exchanges(trace, "cpu")
    exchange = exchange_of(trace, 4, kept)
    assert (exchange.num_ranks, exchange.kept) == (4, kept)
    assert (exchange.gathered_bytes, exchange.largest_gathered_bytes) == (8 * MIB, 5 * MIB)
    assert (exchange.scattered_bytes, exchange.largest_scattered_bytes) == (5 * MIB, 5 * MIB)
    assert (exchange.added_up_bytes, exchange.largest_added_up_bytes) == (0, 0)


def test_what_is_kept_is_modelled_of_gloo_and_assumed_of_nccl():
    trace = exchanging()
    gloo, nccl = kept_by_exchanges(trace, "cpu"), kept_by_exchanges(trace, "cuda")
    assert gloo.modelled_bytes == gloo.likely_bytes > 0
    assert nccl.assumed_bytes == nccl.likely_bytes > gloo.likely_bytes


def test_a_training_of_one_process_exchanges_nothing():
    assert kept_by_exchanges(exchanging({}), "cpu") is None
