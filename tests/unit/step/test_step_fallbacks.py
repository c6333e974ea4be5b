"""The fallbacks of a plan on a live training: the installed techniques, and the effect of an OOM."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from plimsoll.distributed.ranks import Ranks
from plimsoll.errors import InputError, OutOfMemoryError
from plimsoll.records.plan import Choice, Configuration, micro_batch_choice
from plimsoll.records.prediction import Estimate
from plimsoll.records.run import OomEvent
from plimsoll.step.failpoints import armed, exhaust_memory
from plimsoll.step.fallbacks import InstalledFallbacks, after_oom, measured, ran_out_of, samples_of
from plimsoll.step.micro_batches import Shape
from plimsoll.step.recovery import FallbackSchedule, Measured, RanOut, Size
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import TECHNIQUES, Technique
from processes import run_program
from workloads import BATCH_SIZE, CASES, largest_relative_difference, plain_loop, weights_of

NUM_STEPS = 3
CASE, WITH_BATCH_NORM = CASES[0], CASES[3]


class Noted(Technique):
    """A technique that records its calls, and runs out of memory `num_failures` times."""

    numerics = "bitwise"

    def __init__(self, name, notes, is_for_the_run):
        self.name, self.notes, self.is_for_the_run = name, notes, is_for_the_run
        self.num_failures = 0

    def choices(self, workload, setting):
        return ()

    @contextmanager
    def install(self, workload, choice):
        if self.num_failures:
            self.num_failures -= 1
            exhaust_memory()
        self.notes.append(f"+{choice}")
        try:
            yield
        finally:
            self.notes.append(f"-{choice}")


@pytest.fixture
def notes(monkeypatch):
    """Return the list of calls of the techniques `noted` and `lasting`; the latter is for the whole run."""
    found = []
    for name in ("lasting", "noted"):
        monkeypatch.setitem(TECHNIQUES, name, Noted(name, found, is_for_the_run=name == "lasting"))
    return found


def configuration(samples, level=None, lasting=None):
    others = [Choice(technique="noted", options={"level": level})] if level is not None else []
    others += [Choice(technique="lasting", options={"rank": lasting})] if lasting is not None else []
    return (micro_batch_choice(samples), *others)


def workload():
    model = nn.Linear(1, 1)
    return TrainStep(model, torch.optim.SGD(model.parameters()), units="samples").workload


def test_fallbacks_with_the_same_techniques_are_one_level(notes):
    fallbacks = InstalledFallbacks(
        workload(), [configuration(8), configuration(4), configuration(8, 1), configuration(4, 1), configuration(2)]
    )
    assert fallbacks.sizes == (Size(8, 0), Size(4, 0), Size(8, 1), Size(4, 1), Size(2, 2))
    assert [fallbacks.described(level) for level in range(3)] == ["no other technique", "noted=1", "no other technique"]
    assert len(set(fallbacks.names[:4])) == 4


def test_one_level_is_at_work_at_a_time(notes):
    fallbacks = InstalledFallbacks(workload(), [configuration(8, 0), configuration(8, 1)])
    assert notes == []
    fallbacks.use(0)
    fallbacks.use(0)
    fallbacks.use(1)
    assert fallbacks.is_in_force(1)
    fallbacks.close()
    fallbacks.close()
    assert notes == ["+noted=0", "-noted=0", "+noted=1", "-noted=1"]


def test_what_is_for_the_run_stays_from_the_beginning_to_the_end(notes):
    fallbacks = InstalledFallbacks(workload(), [configuration(8, 0, lasting=4), configuration(8, 1, lasting=4)])
    fallbacks.use(0)
    fallbacks.use(1)
    fallbacks.close()
    assert notes == ["+lasting=4", "+noted=0", "-noted=0", "+noted=1", "-noted=1", "-lasting=4"]


def test_a_level_that_cannot_be_installed_leaves_none_at_work(notes):
    fallbacks = InstalledFallbacks(workload(), [configuration(8, 0), configuration(8, 1)])
    fallbacks.use(0)
    TECHNIQUES["noted"].num_failures = 1
    with pytest.raises(RuntimeError):
        fallbacks.use(1)
    assert not fallbacks.is_in_force(0)
    assert not fallbacks.is_in_force(1)
    fallbacks.use(1)
    assert notes == ["+noted=0", "-noted=0", "+noted=1"]


def test_without_fallbacks_no_technique_is_installed_and_the_plain_step_is_in_force():
    fallbacks = InstalledFallbacks(workload(), ())
    assert fallbacks.is_in_force(0)
    fallbacks.use(0)
    assert fallbacks.sizes == ()


def test_fallbacks_that_train_something_else_are_refused(notes):
    with pytest.raises(InputError, match=r"differ in choices that change the training \(lasting=4 \| none\): give"):
        InstalledFallbacks(workload(), [configuration(8, lasting=4), configuration(4)])
    assert notes == []


@pytest.mark.parametrize("choices", [(), (micro_batch_choice(2), micro_batch_choice(4))])
def test_a_fallback_has_one_micro_batch(choices):
    with pytest.raises(InputError, match=rf"a fallback has {len(choices)} micro-batches .*: give one to each"):
        samples_of(choices)


def test_fallbacks_with_a_micro_batch_are_refused():
    model = nn.Linear(1, 1)
    with pytest.raises(InputError, match="micro_batch=4 was given with 1 fallbacks"):
        TrainStep(model, torch.optim.SGD(model.parameters()), micro_batch=4, fallbacks=[configuration(8)])


# -- in a training step ------------------------------------------------------------------------------------------------


def step_with(*fallbacks, case=CASE):
    model, optimizer = case.fresh()
    return TrainStep(model, optimizer, units=case.units, clip_norm=1.0, fallbacks=fallbacks, grow_after=10**9)


def run(step, case=CASE):
    return [step(batch) for batch in case.batches()[:NUM_STEPS]]


def require_plain_weights(step, case=CASE):
    model, optimizer = case.fresh()
    plain_loop(case, model, optimizer, [BATCH_SIZE] * NUM_STEPS)
    found = weights_of(step.workload.model, step.workload.optimizer)
    assert largest_relative_difference(weights_of(model, optimizer), found) == 0


@pytest.mark.parametrize("phase", ["copy", "forward", "loss", "backward", "clip"])
@pytest.mark.parametrize("case", [CASE, WITH_BATCH_NORM], ids=lambda case: case.name)
def test_out_of_memory_installs_the_next_level_and_loses_nothing(notes, phase, case):
    step = step_with(configuration(8, 0), configuration(8, 1), case=case)
    with armed(phase, 1):
        results = run(step, case)
    (event,) = results[0].oom_events
    assert (event.phase, event.fallback, event.next_fallback) == (phase, 0, 1)
    assert event.action == "same micro-batch with noted=1"
    assert [(result.fallback, result.micro_batch) for result in results] == [(1, 8)] * NUM_STEPS
    assert notes == ["+noted=0", "-noted=0", "+noted=1"]
    require_plain_weights(step, case)
    step.close()
    assert notes[-1] == "-noted=1"


def test_out_of_memory_in_the_update_takes_another_level_and_not_another_micro_batch(notes):
    """The whole update fails, then halved chunks down to one parameter, which fails twice; then all of it again."""
    step = step_with(configuration(8, 0), configuration(4, 0), configuration(8, 1))
    with armed("optimizer", *range(1, 17)):  # 28 parameters at once, then 28, 14, 7, 4, 2, 1, 1; twice
        results = run(step)
    events = [event for event in results[0].oom_events if event.next_fallback is not None]
    assert [(event.phase, event.fallback, event.next_fallback, event.action) for event in events] == [
        ("optimizer", 0, 0, "same micro-batch once more"),
        ("optimizer", 0, 2, "same micro-batch with noted=1"),
    ]
    assert [result.fallback for result in results] == [2] * NUM_STEPS
    require_plain_weights(step)


@pytest.mark.parametrize(
    ("failed", "changes", "is_last_resort"),
    [
        (0, {}, False),
        (1, {}, True),  # the next fallback is the last
        (0, {"phase": "optimizer"}, True),  # no smaller micro-batch would help
        (
            0,
            {"family": "cuda", "requested_bytes": 2, "live_bytes": 3, "reserved_bytes": 5},
            True,
        ),  # the memory is free, but fragmented
    ],
)
def test_the_device_gives_back_all_it_can_where_less_would_not_help(failed, changes, is_last_resort):
    event = OomEvent(**{"phase": "backward", "family": "cpu-allocator", **changes})
    asked = []
    fallback_schedule = FallbackSchedule((Size(8, 0), Size(4, 0), Size(2, 0)))
    device = SimpleNamespace(release=lambda last_resort=False: asked.append(last_resort), reset_peak=lambda: None)
    after_oom(event, failed, Shape(8, 8, elements_per_sample=1), fallback_schedule, None, device)
    assert any(asked) == is_last_resort


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"live_bytes": 70, "requested_bytes": 40, "capacity_bytes": 100}, RanOut(110, 100)),
        ({"live_bytes": 70, "requested_bytes": 1 << 60, "capacity_bytes": 100}, RanOut(170, 100)),
        ({"live_bytes": 70, "requested_bytes": 40}, RanOut(110, 110)),  # a whole device: so much it has not
        ({"live_bytes": 70, "capacity_bytes": 100}, RanOut(70, 100)),
        ({"live_bytes": 70}, None),
        ({}, None),
    ],
)
def test_what_an_event_teaches(fields, expected):
    assert ran_out_of(OomEvent(family="cuda", **fields)) == expected


def test_memory_is_measured_only_where_a_larger_size_is_left_alone():
    fallback_schedule, asked = FallbackSchedule((Size(4), Size(2))), []
    use = SimpleNamespace(peak_bytes=90, used_bytes=30)
    device = SimpleNamespace(use=lambda: asked.append(1) or use)
    assert measured(fallback_schedule, device, Ranks()) is None
    fallback_schedule.failed(0, 4, 4, ran_out=RanOut(100, 100))
    assert measured(fallback_schedule, device, Ranks()) == Measured(90, 30)
    assert len(asked) == 1


def test_the_peaks_of_a_plan_are_kept_beside_its_choices(notes):
    plain = (micro_batch_choice(2),)
    peak = Estimate(likely_bytes=300, low_bytes=300, high_bytes=330)
    fallbacks = InstalledFallbacks(
        workload(),
        [Configuration(choices=configuration(8, 0), peak=peak), Configuration(choices=configuration(4, 0)), plain],
    )
    assert fallbacks.sizes == (Size(8, 0), Size(4, 0), Size(2, 1))
    assert fallbacks.needs == (300, None, None)


def test_out_of_memory_while_a_level_is_installed_takes_another_level(notes):
    step = step_with(configuration(8, 0), configuration(8, 1), configuration(4, 1), configuration(8, 2))
    TECHNIQUES["noted"].num_failures = 0

    def fail_later(event):
        TECHNIQUES["noted"].num_failures = {(0, 1): 2}.get(
            (event.fallback, event.next_fallback), TECHNIQUES["noted"].num_failures
        )

    with armed("forward", 1):
        result = step(CASE.batches()[0], on_oom=fail_later)
    assert [(event.phase, event.fallback, event.next_fallback) for event in result.oom_events] == [
        ("forward", 0, 1), ("copy", 1, 1), ("copy", 1, 3)
    ]  # fmt: skip
    for batch in CASE.batches()[1:NUM_STEPS]:
        step(batch)
    assert notes == ["+noted=0", "-noted=0", "+noted=2"]
    require_plain_weights(step)


def test_where_the_last_level_cannot_be_installed_the_step_is_undone(notes):
    step = step_with(configuration(8, 0), configuration(4, 0))
    before = weights_of(step.workload.model, step.workload.optimizer)
    TECHNIQUES["noted"].num_failures = 2
    told = []
    with pytest.raises(OutOfMemoryError, match="in the copy phase of step 1"):
        step(CASE.batches()[0], on_oom=told.append)
    assert [(event.fallback, event.survived) for event in told] == [(0, True), (0, False)]
    assert largest_relative_difference(before, weights_of(step.workload.model, step.workload.optimizer)) == 0
    run(step)  # and the step can be used again
    require_plain_weights(step)


def test_a_model_that_must_stay_whole_keeps_the_numbers_of_the_plan(notes):
    step = step_with(
        configuration(8, 0), configuration(4, 0), configuration(4, 1), configuration(8, 2), case=WITH_BATCH_NORM
    )
    with armed("forward", 1):
        results = run(step, WITH_BATCH_NORM)
    assert [(result.fallback, result.micro_batch) for result in results] == [(3, 8)] * NUM_STEPS
    assert step.fallback == 3
    require_plain_weights(step, WITH_BATCH_NORM)


def test_a_small_batch_is_not_said_to_grow(notes):
    step = step_with(configuration(8, 0), configuration(8, 1))
    batch = {name: tensor[:3] for name, tensor in CASE.batches()[0].items()}
    with armed("forward", 1):
        (event,) = step(batch).oom_events
    assert (event.action, event.next_micro_batch) == ("same micro-batch with noted=1", 3)


def test_it_goes_on_at_the_fallback_of_a_checkpoint_unless_the_plan_is_another(notes):
    fallbacks = [configuration(8, 0), configuration(8, 1)]
    step = step_with(*fallbacks)
    with armed("forward", 1):
        run(step)
    again, other = step_with(*fallbacks), step_with(configuration(8, 0), configuration(8, 2))
    for one in (again, other):
        one.load_state_dict(step.state_dict())
    assert (again.fallback, other.fallback) == (1, 0)
    old = {name: value for name, value in step.state_dict().items() if name != "fallbacks"}
    again.load_state_dict(old)  # of a checkpoint that was written before plans had levels
    assert again.fallback == 0


def test_after_a_death_it_begins_at_a_later_fallback(notes):
    step = step_with(configuration(8, 0), configuration(8, 1), configuration(4, 1))
    step.begin_again_at(2, too_large_fallback=1)
    assert (step.fallback, step.micro_batch) == (2, 4)
    assert [result.fallback for result in run(step)] == [2] * NUM_STEPS
    assert notes == ["+noted=1"]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([Choice(technique="heap", options={"mapped_from": 4194304})], "a fallback cannot be used: heap=4194304"),
        ([Choice(technique="checkpointing")], "a choice without its option 'blocks'"),
        (
            [Choice(technique="optimizer_in_backward")],
            "optimizer_in_backward: clip_norm .* leave out this choice",
        ),
    ],
)
def test_choices_that_cannot_be_are_refused_when_the_step_is_made(choices, message):
    model, optimizer = CASE.fresh()
    with pytest.raises(InputError, match=message):
        TrainStep(model, optimizer, units="next-tokens", clip_norm=1.0, fallbacks=[[micro_batch_choice(8), *choices]])


# -- real techniques ---------------------------------------------------------------------------------------------------

OFFLOAD = Choice(technique="optimizer_offload", options={"to": "disk"})
CHECKPOINTING = Choice(technique="checkpointing", options={"blocks": "all"})
PARAMETERS = Choice(technique="parameter_offload", options={"gradients": True})
FALLING = [
    (micro_batch_choice(8), *choices)
    for choices in ([OFFLOAD], [OFFLOAD, CHECKPOINTING], [OFFLOAD, PARAMETERS, CHECKPOINTING])
]


def large_states(step):
    """Return the optimizer's state tensors with more than one element."""
    states = step.workload.optimizer.state.values()
    return [value for state in states for value in state.values() if value.numel() > 1]


