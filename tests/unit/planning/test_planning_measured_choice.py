"""Trials of a plan's candidates before training: their measurements, and a training that is as without them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from plans_to_try import MIB, configuration, plan_of
from plimsoll.planning import calibration, measured_choice
from plimsoll.planning.calibration import known_calibration
from plimsoll.planning.measured_choice import try_plan
from plimsoll.planning.search.reasons import told_of
from plimsoll.records.plan import Candidate, Choice, Configuration, OffDevice, Plan, Rejected, Trial
from plimsoll.records.run import RunRecord
from plimsoll.step.failpoints import armed
from plimsoll.step.train_step import TrainStep
from processes import run_program
from small_runs import train_here
from steps_to_try import BATCH, Paced, paced
from workloads import CASES, Case, weights_of

pytestmark = pytest.mark.usefixtures("all_candidates_run")

GPT2, _, LSTM, CNN = CASES
FUSED = Choice(technique="optimizer_kernel", options={"kernel": "fused"})
ON_DISK = Choice(technique="optimizer_offload", options={"to": "disk"})
PARAMETERS = Choice(technique="parameter_offload", options={"gradients": True})
RECOMPUTED = Choice(technique="checkpointing", options={"blocks": "all"})
KEPT = Choice(technique="heap", options={"mapped_from": "never"})
EARLY = Choice(technique="optimizer_in_backward")


def step_of(case: Case, fallbacks: tuple[Configuration, ...], make=None, **options: object) -> TrainStep:
    model, optimizer = case.fresh()
    if make is not None:
        optimizer = make(model.parameters())
    return TrainStep(model, optimizer, units=case.units, fallbacks=fallbacks, **({"clip_norm": 1.0} | options))


def trained(
    step: TrainStep, case: Case, num_steps: int = 4
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    losses = [step(batch).loss for batch in case.batches()[:num_steps]]
    return losses, weights_of(step.workload.model, step.workload.optimizer), torch.rand(4).tolist()


class Remembering(torch.optim.Optimizer):
    """A user-defined optimizer that keeps its state in attributes."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.means, self.num_steps = {}, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    mean = self.means.setdefault(one, torch.zeros_like(one))
                    mean.lerp_(one.grad, 1 / self.num_steps)
                    one.sub_(group["lr"] * mean)


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True)


CUT = (
    configuration(4),
    configuration(8, FUSED),
    configuration(2, RECOMPUTED),
    configuration(4, ON_DISK),
    configuration(8, PARAMETERS),
    configuration(3, KEPT),
)


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize(
    ("case", "make", "tried"),
    [
        (GPT2, None, CUT),
        (LSTM, None, (configuration(8), configuration(4, ON_DISK), configuration(3, KEPT))),
        (
            CNN,
            None,
            (configuration(8), configuration(8, FUSED), configuration(8, KEPT)),
        ),  # BatchNorm keeps its batches whole
        (GPT2, nesterov, (configuration(8), configuration(4))),
        (LSTM, torch.optim.Adagrad, (configuration(8), configuration(2, ON_DISK))),
        (LSTM, Remembering, (configuration(8), configuration(4))),
    ],
    ids=["gpt2", "lstm", "cnn", "nesterov", "adagrad", "own"],
)
def test_a_training_has_the_same_bits_as_without_a_trial(case, make, tried, num_before):
    """The trial runs before the first step, or in the middle, when states exist."""
    first, *others = (one for one in tried if make is None or FUSED not in one.choices)
    step = step_of(case, (first,), make)
    for batch in case.batches()[:num_before]:
        step(batch)
    plan = try_plan(step, plan_of(first, *others), case.batches()[0])
    assert [one.outcome for one in plan.trial.tried].count("fastest") == 1
    assert all(one.measured_seconds > 0 for one in plan.trial.tried), plan.trial
    found = trained(step, case)
    step.close()
    other = step_of(case, (first,), make)
    for batch in case.batches()[:num_before]:
        other(batch)
    other._fallbacks.exchange(plan.fallbacks)
    other.fallback_schedule = None
    losses, weights, draws = trained(other, case)
    assert (found[0], found[2]) == (losses, draws)
    assert found[1].keys() == weights.keys()
    assert all(torch.equal(found[1][name], tensor) for name, tensor in weights.items())
    other.close()


