"""Low-bit moments: the choices, the user's optimizer restored afterwards, and steps that can be undone."""

import pytest
import torch
from torch import nn

from plimsoll.data.quick_facts import TextSketch
from plimsoll.device.base import backend_for
from plimsoll.errors import CheckpointError
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.models.optimizers import build_schedule
from plimsoll.models.workload import Workload, model_loss
from plimsoll.planning.dry_run.step import dry_run_job
from plimsoll.records.job import Job, OptimizerChoice
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.failpoints import armed
from plimsoll.step.oom_boundary import Position
from plimsoll.step.train_step import TrainStep
from plimsoll.step.update.commit import StepCommit
from plimsoll.techniques import TECHNIQUES, Setting, conflict_among, installed
from plimsoll.techniques.mechanisms.low_bit_adam import LowBitAdam
from plimsoll.training import checkpoint
from technique_trainings import TRAININGS
from workloads import largest_relative_difference, weights_of

EIGHT, FOUR = (Choice(technique="low_bit_optimizer", options={"bits": bits}) for bits in (8, 4))
BOTH = pytest.mark.parametrize("choice", [EIGHT, FOUR], ids=str)
ALLOWED = Setting(device="cpu", batch_size=8, allow=frozenset({"low_bit_optimizer", "adafactor"}))
LOW_BIT = TECHNIQUES["low_bit_optimizer"]


def workload_of(kind=torch.optim.AdamW, model=None, **options):
    model = model or nn.Linear(64, 64)
    return Workload(model, kind(model.parameters(), lr=1e-3, **options), model_loss, "samples")


def test_there_is_a_choice_also_where_it_is_not_allowed():
    forbidden = Setting(device="cpu", batch_size=8)
    assert LOW_BIT.choices(workload_of(), forbidden) == (EIGHT, FOUR)
    assert "allow: [low_bit_optimizer]" in LOW_BIT.conflicts(EIGHT, (), workload_of(), forbidden)
    assert LOW_BIT.conflicts(FOUR, (), workload_of(torch.optim.Adam), ALLOWED) is None


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (workload_of(torch.optim.SGD), "replaces Adam and AdamW"),
        (workload_of(amsgrad=True), "amsgrad keeps a third moment"),
        (workload_of(model=nn.Linear(63, 64)), "no parameter has 4096 numbers or more"),
    ],
)
def test_what_it_cannot_stand_in_for(workload, reason):
    assert reason in LOW_BIT.choices(workload, ALLOWED)
    assert reason in LOW_BIT.conflicts(EIGHT, (), workload, ALLOWED)


def test_there_is_one_optimizer_only_and_no_other_number_of_bits():
    adafactor = Choice(technique="adafactor")
    reason = conflict_among((adafactor, FOUR), workload_of(), ALLOWED)
    assert reason == "adafactor: low_bit_optimizer replaces the optimizer as well"
    assert LOW_BIT.conflicts(FOUR, (adafactor,), workload_of(), ALLOWED) is not None
    kernel = Choice(technique="optimizer_kernel", options={"kernel": "loop"})
    assert "has no `loop` kernel" in conflict_among((FOUR, kernel), workload_of(), ALLOWED)
    two = Choice(technique="low_bit_optimizer", options={"bits": 2})
    assert LOW_BIT.conflicts(two, (), workload_of(), ALLOWED) == "bits is 2: choose 8 or 4"


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_it_takes_the_settings_over_and_gives_everything_back(kind):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[1].parameters()}]
    optimizer = kind(groups, lr=1e-3, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.1, maximize=True)
    schedule = build_schedule(OptimizerChoice(lr=1.0, schedule="linear"), optimizer, 4)
    workload = Workload(model, optimizer, model_loss, "samples", schedule=schedule)
    before, settings = {**vars(optimizer)}, [dict(group) for group in optimizer.param_groups]
    with installed(workload, [FOUR]):
        new = workload.optimizer
        assert isinstance(new, LowBitAdam)
        assert new.bits == 4
        for group, expected in zip(new.param_groups, settings, strict=True):
            same = ("lr", "betas", "eps", "weight_decay", "maximize", "decoupled_weight_decay", "initial_lr")
            assert {key: group[key] for key in same} == {key: expected[key] for key in same}
        new.step()
        schedule.step()
        assert [group["lr"] for group in new.param_groups] == pytest.approx([0.75e-2, 0.75e-3])
    assert workload.optimizer is optimizer
    assert vars(optimizer) == before
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-3]