def require_the_same_objects(some, others):
    assert len(some) == len(others) > 0
    assert all(one is other for one, other in zip(some, others, strict=True))


@contextmanager
def failing(name, num_times):
    """Make the next installations of a technique run out of memory at their end."""
    technique, left = TECHNIQUES[name], [None] * num_times

    class Failing:
        def __getattr__(self, attribute):
            return getattr(technique, attribute)

        @contextmanager
        def install(self, workload, choice):
            with technique.install(workload, choice):
                if left:
                    left.pop()
                    exhaust_memory()
                yield

    TECHNIQUES[name] = Failing()
    try:
        yield left
    finally:
        TECHNIQUES[name] = technique


def test_states_in_a_file_stay_there_from_level_to_level_and_back():
    step = step_with(*FALLING)
    step(CASE.batches()[0])
    states = large_states(step)
    for fallen_to, batch in zip((1, 2), CASE.batches()[1:NUM_STEPS], strict=True):
        with armed("forward", 1, 2):  # the size that fitted is tried once more
            assert step(batch).fallback == fallen_to
        require_the_same_objects(states, large_states(step))
    require_plain_weights(step)
    step.begin_again_at(0)
    step(CASE.batches()[NUM_STEPS])
    assert step.fallback == 0
    require_the_same_objects(states, large_states(step))
    step.close()
    assert not any(one is other for one, other in zip(states, large_states(step), strict=True))


