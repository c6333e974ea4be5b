"""Graphs that stay alive after a step, the objects that hold them, and the error of backward, in a user's own loop."""

import gc
from collections import deque

import pytest
import torch
from torch import nn

from plimsoll.diagnose.explain import explain
from plimsoll.errors import InputError
from plimsoll.records.diagnosis import GRAPH_IS_GONE
from plimsoll.records.plan import micro_batch_choice
from plimsoll.step.failpoints import armed
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques.time_segments import time_segments_choice

ELSEWHERE = {}


class Model(nn.Module):
    """A layer, and a method `keep` that stores its output."""

    def __init__(self, keep):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.keep = keep
        self.history = []
        self.state = None
        self.constant = None

    def forward(self, x):
        output = self.layer(x)
        getattr(self, self.keep)(output)
        return output

    def nothing(self, output):
        self.state = output.detach()

    def last(self, output):
        self.state = output

    def once(self, output):
        self.constant = output if self.constant is None else self.constant

    def all(self, output):
        self.history.append(output)

    def pair(self, output):
        self.history = [*self.history[-1:], output]

    def window(self, output):
        self.history = [*self.history[-2:], output]

    def mean(self, output):
        mean = output.mean()
        self.state = mean if self.state is None else 0.9 * self.state + 0.1 * mean

    def elsewhere(self, output):
        pass