def test_updates_in_backward_and_what_a_model_keeps_in_python_or_writes_into_its_batch_are_put_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.calls = CASES[2].build(), []

        def forward(self, **batch):
            self.calls.append(len(self.calls))
            batch["input_ids"][:, 0] = 1
            return self.lstm(**batch)

    case = Case("counting", Counting, LSTM.data, LSTM.units)
    first, others = configuration(8, EARLY), [configuration(4), configuration(8)]
    step = step_of(case, (first,), clip_norm=None)
    batch, as_it_was = case.batches()[0], case.batches()[0]
    plan = try_plan(step, plan_of(first, *others), batch)
    assert torch.equal(batch["input_ids"], as_it_was["input_ids"])
    assert [one.measured_seconds is not None for one in plan.trial.tried] == [True] * 3
    assert step.workload.model.calls == []
    assert (step.num_steps, step.workload.optimizer.state) == (0, {})
    losses = trained(step, case)[0]
    assert trained(step_of(case, plan.fallbacks, clip_norm=None), case)[0] == losses


def test_a_schedule_is_where_it_was():
    model, optimizer = LSTM.fresh()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    step = TrainStep(model, optimizer, units="next-tokens", fallbacks=(configuration(8),), schedule=schedule)
    before = schedule.state_dict()
    try_plan(step, plan_of(configuration(8), configuration(4)), LSTM.batches()[0])
    assert schedule.state_dict() == before
    assert optimizer.param_groups[0]["lr"] == 1e-2


def test_the_fastest_that_was_measured_is_in_force_and_what_needs_less_is_behind_it():
    slow, fast = configuration(1, KEPT, mib=90, seconds=1.0), configuration(8, mib=100, seconds=1.2)
    behind = (configuration(4, mib=60, seconds=1.5), configuration(1, mib=30, seconds=3.0))
    step = paced(fallbacks=(slow, *behind))
    about, numerics = told_of(["heap", "micro_batch"], is_whole=False)
    plan = plan_of(slow, fast, fallbacks=behind).model_copy(update={"about": about, "numerics": numerics})
    plan = try_plan(step, plan, BATCH)
    assert plan.fallbacks == (fast, slow, *behind)
    assert (plan.about, plan.numerics) == told_of(["heap", "micro_batch"], is_whole=True)
    assert plan.measured_seconds == plan.trial.tried[1].measured_seconds
    assert [one.outcome for one in plan.trial.tried] == ["slower", "fastest"]
    assert [one.predicted_seconds for one in plan.trial.tried] == [1.0, 1.2]
    assert plan.candidates == ()
    assert (step.fallback, step(BATCH).micro_batch) == (0, 8)


@pytest.mark.parametrize("wins", [True, False])
def test_what_was_rejected_is_compared_with_the_plan_in_force_alone(wins):
    slow, fast = configuration(1, KEPT, mib=90), configuration(8)
    first, other = (fast, slow) if wins else (slow, fast)
    other_combination, reason = configuration(2, seconds=1.5), "slower: 1.5 s a step against 1 s"
    slower = Rejected(
        choices=other_combination.choices, reason=reason, step_time=other_combination.step_time, is_compared=True
    )
    large = Rejected(choices=configuration(4).choices, reason="needs up to 2.0 GiB, more than 1.0 GiB")
    plan = plan_of(first, other).model_copy(update={"rejected": (slower, large)})
    plan = try_plan(paced(fallbacks=(first,)), plan, BATCH)
    assert plan.fallbacks[0] == fast
    said = reason if wins else "not tried: 1.5 s a step predicted"
    assert [one.reason for one in plan.rejected] == [said, large.reason]


@pytest.mark.parametrize(
    ("changes", "num_steps", "reason"),
    [
        ({"candidates": ()}, 10**6, "no other plan is about as fast"),
        ({}, 100, "100 steps of about 1.0 s would save less time than a trial takes, up to 9.0 s"),
    ],
)
def test_what_would_not_be_worth_it_is_left_out(changes, num_steps, reason):
    step = paced(fallbacks=(configuration(8),))
    plan = plan_of(configuration(8), configuration(4)).model_copy(update=changes)
    tried = try_plan(step, plan, BATCH, num_steps=num_steps)
    assert tried.trial == Trial(left_out=reason)
    assert tried.fallbacks == plan.fallbacks
    assert step.workload.model.training


