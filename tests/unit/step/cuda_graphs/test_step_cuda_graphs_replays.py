"""Replayed micro-batches equal plain steps bit for bit; a refused replay names its reason.

A tape of operators stands in for the graph (`op_tapes`); tests/numerics/test_replays_cuda.py has real ones.
"""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch

from op_tapes import OpTape
from plimsoll.errors import PlimsollWarning
from plimsoll.step.cuda_graphs import capture as captured
from plimsoll.step.cuda_graphs.replays import shape_of
from plimsoll.step.failpoints import armed
from plimsoll.techniques import cuda_graph
from replayed import (
    CHECKPOINTING,
    GRAPH,
    NUM_STEPS,
    Net,
    batches,
    both,
    loss_of,
    refused,
    require_the_same_bits,
    trained,
)
from technique_trainings import NUM_STEPS as NUM_LOSSES
from technique_trainings import TRAININGS, Trained, configuration_of, expected_of, require_the_same, setup_for
from workloads import weights_of

REFUSED = dict.fromkeys(("t5", "tagger"), "hands Python a value that depends on the data")  # of their masks


@pytest.fixture
def tapes(monkeypatch):
    """Enable graphs on the CPU, and return the captured tapes."""
    monkeypatch.setitem(captured.GRAPHS, "cpu", OpTape)
    monkeypatch.setattr(cuda_graph, "_obstacle", lambda workload, setting: None)
    OpTape.made.clear()
    return OpTape.made


def test_steps_are_those_without_replays_and_a_smaller_last_micro_batch_runs_eagerly(tapes):
    """From the second step on, two of three micro-batches are replayed, with dropout, BatchNorm and clipping."""
    assert both(Net()).num_replays == 2 * (NUM_STEPS - 1)
    assert len(tapes) == 1
    assert tapes[0].is_released


def test_memory_of_replays_counts_from_the_step_after_the_capture(tapes):
    counted = []

    def note(step):
        counted.append((step.use().peak_bytes or 0) - (step.backend.use().peak_bytes or 0))

    trained(Net(), GRAPH, between_steps=note)
    assert [num_bytes > 0 for num_bytes in counted] in (
        [False, False, True, True],
        [False] * 4,
    )  # of a heap none is known


def test_a_step_that_is_put_back_keeps_the_graph_and_passes_settle_with_the_capture(tapes):
    """A trial of a plan times passes in this way, and restores everything afterwards."""
    settled = []

    def put_back(step):
        settled.append(step.replays.is_settled)
        step._retry.remember(batches()[0], None, None)
        step._retry.put_back(step._put_back_own)

    expected = trained(Net())
    found = trained(Net(), GRAPH, between_steps=put_back)
    require_the_same_bits(found, expected)
    assert settled == [False, True, True, True]
    assert len(tapes) == 1


def test_a_step_that_is_one_of_several_from_one_state_captures_as_any_other(tapes):
    """A trial runs several such passes; the random generator has advanced in between."""
    batch = batches()[0]

    def several(step):
        if step.num_steps == 1:
            shape = step._shape_of(batch)
            step._retry.remember(batch, None, None)
            torch.rand(3)
            for _ in range(2):
                step._drop_gradients()
                step._gradients(batch, 3, shape, shape)
            step._retry.put_back(step._put_back_own)

    found = trained(Net(), GRAPH, between_steps=several)
    require_the_same_bits(found, trained(Net()))
    assert found[2].num_replays == 2 * 2 + 2 * (NUM_STEPS - 1)


def test_a_micro_batch_that_is_the_whole_batch_is_replayed(tapes):
    assert both(Net(), micro_batch=8).num_replays == NUM_STEPS - 1


def test_checkpointed_blocks_are_recomputed_in_the_replay(tapes):
    from technique_trainings import gpt2, text

    data = [{name: value[start : start + 8] for name, value in text().items()} for start in (0, 8)] * 2
    options: dict[str, Any] = {"loss": lambda model, batch: model(**batch).loss, "data": data}
    assert both(gpt2(dropout=0.0), CHECKPOINTING, **options).num_replays == 2 * (NUM_STEPS - 1)


def test_autocast_in_bf16_is_in_the_graph(tapes):
    assert both(Net(), precision="bf16").num_replays == 2 * (NUM_STEPS - 1)