@pytest.mark.parametrize("name", ["checkpointing", "parameter_offload"])
@pytest.mark.parametrize("num_failures", [1, 2])
def test_memory_that_runs_out_while_levels_change_moves_no_states_and_loses_nothing(name, num_failures):
    """After one failure the level is tried again; after two, the next level is used, unless it is the last."""
    step = step_with(*FALLING, (micro_batch_choice(8), OFFLOAD, PARAMETERS))
    step(CASE.batches()[0])
    states = large_states(step)
    with armed("forward", 1, 2), failing("checkpointing", 0 if name != "checkpointing" else num_failures) as left:
        results = [step(CASE.batches()[1])]
    assert left == []
    with armed("forward", 1, 2), failing("parameter_offload", 0 if name == "checkpointing" else num_failures) as left:
        results.append(step(CASE.batches()[2]))
    assert left == []
    assert results[1].fallback > results[0].fallback > 0
    assert [event.phase for result in results for event in result.oom_events].count("copy") == num_failures
    require_the_same_objects(states, large_states(step))
    require_plain_weights(step)


TIGHT = """
import torch
from torch import nn
from plimsoll.device.base import limited
from plimsoll.device.process import private_bytes
from plimsoll.distributed.ranks import Ranks
from plimsoll.records.plan import Choice, Configuration, micro_batch_choice
from plimsoll.records.prediction import Estimate
from plimsoll.step.failpoints import armed
from plimsoll.step.train_step import TrainStep

def fresh():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(24)])  # 96 MiB, the states 192 MiB
    return model, torch.optim.AdamW(model.parameters())

def loss(model, batch):
    return model(batch["x"]).square().mean()

batch = {"x": torch.ones(4, 1024)}
moved = [Choice(technique="optimizer_offload", options={"to": "disk"})]
moved += [Choice(technique="parameter_offload", options={"gradients": True})]
plain, optimizer = fresh()
for _ in range(3):
    optimizer.zero_grad()
    loss(plain, batch).backward()
    optimizer.step()
del optimizer
plain.zero_grad()
model, optimizer = fresh()
fallbacks = [[*moved, micro_batch_choice(4)], [micro_batch_choice(4)], [*moved, micro_batch_choice(4)]]
step = TrainStep(model, optimizer, loss, units="samples", fallbacks=fallbacks)
with limited(4 << 30):
    step(batch)
with limited(private_bytes() + (64 << 20)):  # no room for what comes back, and some for the holes of the heap
    with armed("forward", 1, 2):
        result = step(batch)
    print([(event.phase, event.fallback) for event in result.oom_events], result.fallback)
    step(batch)
with limited(4 << 30):
    step.close()
print(all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters())))
"""