# -- the step as a transaction -----------------------------------------------------------------------------------------


def trained(choice, fails=(), chunk_bytes=1):
    case = TRAININGS["gpt2"]
    model, optimizer = case.fresh()
    step = TrainStep(model, optimizer, units=case.units, clip_norm=1.0, fallbacks=[[choice, micro_batch_choice(8)]])
    step._commit._chunk_bytes = chunk_bytes
    with armed("optimizer", *fails):
        losses = [step(batch).loss for batch in case.batches()]
    weights = weights_of(model, step.workload.optimizer)
    assert not optimizer.state
    step.close()
    return losses, weights


@BOTH
@pytest.mark.parametrize("fails", [(1,), (2,), (40,)])
def test_an_oom_in_the_update_leaves_nothing_behind(choice, fails):
    """The OOM is in the first step, without states, or in a later one. The update is retried in the same step."""
    losses, weights = trained(choice, fails)
    expected_losses, expected = trained(choice)
    assert losses == expected_losses
    assert weights.keys() == expected.keys()
    assert largest_relative_difference(expected, weights) == 0


@BOTH
@pytest.mark.parametrize("num_before", [0, 2])
def test_an_oom_in_the_middle_of_a_parameter_undoes_all_of_it(choice, num_before, monkeypatch):
    """Memory runs out for good, after a part of the largest parameter and its moments have changed."""
    parts = []

    def fail_in_second_part(self, moment):
        parts.append(1)
        if len(parts) % 4 == 3:
            torch.empty(1 << 60, dtype=torch.uint8)
        pack(self, moment)

    from plimsoll.techniques.mechanisms import low_bit_adam

    monkeypatch.setattr(low_bit_adam, "_PART_ELEMENTS", {"cpu": 2048})
    workload = workload_of()
    with installed(workload, [choice]):
        optimizer, model = workload.optimizer, workload.model
        commit = StepCommit(optimizer, backend_for("cpu"), Position())
        for _ in range(num_before):
            give_gradients(model)
            commit.step()
        before = {name: tensor.clone() for name, tensor in weights_of(model, optimizer).items()}
        pack = low_bit_adam._Packed.pack
        monkeypatch.setattr(low_bit_adam._Packed, "pack", fail_in_second_part)
        give_gradients(model)
        commit.step()
        assert commit.outcome is not None
        after = weights_of(model, optimizer)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert all(parameter.grad is not None for parameter in model.parameters())


@BOTH
def test_the_first_step_reserves_just_the_memory_that_is_to_come(choice, monkeypatch):
    """The reserve covers the states (low-bit only for the largest parameter) and the temporaries of the next update."""
    proven = []
    monkeypatch.setattr("plimsoll.step.update.commit.prove_room", lambda blocks, device: proven.append(sum(blocks)))
    workload = workload_of(model=nn.Sequential(nn.Linear(64, 100), nn.Linear(100, 40), nn.Linear(40, 50)))
    with installed(workload, [choice]):
        give_gradients(workload.model)
        largest = max(workload.model.parameters(), key=torch.numel)
        StepCommit(workload.optimizer, backend_for("cpu"), Position(), chunk_bytes=1).step()
        states = [
            (one, sum(value.nbytes for value in state.values())) for one, state in workload.optimizer.state.items()
        ]
        of_next = max(workload.optimizer.temporary_bytes_of(one) for one, _ in states if one is not largest)
        assert proven == [sum(num_bytes for one, num_bytes in states if one is not largest) + of_next]


def give_gradients(model):
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))