def test_shapes_that_change_run_eagerly_and_the_next_shape_is_captured_once_it_stays(tapes):
    data = batches(num_steps=2) + batches(num_samples=2, num_steps=8)
    replays = both(Net(), data=data)
    assert len(tapes) == 2
    assert replays.num_replays == 2 + 5  # after three steps without one it is dropped, and captured in the fourth


@pytest.mark.parametrize("training", TRAININGS)
def test_any_kind_of_model_is_trained_as_plain_pytorch_does(tapes, training):
    """Passes are replayed, or a reason against it is given."""
    setup = setup_for(training, ["cuda_graph"])
    step = setup.step([configuration_of(GRAPH)], recut_loss=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlimsollWarning)
        losses = [step(batch).loss for batch in setup.case.batches()[:NUM_LOSSES]]
    found = Trained(losses, weights_of(step.workload.model, step.workload.optimizer), [])
    require_the_same(found, expected_of(setup), "bitwise")
    assert step.replays.num_replays == (0 if training in REFUSED else NUM_LOSSES - 1)
    assert REFUSED.get(training, "") in (step.replays.why_not or "")
    step.close()


# -- what a replay would not do ----------------------------------------------------------------------------------------


class Counting:
    """A loss that counts its calls in a Python attribute."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, model, batch):
        self.num_calls += 1
        return loss_of(model, batch)


class Keeping(Net):
    """A model that keeps the output of its last pass."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


def on_host(x):
    return x * random.uniform(0.9, 1.1)


def with_value(x):
    return x * x.abs().sum().item()


def by_mask(x):
    return x + x[x > 0].sum()


HELD = torch.full((), 0.5)


def with_tensor_of_the_host(x):
    return x * HELD


@pytest.mark.parametrize(
    ("net", "loss", "why"),
    [
        (Net(), Counting(), "a pass changes loss, and a replay runs no Python"),
        (Keeping(), loss_of, "a pass changes model, and a replay runs no Python"),
        (Net(between=on_host), loss_of, "a pass draws random numbers on the host"),
        (Net(between=with_value), loss_of, "hands Python a value that depends on the data"),
        (Net(between=by_mask), loss_of, "returns a result whose size depends on the data"),
    ],
    ids=["counter", "kept", "random", "item", "mask"],
)
def test_what_a_replay_would_not_do_is_refused(tapes, net, loss, why):
    expected = copy.deepcopy(loss)
    trained(net, loss=expected)
    assert why in refused(net, loss=loss)
    assert not tapes or all(tape.is_released for tape in tapes)
    if isinstance(loss, Counting):  # by `refused` as well, which trains twice
        assert loss.num_calls == 2 * expected.num_calls


def test_a_value_that_python_alone_decides_may_be_read(tapes):
    def positions_jump(x):
        jumps = torch.arange(x.shape[1]).diff() != 1
        return x * 2 if bool(jumps.any()) else x

    assert both(Net(between=positions_jump)).num_replays == 2 * (NUM_STEPS - 1)


class Weighted:
    """A loss whose weight the loop changes between steps."""

    def __init__(self):
        self.weight = 1.0

    def __call__(self, model, batch):
        return loss_of(model, batch) * self.weight


def test_what_the_loop_changes_between_steps_is_captured_anew(tapes):
    """The weight changes twice in nine steps. Each change needs a capture, and no step uses the old weight."""

    def train(*more):
        loss = Weighted()

        def change(step):
            loss.weight = {3: 0.5, 6: 0.25}.get(step.num_steps, loss.weight)

        return trained(Net(), *more, loss=loss, data=batches(num_steps=9), between_steps=change)

    found = train(GRAPH)
    require_the_same_bits(found, train())
    assert len(tapes) == 3
    assert found[2].num_replays == 2 * 8


def test_what_the_loop_changes_in_every_step_ends_it(tapes):
    def train(*more):
        loss = Weighted()

        def change(step):
            loss.weight *= 0.9

        return trained(Net(), *more, loss=loss, data=batches(num_steps=8), between_steps=change)

    with pytest.warns(PlimsollWarning, match="loss changes again and again"):
        found = train(GRAPH)
    require_the_same_bits(found, train())


def test_a_number_that_is_set_to_the_same_again_is_no_change(tapes):
    def train(*more):
        loss = Weighted()

        def change(step):
            loss.weight = 10.0**step.num_steps / 10.0**step.num_steps  # another object each time

        return trained(Net(), *more, loss=loss, between_steps=change)

    assert train(GRAPH)[2].num_replays == 2 * (NUM_STEPS - 1)
    assert len(tapes) == 1