@pytest.mark.long
def test_an_exit_that_runs_out_of_memory_leaves_what_trains_on():
    done = run_program(TIGHT)
    assert done.returncode == 0, done.stderr
    events = [("forward", 0), ("forward", 0), ("copy", 1), ("backward", 1)]
    assert done.stdout.splitlines() == [f"{events} 2", "True"]


def test_closing_takes_every_technique_back_also_where_one_runs_out_of_memory(notes):
    class Broken(Noted):
        @contextmanager
        def install(self, workload, choice):
            with super().install(workload, choice):
                yield
            exhaust_memory()

    TECHNIQUES["noted"] = Broken("noted", notes, is_for_the_run=False)
    step = step_with(configuration(8, 0, lasting=2))
    step(CASE.batches()[0])
    with pytest.warns(UserWarning, match="while the techniques of the plan were removed"):
        step.close()
    assert notes == ["+lasting=2", "+noted=0", "-noted=0", "-lasting=2"]


def test_an_evaluation_before_the_first_step_has_the_techniques_of_the_plan(notes):
    step = step_with(configuration(8, 0), configuration(8, 1))
    TECHNIQUES["noted"].num_failures = 2
    evaluation = step.evaluate(CASE.batches()[:1])
    assert notes == ["+noted=1"]
    events = [(event.phase, event.fallback, event.next_fallback, event.action) for event in evaluation.oom_events]
    assert events == [
        ("evaluation", 0, 0, "same micro-batch once more"),
        ("evaluation", 0, 1, "same micro-batch with noted=1"),
    ]
    assert (step.fallback, step.position.phase) == (1, "fetch")
    run(step)
    assert notes == ["+noted=1"]
    require_plain_weights(step)


def test_an_evaluation_for_which_no_techniques_can_be_installed_says_so(notes):
    step = step_with(configuration(8, 0))
    TECHNIQUES["noted"].num_failures = 2
    with pytest.raises(OutOfMemoryError, match="in the evaluation phase"):
        step.evaluate(CASE.batches()[:1])
    assert step.evaluate(CASE.batches()[:1]).oom_events == ()  # and it can be asked again