@BOTH
@pytest.mark.parametrize("others", [[], [Choice(technique="optimizer_offload", options={"to": "disk"})]], ids=str)
def test_a_checkpoint_goes_on_bit_for_bit(choice, others, tmp_path):
    case = TRAININGS["gpt2"]

    def fresh():
        model, optimizer = case.fresh()
        return TrainStep(model, optimizer, units=case.units, fallbacks=[[choice, *others, micro_batch_choice(4)]])

    whole, first, second = fresh(), fresh(), fresh()
    batches = case.batches()
    train_on(whole, batches, range(4))
    train_on(first, batches, range(2))
    parts = {"model": first.workload.model, "optimizer": first.workload.optimizer}
    saved = checkpoint.save(tmp_path, 2, **parts, random_state={}, progress={"fingerprint": {}}, keep=1)
    saved.restore(second.workload.model, second.workload.optimizer)
    train_on(second, batches, range(2, 4))
    expected, found = (weights_of(one.workload.model, one.workload.optimizer) for one in (whole, second))
    assert expected.keys() == found.keys()
    assert largest_relative_difference(expected, found) == 0
    for step in (whole, first, second):
        step.close()


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ([EIGHT], [FOUR], "states of 8 bits, but this optimizer needs 4"),
        ([EIGHT], [], "another optimizer than AdamW, with bits in place of amsgrad(?!.*bits)"),
        ([], [EIGHT], "another optimizer than LowBitAdam, with amsgrad"),
        ([Choice(technique="adafactor")], [], "another optimizer than AdamW, with beta2_decay"),
    ],
    ids=str,
)
def test_states_of_another_optimizer_are_refused(before, after, reason, tmp_path):
    """A plan for another budget may use one. A step on its states would raise a KeyError, or be plain Adam."""
    one, other = workload_of(), workload_of()
    with installed(one, before), installed(other, after):
        progress = {"fingerprint": {}}
        saved = checkpoint.save(
            tmp_path, 2, model=one.model, optimizer=one.optimizer, random_state={}, progress=progress, keep=1
        )
        with pytest.raises(CheckpointError, match=reason):
            saved.restore(other.model, other.optimizer)


def train_on(step, batches, numbers):
    for number in numbers:
        torch.manual_seed(number)  # dropout
        step(batches[number])


# -- bytes -------------------------------------------------------------------------------------------------------------


def states_of(shapes, bits):
    """Return the bytes of both moments: codes and a 4-byte scale per block; small tensors stay in float32."""
    block = {8: 256, 4: 128}[bits]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return sum(2 * (n * bits // 8 + 4 * -(-n // block)) if n >= 4096 else 8 * n for n in sizes)


@BOTH
@pytest.mark.parametrize("lowering", [CpuLowering(), CudaLowering((8, 6))], ids=lambda one: one.name)
def test_its_states_are_as_large_as_predicted(choice, lowering):
    bits = choice.options["bits"]
    model = {"architecture": "lstm", "embedding_size": 64, "hidden_size": 64}
    fields = {"model": model, "data": {"train": "nowhere.txt"}, "sequence_length": 8, "batch_size": 8}
    job = Job.from_fields(fields | {"allow": "low_bit_optimizer"})
    texts = TextSketch(vocab_size=300, num_labels=None, end_id=0)
    trace = dry_run_job(job, texts, lowering, [choice, micro_batch_choice(8)])
    shapes = [(300, 64), (256, 64), (256, 64), (256,), (256,), (300, 64), (300,)]
    counts = 4 * len(shapes) if lowering.kind == "cpu" else 0  # on the host
    assert state_bytes(trace) == states_of(shapes, bits) + counts

    case = TRAININGS["gpt2"]
    model, optimizer = case.fresh()
    step = TrainStep(model, optimizer, units=case.units, fallbacks=[[choice, micro_batch_choice(8)]])
    with Recorder(phase=lambda: "optimizer") as recorder:
        recorder.step = 1
        step(case.batches()[0])
        recorder.know_optimizer(step.workload.optimizer)
    shapes = [parameter.shape for parameter in model.parameters()]
    assert state_bytes(recorder.trace("measured", "cpu")) == states_of(shapes, bits) + 4 * len(shapes)


def state_bytes(trace):
    return int(live_bytes(trace).by_category["optimizer states"].max())
