"""Evaluation in passes of a given size: the same mean, and a peak that falls."""

import pytest
import torch
from traced_steps import dry_run, recorded

from plimsoll.memory.live import live_bytes
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import Setting, conflict_among, installed
from plimsoll.techniques.evaluation import EvaluationPass
from technique_models import fresh, workload_of


def passes_of(samples):
    return Choice(technique="evaluation", options={"samples": samples})


def test_the_size_is_said_to_the_workload_and_taken_back():
    workload = workload_of(fresh("gpt2")[0])
    with installed(workload, (passes_of(4),)):
        assert workload.hooks.evaluation_samples == 4
        with installed(workload, (passes_of(2),)):
            assert workload.hooks.evaluation_samples == 2
        assert workload.hooks.evaluation_samples == 4
    assert workload.hooks.evaluation_samples is None


def test_training_has_the_same_bits_and_the_evaluation_the_same_mean():
    results = []
    for choices in ((), (passes_of(2),)):
        model, batch = fresh("bert")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainStep(
            model, optimizer, units="samples", fallbacks=[[*choices, micro_batch_choice(8)]], recut_loss=True
        )
        torch.manual_seed(1)
        step(batch)
        evaluation = step.evaluate([batch])
        loss = step(batch).loss
        results.append((evaluation.loss, loss, model.state_dict()))
    plain, cut = results
    assert plain[0] == pytest.approx(cut[0], rel=1e-6)
    assert plain[1] == cut[1]
    assert all(torch.equal(plain[2][name], cut[2][name]) for name in plain[2])


@pytest.mark.parametrize("trace_of", [dry_run, recorded])
def test_smaller_passes_need_less(trace_of):
    """The logits of a sample are 12 x 50 floats; with log_softmax and copies, several such tensors are alive."""
    model, batch = fresh("gpt2")
    peaks = []
    for choices in ((), (passes_of(4),), (passes_of(1),)):
        trace = trace_of(model, batch, choices, evaluates=True)
        live = live_bytes(trace)
        rows = [row for row, event in enumerate(live.event) if trace.ops.phase[trace.event_op[event]] == "evaluation"]
        peaks.append(max(live.total[row] for row in rows))
    assert peaks[0] - peaks[1] > 4 * 12 * 50 * 4
    assert peaks[0] > peaks[1] > peaks[2]


def test_the_choices():
    model, batch = fresh("gpt2")
    choices_of = EvaluationPass().choices
    workload = workload_of(model)
    assert choices_of(workload, Setting(device="cpu", batch_size=1)) == "a batch of one sample cannot be cut"
    assert [str(choice) for choice in choices_of(workload, Setting(device="cpu", batch_size=10))] == [
        "evaluation=5",
        "evaluation=3",
        "evaluation=2",
        "evaluation=1",
    ]
    without, with_one = dry_run(model, batch), dry_run(model, batch, evaluates=True)
    assert choices_of(workload, Setting("cpu", 8, without)) == "the training does not evaluate"
    assert choices_of(workload, Setting("cpu", 8, with_one)) == (passes_of(4), passes_of(2), passes_of(1))


def test_no_samples_are_refused():
    workload = workload_of(fresh("gpt2")[0])
    reason = conflict_among((passes_of(0),), workload, Setting(device="cpu", batch_size=8))
    assert reason == "evaluation=0: an evaluation pass of 0 samples evaluates nothing: give 1 or more"
