"""Steps on tables with sparse gradients: only rows are copied for the undo; all else equals the dense case."""

import copy

import pytest
import torch
from tests.tally import Tally, in_a_check
from torch import nn

from plimsoll.device.base import backend_for
from plimsoll.embeddings.host import HostEmbedding
from plimsoll.embeddings.host_optimizer import optimizer_of
from plimsoll.errors import NonFiniteLossError
from plimsoll.step.failpoints import armed, exhaust_memory
from plimsoll.step.oom_boundary import Position
from plimsoll.step.train_step import TrainStep
from plimsoll.step.update.commit import StepCommit
from plimsoll.step.update.sparse import bytes_of, bytes_updated, changed_rows, clippable

# torch 2.13 warns once in a process, about the sparse tensors that any optimizer makes.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")

ROWS, WIDTH, NUM_STEPS = 200_000, 4, 4  # a table of 3 MB: larger than a chunk, so a separate chunk
PHASES = ("copy", "forward", "loss", "backward", "clip", "optimizer")


class Bag(nn.Module):
    def __init__(self, table, with_head):
        super().__init__()
        self.table = table
        self.head = nn.Linear(WIDTH, 3) if with_head else nn.Identity()

    def forward(self, ids):
        return self.head(self.table(ids).mean(1))


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch["ids"]), batch["labels"])


def batches():
    generator = torch.Generator().manual_seed(3)
    for _ in range(NUM_STEPS):
        ids = torch.randint(0, 90, (8, 6), generator=generator) ** 2
        yield {"ids": ids, "labels": torch.randint(0, 3, (8,), generator=generator)}


def fresh(on_host, kind, path=None):
    """Return a model with a host or plain table, and its optimizer. SparseAdam accepts no other parameters."""
    torch.manual_seed(1)
    plain = nn.Embedding(ROWS, WIDTH, sparse=True)
    table = HostEmbedding.from_rows(plain.weight.detach(), path=path) if on_host else plain
    torch.manual_seed(2)
    model = Bag(table, with_head=kind is not torch.optim.SparseAdam)
    return model, optimizer_of(model, kind, lr=0.1) if on_host else kind(model.parameters(), lr=0.1)


def by_hand(kind, clip_norm=None, cut=8):
    """Train in plain PyTorch, with the norm of the coalesced gradients."""
    model, optimizer = fresh(False, kind)
    for batch in batches():
        optimizer.zero_grad()
        for start in range(0, 8, cut):
            chunk = {name: value[start : start + cut] for name, value in batch.items()}
            (loss_of(model, chunk) * (cut / 8)).backward()
        model.table.weight.grad = model.table.weight.grad.coalesce()
        if clip_norm is not None:
            values = [p.grad._values() if p.grad.is_sparse else p.grad for p in model.parameters()]
            norm = torch.stack([value.norm() for value in values]).norm()
            for value in values:
                value.mul_(torch.clamp(clip_norm / (norm + 1e-6), max=1.0))
        optimizer.step()
    return state_of(model, optimizer)


def state_of(model, optimizer):
    states = [value for _, state in sorted(optimizer.state_dict()["state"].items()) for value in state.values()]
    return [torch.as_tensor(value).clone() for value in [*model.state_dict().values(), *states]]


def difference(one, other):
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(one, other, strict=True))