class Recurrent(nn.Module):
    """A model that passes its state to the next step."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(4, 4, batch_first=True)
        self.hidden = None
        self.outputs = []

    def forward(self, x):
        output, self.hidden = self.cell(x.unsqueeze(1), self.hidden)
        self.outputs.append(output)
        return output


def mean_square(model, batch):
    loss = model(batch["x"]).square().mean()
    if getattr(model, "keep", None) == "elsewhere":
        ELSEWHERE["kept"].append(loss)
    return loss


def long_mean_square(model, batch):
    """Return the mean square of the output over seven time steps."""
    output, model.hidden = model.cell(batch["x"].unsqueeze(1).expand(4, 7, 4), model.hidden)
    return output.square().mean()


def step_of(model, **options):
    made = torch.optim.SGD(model.parameters(), lr=0.01)
    return TrainStep(model, made, options.pop("loss", mean_square), units="samples", **options)


def train(step, num_steps):
    for _ in range(num_steps):
        step({"x": torch.ones(4, 4)})
    return step


def trained(keep, num_steps=12, **options):
    return train(step_of(Model(keep), **options), num_steps)


@pytest.mark.parametrize("keep", ["nothing", "last", "once", "pair"])
def test_what_does_not_grow_makes_no_line(keep):
    step = trained(keep)
    assert not step.graphs.lines
    assert [looked for looked, _ in step.graphs.memory] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]


def test_a_list_of_outputs_is_found_with_its_line():
    """Each output has 4 x 4 float32, which is 64 bytes."""
    graphs = trained("all").graphs
    assert graphs.line_of(10) is graphs.line_of(11) is None  # of an earlier check, and none
    (retained,) = graphs.line_of(12).retained
    assert (retained.holder, retained.num_tensors, retained.num_bytes) == ("model.history", 12, 12 * 64)
    assert retained.alive_steps == retained.marked_steps == (1, 2, 3, 4, 5, 6, 7, 8, 10)
    assert retained.code == "self.history.append(output)"
    assert retained.remedy == "self.history.append(output.detach())"


def test_the_graph_is_counted_in_three_steps_and_no_more():
    """An output adds an Addmm node and a transposition of the weight, on two leaves that all outputs share."""
    counted = [line.retained[0].num_nodes for line in trained("all").graphs.lines]
    assert counted == [8, 10, 12] + [None] * 5
    assert {line.retained[0].graph_bytes for line in trained("all").graphs.lines} == {0, None}


def test_a_state_that_is_carried_on_keeps_all_steps():
    (retained,) = trained("mean").graphs.line_of(12).retained
    assert (retained.holder, retained.num_tensors, retained.num_bytes) == ("model.state", 1, 4)
    assert retained.alive_steps == (1, 2, 3, 4, 5, 6, 7, 8, 10)


def test_of_a_window_only_its_own_steps_are_alive():
    """The window has three outputs."""
    (retained,) = trained("window", num_steps=8).graphs.line_of(8).retained
    assert (retained.num_tensors, retained.alive_steps, retained.marked_steps) == (3, (6, 7), (1, 2, 3, 4, 5, 6, 7))


def test_losses_that_somebody_keeps_are_alive_and_have_no_name():
    """The list is in a dict that checks do not search: a global variable that the loss uses."""
    ELSEWHERE["kept"] = []

    def loss(model, batch):
        return mean_square(model, batch)

    try:
        step = trained("elsewhere", loss=loss)
        (retained,) = step.graphs.line_of(12).retained
        assert (retained.holder, retained.code) == ("", "")
        assert retained.alive_steps == retained.marked_steps == (1, 2, 3, 4, 5, 6, 7, 8, 10)
        assert (retained.num_tensors, retained.num_bytes) == (9, 0)
    finally:
        ELSEWHERE.clear()


@pytest.mark.parametrize(("num_kept", "alive_steps"), [(2, None), (3, (6, 7)), (5, (4, 5, 6, 7))])
def test_of_losses_too_it_takes_two_earlier_ones_to_be_worth_a_line(num_kept, alive_steps):
    ELSEWHERE["kept"] = deque(maxlen=num_kept)
    try:
        line = trained("elsewhere", num_steps=8, loss=lambda model, batch: mean_square(model, batch)).graphs.line_of(8)
        assert (line and line.retained[0].alive_steps) == alive_steps
    finally:
        ELSEWHERE.clear()


def test_checks_become_rare():
    watch = trained("nothing", num_steps=1).graphs
    due = []
    for step in range(2, 2002):
        if watch.is_due:
            due.append(step)
        watch.look(step)
    assert len(due) < 40
    assert due[-1] - due[-2] == 200


def test_marks_stay_few_the_first_and_the_last(monkeypatch):
    monkeypatch.setattr("plimsoll.step.sampled_steps._LONGEST_PAUSE_STEPS", 1)
    (retained,) = trained("all", num_steps=60).graphs.line_of(60).retained
    assert retained.marked_steps == (*range(1, 17), *range(44, 60))


def test_nothing_is_kept_alive_by_looking():
    step = trained("all")
    step.workload.model.history.clear()
    gc.collect()
    (marks,) = [marks for name, marks in step.graphs._marks.items() if name == "model.history"]
    assert marks.alive() == ()


def test_micro_batches_and_a_step_that_ran_out_of_memory_are_one_step():
    step = step_of(Model("all"), micro_batch=2)
    with armed("backward", 3):
        for _ in range(6):
            step({"x": torch.ones(4, 4)})
    (retained,) = step.graphs.line_of(6).retained
    assert retained.alive_steps == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_state_that_is_fed_back_is_named_with_its_line(micro_batch):
    step = step_of(Recurrent(), micro_batch=micro_batch, recut_loss=True)  # else it is refused before that
    with pytest.raises(InputError) as caught:
        train(step, 2)
    text = str(caught.value)
    assert text.startswith(
        f"step {1 if micro_batch else 2}: {GRAPH_IS_GONE}, which is already freed: `model.hidden` is"
    )
    assert "; self.hidden = tuple(state.detach() for state in self.hidden)`" in text
    assert "test_step_retained_graphs.py:" in text
    assert "outputs" not in text  # which is not read
    assert "backward through the graph a second time" in str(caught.value.__cause__)


def test_segments_in_time_name_it_as_plain_training_does():
    """`explain` quotes the error as evidence, until a step succeeds."""
    messages = []
    for fallbacks in ([[micro_batch_choice(4)]], [[micro_batch_choice(4), time_segments_choice(2)]]):
        model = Recurrent()
        step = step_of(model, fallbacks=fallbacks, loss=long_mean_square)
        with pytest.raises(InputError) as caught:
            train(step, 2)
        messages.append(str(caught.value))
        (finding,) = explain(step).findings
        assert finding.evidence[0].text == str(caught.value)
        model.hidden = None
        train(step, 1)
        assert not explain(step).findings
    assert messages[0] == messages[1]
    assert "`model.hidden` is" in messages[0]


def test_the_step_that_failed_for_it_is_undone():
    step = step_of(Recurrent())
    step({"x": torch.ones(4, 4)})
    before = [parameter.clone() for parameter in step.workload.model.parameters()]
    with pytest.raises(InputError):
        step({"x": torch.ones(4, 4)})
    assert all(torch.equal(a, b) for a, b in zip(before, step.workload.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in step.workload.model.parameters())
    assert step.num_steps == 1


def test_without_a_holder_the_remedy_is_general():
    carried = {}

    class Hidden:
        """A loss that stores its output in a place that checks do not search."""

        __slots__ = ()

        def __call__(self, model, batch):
            output = model(batch["x"] + carried.get("output", 0))
            carried["output"] = output.exp()
            return output.square().mean()

    step = step_of(nn.Linear(4, 4), loss=Hidden())
    with pytest.raises(InputError, match=r"no attribute of .*: write `hidden = hidden.detach\(\)` where it is carried"):
        train(step, 3)


def test_other_errors_of_backward_stay_as_they_are():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("a message of its own")

    step = step_of(nn.Linear(4, 4), loss=lambda model, batch: Broken.apply(model(batch["x"])).mean())
    with pytest.raises(RuntimeError, match="^a message of its own$"):
        step({"x": torch.ones(4, 4)})


@pytest.mark.parametrize("is_nested", [False, True], ids=["in a script", "in a function"])
def test_a_list_that_the_loop_around_the_step_fills_has_its_line(tmp_path, is_nested):
    """The user's loop stores it; the model and the loss store nothing."""
    program = [
        "model.history = []",
        "for _ in range(6):",
        "    step(batch)",
        "    model.history.append(model(batch).sum())",
    ]
    if is_nested:
        program = ["def train():", *(f"    {line}" for line in program), "train()"]
    (tmp_path / "loop.py").write_text("\n".join(program))
    model = nn.Linear(2, 2)
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).square().mean(),
        units="samples",
    )  # fmt: skip
    code = compile((tmp_path / "loop.py").read_text(), str(tmp_path / "loop.py"), "exec")
    exec(code, {"model": model, "step": step, "batch": torch.ones(4, 2)})
    (retained,) = step.graphs.lines[-1].retained
    assert retained.holder == "model.history"
    assert retained.place.endswith(f"loop.py:{program.index(program[3 + is_nested]) + 1}")
    assert retained.remedy == "model.history.append(model(batch).sum().detach())"