def test_a_model_whose_state_cannot_be_put_back_is_not_tried():
    """No pass is run: one pass would advance an iterator for good."""
    rows = iter(range(1000))

    class Reading(Paced):
        def forward(self, inputs):
            self.last = next(rows)
            return super().forward(inputs)

    model = Reading()
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch), units="samples",
        fallbacks=(configuration(8), configuration(8, FUSED, mib=50)), never_cut=True,
    )  # fmt: skip
    plan = try_plan(
        step, plan_of(configuration(8), configuration(8, KEPT), fallbacks=(configuration(8, FUSED, mib=50),)), BATCH
    )
    assert "is an iterator, whose position cannot be put back" in plan.trial.left_out
    assert next(rows) == 0
    assert plan.fallbacks == (configuration(8), configuration(8, FUSED, mib=50))
    assert len(step._fallbacks.sizes) == 2


def test_nothing_more_is_begun_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr(measured_choice, "_MOST_SECONDS", {"cpu": 1e-9})
    monkeypatch.setattr(measured_choice, "_MOST_STEPS", 0)
    said = []
    plan = try_plan(
        paced(fallbacks=(configuration(8),)),
        plan_of(configuration(8), configuration(4), configuration(2)),
        BATCH,
        progress=said.append,
    )
    assert [one.outcome for one in plan.trial.tried] == ["fastest", "not tried", "not tried"]
    assert plan.fallbacks == (configuration(8),)
    assert said == [f"trying plans: {number} of 3, micro_batch={size}" for number, size in ((1, 8), (2, 4), (3, 2))]


RUNS_OUT = """
import json, sys, torch, plimsoll
from torch import nn
from plimsoll.device.base import backend_for
from plimsoll.step.train_step import TrainStep
from plimsoll.planning.measured_choice import try_plan
from plimsoll.techniques import cuda_graph
sys.path[:0] = sys.argv[1:2]
from plans_to_try import plan_of, configuration

torch.set_num_threads(1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8000, 16), nn.Linear(16, 8000)

    def forward(self, ids):
        hidden = nn.functional.dropout(self.embedding(ids), 0.1)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())

def step_of(fallbacks):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    loss = lambda model, ids: model(ids)  # noqa: E731
    return TrainStep(model, optimizer, loss, units="samples", fallbacks=fallbacks, recut_loss=True)

ids = torch.randint(0, 8000, (32, 256), generator=torch.Generator().manual_seed(0))
backend = backend_for("cpu")
step_of((configuration(1),))(ids[:2])  # imports and starts what a step needs
whole, most, few = configuration(32, mib=200), configuration(30, mib=199), configuration(2, mib=40)
step = step_of((whole, few))
with plimsoll.limited(backend.use().used_bytes + (120 << 20)):  # the logits of the whole batch take 250 MiB
    plan = try_plan(step, plan_of(whole, most, few), ids)
    results = [step(ids) for _ in range(2)]
plain = step_of(plan.fallbacks)
print(json.dumps({
    "outcomes": [one.outcome for one in plan.trial.tried], "why": plan.trial.tried[0].why,
    "sizes": [result.micro_batch for result in results], "num_ooms": sum(len(result.oom_events) for result in results),
    "fallbacks": [one.micro_batch for one in plan.fallbacks],
    "is_same": [result.loss for result in results] == [plain(ids).loss for _ in range(2)],
}))
"""