KINDS = [torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
placed = pytest.mark.parametrize("on_host", [False, True], ids=["plain", "on host"])


@kinds
@placed
@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_steps_are_those_of_plain_pytorch(kind, on_host, clip_norm):
    model, optimizer = fresh(on_host, kind)
    step = TrainStep(model, optimizer, loss_of, units="samples", clip_norm=clip_norm)
    results = [step(batch) for batch in batches()]
    assert clip_norm is None or min(result.gradient_norm for result in results) > clip_norm
    assert difference(by_hand(kind, clip_norm), state_of(model, optimizer)) <= (
        1e-6 if clip_norm or kind is torch.optim.SGD else 0
    )


@kinds
@placed
def test_micro_batches_add_up(kind, on_host):
    model, optimizer = fresh(on_host, kind)
    step = TrainStep(model, optimizer, loss_of, units="samples", micro_batch=2)
    assert [step(batch).micro_batch for batch in batches()] == [2] * NUM_STEPS
    assert difference(by_hand(kind, cut=2), state_of(model, optimizer)) < 1e-5


@pytest.mark.sampled(8)
@kinds
@placed
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("at_step", [1, 3])
def test_an_oom_in_any_phase_loses_nothing(kind, on_host, phase, at_step, tmp_path):
    path = tmp_path / "table" if on_host else None
    model, optimizer = fresh(on_host, kind, path)
    step = TrainStep(model, optimizer, loss_of, units="samples")
    chunks = 2 if kind is not torch.optim.SparseAdam else 1
    with armed(phase, (at_step - 1) * chunks + 1 if phase == "optimizer" else at_step):
        results = [step(batch) for batch in [*batches()][:3]]  # the fourth would be whole again
    assert sum(len(result.oom_events) for result in results) == 1
    is_cut = at_step == 1 and phase != "optimizer"
    assert (results[0].micro_batch == 4) == is_cut
    other, expected = fresh(on_host, kind)
    undisturbed = TrainStep(other, expected, loss_of, units="samples", micro_batch=4 if is_cut else None)
    for batch in [*batches()][:3]:
        undisturbed(batch)
    assert difference(state_of(other, expected), state_of(model, optimizer)) == 0


@kinds
@placed
@pytest.mark.parametrize("num_steps_before", [0, 2])
def test_what_an_optimizer_had_begun_is_undone_bit_for_bit(kind, on_host, num_steps_before):
    """Memory runs out twice after the update; afterwards nothing has changed."""
    model, optimizer = fresh(on_host, kind)
    step = TrainStep(model, optimizer, loss_of, units="samples")
    *first, last = list(batches())[: num_steps_before + 1]
    for batch in first:
        step(batch)
    before, names = state_of(model, optimizer), copy.deepcopy([list(s) for s in optimizer.state.values()])
    commit = StepCommit(optimizer, backend_for("cpu"), Position(phase="optimizer"))
    loss_of(model, last).backward()
    with armed("optimizer", 1, 2):
        commit.step()
    assert commit.outcome is not None
    assert names == [list(state) for state in optimizer.state.values()]
    assert difference(before, state_of(model, optimizer)) == 0


@kinds
@placed
def test_only_rows_are_copied(kind, on_host):
    model, optimizer = fresh(on_host, kind)
    loss_of(model, next(batches())).backward()
    optimizer.step()
    commit = StepCommit(optimizer, backend_for("cpu"), Position(phase="optimizer"))
    copies = [commit._copied(chunk) for chunk in commit._whole()]
    num_rows = len(next(batches())["ids"].unique())
    copied = [value for one in copies for _, _, value in one._rows]
    assert {tuple(value.shape) for value in copied} == {(num_rows, WIDTH)}
    assert len(copied) == {torch.optim.SparseAdam: 3, torch.optim.Adagrad: 2, torch.optim.SGD: 1}[kind]
    assert sum(memory.nbytes for memory in commit._scratch[on_host]._kept.values()) < 1000


def test_an_optimizer_that_changes_other_rows_is_copied_as_a_whole():
    """Momentum changes rows of earlier gradients, which its sparse state holds; a hook may change anything."""
    model, _ = fresh(False, torch.optim.SGD)
    with_momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hooked = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked.register_step_post_hook(lambda *_: None)
    loss_of(model, next(batches())).backward()
    for optimizer in (with_momentum, hooked):
        assert changed_rows(optimizer, optimizer.param_groups[0], model.table.weight) is None


def test_momentum_over_a_plain_table_is_undone():
    def train(*hits):
        model, _ = fresh(False, torch.optim.SGD)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = TrainStep(model, optimizer, loss_of, units="samples")
        with armed("optimizer", *hits):
            for batch in batches():
                step(batch)
        return model.state_dict().values()

    assert difference(train(5), train()) == 0


def test_the_norm_is_that_of_the_sums_of_rows():
    """A row used twice with gradient (3, 4) has (6, 8) in total: the norm is 10 and is clipped to 1."""
    table = nn.Embedding(5, 2, sparse=True)
    (table(torch.tensor([1, 1])) * torch.tensor([3.0, 4.0])).sum().backward()
    assert nn.utils.clip_grad_norm_(clippable([table.weight]), 1.0).item() == 10
    torch.testing.assert_close(table.weight.grad.to_dense()[1], torch.tensor([0.6, 0.8]))


def test_bytes_of_a_sparse_gradient():
    """Three ids of 8 bytes and three rows of 2 float32 are 48 bytes; an update counts twice as much."""
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1, 4])).sum().backward()
    assert (bytes_of(table.weight.grad), bytes_updated(table.weight), bytes_of(table.weight)) == (48, 96, 40)


def test_a_loss_that_is_not_finite_changes_nothing():
    model, optimizer = fresh(True, torch.optim.Adagrad)
    before = state_of(model, optimizer)
    step = TrainStep(model, optimizer, lambda model, batch: loss_of(model, batch) * torch.nan, units="samples")
    with pytest.raises(NonFiniteLossError):
        step(next(batches()))
    assert difference(before, state_of(model, optimizer)) == 0
    assert model.table.weight.grad is None


def test_memory_that_runs_out_inside_of_backward_leaves_no_gradient():
    model, optimizer = fresh(True, torch.optim.Adagrad)
    passes = Tally()

    def fail_once(_: torch.Tensor) -> None:
        if not in_a_check() and passes.next() == 1:
            exhaust_memory()

    handle = model.head.weight.register_hook(fail_once)
    step = TrainStep(model, optimizer, loss_of, units="samples", micro_batch=4)
    result = step(next(batches()))
    handle.remove()
    assert len(result.oom_events) == 1
    assert model.table.weight.grad is None