@pytest.mark.parametrize("kept", [lambda one: one, lambda one: one[0]], ids=["itself", "view"])
def test_a_gradient_that_a_hook_of_the_update_keeps_stays_as_it_was(tapes, kept):
    def train(*more):
        found = []

        def keep(step):
            weight, optimizer = step.workload.model.head.weight, step.workload.optimizer
            if step.num_steps == 2:
                handles.append(optimizer.register_step_pre_hook(lambda *_: found.append(kept(weight.grad))))
            elif handles:
                handles.pop().remove()

        handles = []
        require_the_same_bits(trained(Net(), *more, data=batches(num_steps=6), between_steps=keep), expected)
        return found

    expected = trained(Net(), data=batches(num_steps=6))
    assert all(torch.equal(*pair) for pair in zip(train(GRAPH), train(), strict=True))
    assert len(tapes) == 2


@pytest.mark.parametrize("what", ["frozen", "hook", "evaluated", "moved"])
def test_other_changes_between_steps_are_seen(tapes, what):
    def train(*more):
        def change(step):
            if step.num_steps != 2:
                return
            model = step.workload.model
            if what == "frozen":
                model.body[0].weight.requires_grad_(False)
            elif what == "hook":
                model.body.register_forward_hook(lambda module, args, result: result * 0.5)
            elif what == "evaluated":
                model.body[1].eval()
            else:
                model.head.weight.data = model.head.weight.data.clone() * 2

        return trained(Net(), *more, data=batches(num_steps=5), between_steps=change)

    found = train(GRAPH)
    require_the_same_bits(found, train())
    assert len(tapes) == 2


def test_memory_that_runs_out_in_a_replay_undoes_the_step_and_gives_the_graph_back(tapes):
    expected = trained(Net(), data=batches(num_steps=5))
    with armed("backward", 10):  # in step 3: three in the first, three and the two of the proof in the second
        found = trained(Net(), GRAPH, data=batches(num_steps=5))
    require_the_same_bits(found, expected)
    assert found[2].num_replays > 0


def test_memory_that_runs_out_in_a_capture_leaves_the_steps_without_one(tapes, monkeypatch):
    def capture(self, work):
        work()
        torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr(OpTape, "capture", capture)
    expected = trained(Net())
    with pytest.warns(PlimsollWarning, match="too little memory to capture a graph"):
        found = trained(Net(), GRAPH)
    require_the_same_bits(found, expected)
    assert found[2].num_replays == 0
    assert all(tape.is_released for tape in tapes)


def test_a_graph_that_computes_something_else_is_dropped(tapes, monkeypatch):
    replay = OpTape.replay

    def other(self):
        replay(self)
        self.ops[-1].returned[0].mul_(1.0001)

    monkeypatch.setattr(OpTape, "replay", other)
    assert refused(Net()) == "its replay gives other results than the pass"


def test_extra_state_and_iterators_are_not_captured_with(tapes):
    class Stateful:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    assert "extra_state is given" in refused(Net(), extra_state=[Stateful()])


def test_a_loop_inside_of_autocast_is_not_captured(tapes):
    """Its replays would continue to use the weights that were cast before the capture."""
    net = Net()
    with torch.autocast("cpu", torch.bfloat16):
        assert "inside torch.autocast" in refused(net)


def test_shapes_are_told_apart():
    one = {"x": torch.zeros(2, 3), "name": "a", "list": ["p", "q"]}
    assert shape_of(one, "cpu") == shape_of({**one, "x": torch.ones(2, 3)}, "cpu")
    for other in ({"x": torch.zeros(2, 4)}, {"x": torch.zeros(2, 3, dtype=torch.int)}, {"name": "b"}, {"list": ["p"]}):
        assert shape_of(one, "cpu") != shape_of({**one, **other}, "cpu")
    assert shape_of({"x": torch.zeros(2), "y": object()}, "cpu") is None


def test_numbers_that_lie_otherwise_where_they_are_read_in_place_are_not_replayed():
    whole = torch.zeros(4, 3)
    assert shape_of(whole, "cpu") == shape_of(whole.clone(), "cpu")
    assert shape_of(whole[1:], "cpu") is None
    assert shape_of(whole[1:], "cuda") is not None  # which are copied to it
    assert shape_of(whole.long()[1:], "cpu") is not None