def test_what_runs_out_of_memory_is_struck_before_the_training_with_what_would_need_too_much_as_well():
    """The allocator of the process is limited. From the shortage of the first, a second would need too much as well."""
    done = run_program(RUNS_OUT, Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("why").startswith("memory ran out in the ")
    assert found == {
        "outcomes": ["ran out", "struck", "fastest"], "sizes": [2, 2], "num_ooms": 0, "fallbacks": [2], "is_same": True,
    }  # fmt: skip


def made_up(*found: tuple[float | None, float, str]) -> list[measured_choice._Found]:
    """Return the seconds, noise and outcome of candidates."""
    return [
        measured_choice._Found(Candidate(configuration=configuration(number + 1)), outcome, seconds, noise)
        for number, (seconds, noise, outcome) in enumerate(found)
    ]


@pytest.mark.parametrize(
    ("found", "fastest"),
    [
        ([(1.0, 0.01, "slower"), (0.9, 0.01, "slower"), (0.95, 0.01, "slower")], 1),
        ([(1.0, 0.01, "slower"), (0.9, 0.2, "slower")], 0),  # passes of the second vary by more
        ([(1.0, 0.2, "slower"), (0.9, 0.01, "slower")], 0),
        ([(1.0, 0.01, "slower"), (0.5, 0.0, "too near"), (None, 0.0, "not tried")], 0),
        ([(None, 0.0, "ran out"), (None, 0.0, "struck"), (3.0, 0.0, "slower")], 2),
        ([(None, 0.0, "ran out")], None),
    ],
)
def test_the_plan_stays_unless_another_is_faster_by_more_than_noise(found, fastest):
    candidates = made_up(*found)
    best = measured_choice._fastest(candidates)
    assert best is (None if fastest is None else candidates[fastest])


@pytest.mark.parametrize(("seconds", "one", "expected"), [(5.0, 3.0, 17.0), (5.0, 5.5, 20.0), (5.0, 5.0, 20.0)])
def test_one_pass_that_was_held_up_makes_no_step_shorter(seconds, one, expected):
    """Two of 8 passes of 2 s are measured, with an update of 1 s. If one takes longer than both, nothing is known."""
    assert measured_choice._of_all_chunks(8, 2, seconds, one) == pytest.approx(expected)


@pytest.mark.parametrize("held_up", [0, 1, 2, 3, 4])
def test_a_pass_that_is_held_up_hardly_changes_the_time_of_a_step(monkeypatch, held_up):
    """The minimum of several measurements counts, for one pass and for several. An update takes 1 s and a pass 2 s."""
    done = []

    def seconds_of(_tries, _fallback, num_micro_batches, is_first=False):
        done.append(num_micro_batches)
        return 1.0 + 2.0 * num_micro_batches + 10.0 * (len(done) - 2 == held_up)  # the first one is a warm-up

    monkeypatch.setattr(measured_choice._Tries, "_seconds_of", seconds_of)
    monkeypatch.setattr(measured_choice._Tries, "_undone", lambda _tries: nullcontext())
    monkeypatch.setattr(measured_choice.time, "perf_counter", lambda: 0.0)
    tries = measured_choice._Tries(
        paced(fallbacks=(configuration(1),)), plan_of(configuration(1)), BATCH, lambda text: None
    )
    tries._ends = 60.0
    assert tries._timed(configuration(1), num_left=1)[0] == pytest.approx(17.0)


@pytest.mark.parametrize(("left_seconds", "most"), [(1e6, 8), (100.0, 4), (9.0, 2), (0.0, 2)])
def test_the_time_of_a_whole_step_follows_from_that_of_a_part(monkeypatch, left_seconds, most):
    """An update of 1 s and 8 passes of 2 s take 17 s, however little time remains for trials."""
    done = []

    def seconds_of(_tries, _fallback, num_micro_batches, is_first=False):
        done.append(num_micro_batches)
        return 1.0 + 2.0 * num_micro_batches

    monkeypatch.setattr(measured_choice._Tries, "_seconds_of", seconds_of)
    monkeypatch.setattr(measured_choice._Tries, "_undone", lambda _tries: nullcontext())
    monkeypatch.setattr(measured_choice.time, "perf_counter", lambda: 0.0)
    tries = measured_choice._Tries(
        paced(fallbacks=(configuration(1),)), plan_of(configuration(1)), BATCH, lambda text: None
    )
    monkeypatch.setattr(measured_choice, "_MOST_CHUNKS", 4)
    tries._ends = left_seconds or 1e-9
    seconds, noise_seconds = tries._timed(configuration(1), num_left=1)
    assert seconds == pytest.approx(17.0)
    assert noise_seconds <= 0.01 * seconds + 1e-9
    assert max(done) == (8 if left_seconds / 3.0 >= 8 else most)


@pytest.mark.parametrize(("limit_mib", "outcomes"), [(1 << 20, ["slower", "fastest"]), (1, ["fastest", "too near"])])
def test_what_may_not_fit_is_taken_only_if_it_was_measured_clearly_below_the_limit(limit_mib, outcomes):
    first, wide = configuration(1, mib=1), configuration(8, mib=2 * limit_mib)
    step = paced(fallbacks=(first,))
    plan = plan_of(first, wide).model_copy(update={"limit_bytes": limit_mib * MIB})
    plan = try_plan(step, plan, BATCH)
    assert [one.outcome for one in plan.trial.tried] == outcomes
    assert plan.fallbacks == ((wide, first) if outcomes[1] == "fastest" else (first,))
    if outcomes[1] == "too near":
        assert " of 1.0 MiB, and a long run may take more" in plan.trial.tried[1].why


def test_where_nothing_holds_the_training_begins_with_a_fallback():
    first, other, behind = (
        configuration(8),
        configuration(4, mib=90),
        (configuration(2, mib=60), configuration(1, mib=30)),
    )
    step = paced(fallbacks=(first, *behind))
    of_the_first = {"time_factor": 7.0, "off_device": OffDevice(kept_bytes=MIB, moved_bytes=MIB)}
    plan = plan_of(first, other, fallbacks=behind).model_copy(update=of_the_first)
    with armed("forward", 1, 2):
        plan = try_plan(step, plan, BATCH)
    assert {one.outcome for one in plan.trial.tried} <= {"ran out", "struck"}
    assert set(plan.fallbacks) <= set(behind)
    assert (plan.prediction, plan.time_factor, plan.off_device) == (None, 1.0, None)  # not the values of the first
    assert step(BATCH).micro_batch == plan.fallbacks[0].micro_batch


def run_of(new_run, *candidates: Configuration, **changes: object):
    """Return a run directory whose plan uses the whole batch."""
    directory = new_run(**({"steps": 3} | changes))
    plan_of(configuration(8), *candidates, fallbacks=(configuration(2, mib=50),)).save(directory.plan)
    return directory


def test_a_run_tries_its_plan_before_the_first_step_and_keeps_what_it_found(new_run, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PLIMSOLL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measured_choice, "_LEAST_GAIN", 1e9)  # so that 3 steps are worth a trial
    monkeypatch.setattr(
        calibration, "_MOST_RATIO", 1e9
    )  # and a step takes a millisecond instead of the predicted second
    directory = run_of(new_run, configuration(4, mib=80), configuration(8, FUSED, mib=90))
    train_here(directory, quiet=False)
    plan = Plan.load(directory.plan)
    assert plan.trial is not None
    fastest = next(one for one in plan.trial.tried if one.outcome == "fastest")
    assert plan.choices == fastest.choices
    record = RunRecord.from_directory(directory.path)
    assert (record.plan, [step.micro_batch for step in record.steps]) == (plan, [plan.fallbacks[0].micro_batch] * 3)
    assert "the fastest of 3 plans" in capsys.readouterr().err
    target = known_calibration().targets["cpu"]
    assert set(target.step_ratios) == {"", "optimizer_kernel"}
    begun = directory.plan.read_bytes()
    train_here(directory, resume=True)
    assert directory.plan.read_bytes() == begun


@pytest.mark.parametrize("options", [{"trial": False}, {"restarts": 1, "resume_newest": True}, {}])
def test_a_run_that_is_not_to_be_tried_begins_with_its_plan(new_run, options):
    """This holds if trials are disabled, after the death of the process, and for a training with too few steps."""
    directory = run_of(new_run, configuration(4))
    train_here(directory, **options)
    plan = Plan.load(directory.plan)
    assert plan.choices == configuration(8).choices
    assert (plan.trial is None) == bool(options)
    assert options or plan.trial.left_out.startswith("3 steps of about 1.0 s would save less time than a trial")
    assert [step.micro_batch for step in RunRecord.from_directory(directory.path).steps] == [8] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("case", [GPT2, CNN], ids=["gpt2", "cnn"])
def test_on_a_gpu_a_training_has_the_same_bits_as_without_a_trial(case, monkeypatch):
    """With deterministic kernels: by default the gradients of embeddings are summed in any order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        on_host = Choice(technique="optimizer_offload", options={"to": "host"})
        cuts = (8, 4) if case is GPT2 else (8,)
        first, *others = (
            configuration(size, *combination) for size in cuts for combination in ((), (FUSED,), (on_host,))
        )
        on_cuda = replace(
            case, build=lambda: case.build().cuda(), data=lambda: {key: one.cuda() for key, one in case.data().items()}
        )
        step = step_of(on_cuda, (first,))
        plan = try_plan(step, plan_of(first, *others), on_cuda.batches()[0])
        assert all(one.measured_seconds for one in plan.trial.tried), plan.trial
        found = trained(step, on_cuda)
        step.close()
        losses, weights, draws = trained(step_of(on_cuda, plan.fallbacks), on_cuda)
        assert (found[0], found[2]) == (losses, draws)
        assert all(torch.equal(found[1][name], tensor) for name, tensor in weights.items())
    finally:
        torch.use_deterministic_algorithms(False)
