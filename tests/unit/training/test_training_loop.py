"""The training loop with a tiny LSTM in this process: its output, where it stops and how it resumes."""

import os
import re
import shutil
import signal
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import plimsoll.training.loop
from plimsoll.errors import CheckpointError, FragmentedHeapError, Interrupted, NonFiniteLossError, OutOfMemoryError
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, Configuration, Plan, micro_batch_choice
from plimsoll.records.run import CheckpointLine, EvaluationLine, OomEvent, RunRecord, StepLine
from plimsoll.step.failpoints import armed, exhaust_memory
from plimsoll.training.run_directory import RunDirectory
from small_runs import make_run, small_job, train_here


def record_of(directory):
    return RunRecord.from_directory(directory.path)


def weights_of(directory):
    return load_file(directory.model / "model.safetensors")


def assert_same_weights(one, other):
    expected, found = weights_of(one), weights_of(other)
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def of_kind(directory, kind):
    return [line for line in directory.lines() if isinstance(line, kind)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text, cache):
    """Return a run of six undisturbed steps."""
    directory = make_run(tmp_path_factory.mktemp("runs") / "whole", small_job(text), cache)
    train_here(directory)
    return directory


def test_a_run_writes_every_step_once_and_its_record(whole):
    record = record_of(whole)
    assert record == RunRecord.load(whole.record)
    assert record.status == "finished"
    assert [step.step for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert [step.first_sample for step in record.steps] == [0, 8, 16, 24, 32, 40]
    assert {step.num_units for step in record.steps} == {8 * 31}
    assert [step.loss for step in record.steps] == sorted((step.loss for step in record.steps), reverse=True)
    assert [line.step for line in record.checkpoints] == [2, 4, 6]
    assert [line.step for line in record.evaluations] == [6]
    assert record.evaluations[0].loss < record.steps[0].loss
    assert [start.step for start in record.starts] == [0]
    assert record.peak_bytes > record.starts[0].baseline_bytes
    assert sorted(path.name for path in whole.checkpoints.iterdir()) == ["step-00000004", "step-00000006"]
    assert {"config.json", "model.safetensors"} <= {path.name for path in whole.model.iterdir()}


def test_the_times_of_the_lines_never_go_back(whole):
    times = [line.time_seconds for line in whole.lines()]
    assert times == sorted(times)


def test_evaluations_come_as_often_as_asked_for_and_change_nothing(new_run, whole):
    directory = new_run(evaluate_every=2)
    train_here(directory)
    assert [line.step for line in of_kind(directory, EvaluationLine)] == [2, 4, 6]
    assert_same_weights(whole, directory)


@pytest.mark.parametrize(("every", "steps"), [(None, [3]), (1, [1, 2, 3]), (2, [2, 3]), (3, [3]), (4, [3])])
def test_the_last_step_is_saved_and_evaluated_once_whatever_the_intervals_are(new_run, every, steps):
    directory = new_run(steps=3, evaluate_every=every)
    train_here(directory)
    assert [line.step for line in of_kind(directory, EvaluationLine)] == steps
    assert [line.step for line in of_kind(directory, CheckpointLine)] == [2, 3]


def test_without_texts_to_validate_with_nothing_is_evaluated(new_run, text):
    directory = new_run(steps=1, data={"train": str(text)}, evaluate_every=1)
    train_here(directory)
    assert record_of(directory).evaluations == ()


def test_a_classifier_says_how_often_it_is_right(tmp_path, new_run, capsys):
    """One word decides between two classes, which the model learns completely."""
    for label, word in (("ham", "ship"), ("spam", "coin")):
        (tmp_path / "texts" / label).mkdir(parents=True)
        for number in range(20):
            (tmp_path / "texts" / label / f"{number}.txt").write_text(f"{word} " * (number + 1))
    shutil.copytree(tmp_path / "texts", tmp_path / "others")
    directory = new_run(
        task="classification",
        data={"train": str(tmp_path / "texts"), "validation": str(tmp_path / "others")},
        steps=60,
        optimizer={"lr": 0.03},
    )
    train_here(directory, quiet=False)
    (line,) = of_kind(directory, EvaluationLine)
    assert (line.num_samples, line.accuracy, line.entity_f1) == (40, 1.0, None)
    assert f"step 60: validation loss {line.loss:.4f}, accuracy 100.0% over 40 samples" in capsys.readouterr().err


def test_of_texts_in_windows_and_of_words_the_accuracy_says_so(tmp_path, new_run, capsys):
    for label in ("ham", "spam"):
        (tmp_path / "texts" / label).mkdir(parents=True)
        (tmp_path / "texts" / label / "1.txt").write_text(f"{label} " * 40)
    for name in ("train", "validation"):
        (tmp_path / f"{name}.conll").write_text("Ada B-PER\nslept O\n\n" * 9)
    shutil.copytree(tmp_path / "texts", tmp_path / "others")
    jobs = [
        {
            "task": "classification",
            "data": {"train": f"{tmp_path}/texts", "validation": f"{tmp_path}/others", "long_texts": "window"},
            "batch_size": 1,
        },
        {
            "task": "token-classification",
            "data": {name: str(tmp_path / f"{name}.conll") for name in ("train", "validation")},
            "tokenizer": {"train": "words"},
            "batch_size": 2,
        },
    ]
    for number, job in enumerate(jobs):
        train_here(new_run(str(number), steps=1, **job), quiet=False)
    texts, words = [line for line in capsys.readouterr().err.splitlines() if "validation loss" in line]
    assert re.search(r", accuracy \d+\.\d% of the texts over", texts)
    assert re.search(r", accuracy \d+\.\d% of the words, entity F1 \d+\.\d%", words)


def test_a_resumed_run_reads_states_that_are_to_be_in_a_file_into_one(new_run, monkeypatch):
    directory = new_run(steps=2)
    choices = (micro_batch_choice(8), Choice(technique="optimizer_offload", options={"to": "disk"}))
    plan = Plan.load(directory.plan).model_copy(update={"fallbacks": (Configuration(choices=choices),)})
    plan.save(directory.plan)
    train_here(directory)
    seen = []

    def look_and_train(training, restarts):
        states = training.step.workload.optimizer.state.values()
        seen.extend(_is_in_a_file(state["exp_avg"]) for state in states)

        return train(training, restarts)

    train = plimsoll.training.loop.train
    monkeypatch.setattr(plimsoll.training.loop, "train", look_and_train)
    directory.job.write_text(directory.job.read_text().replace("steps: 2", "steps: 4"))
    train_here(directory, resume=True)
    assert seen
    assert all(seen)


def _is_in_a_file(tensor):
    address = tensor.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                return "rw-s" in line
    return False


def test_a_language_model_has_no_accuracy(whole):
    assert record_of(whole).evaluations[0].accuracy is None


@pytest.mark.parametrize(("failing", "phase"), [("fetch", "fetch"), ("checkpoint", "checkpoint")])
def test_memory_running_out_between_steps_is_survived(new_run, whole, failing, phase):
    directory = new_run()
    with armed(failing, 2):
        train_here(directory)
    (event,) = of_kind(directory, OomEvent)
    assert (event.phase, event.action, event.micro_batch) == (phase, "freed what could be freed, tried again", None)
    assert_same_weights(whole, directory)


def test_memory_running_out_in_a_step_is_noted_where_it_happened(new_run, capsys):
    directory = new_run()
    with armed("forward", 1):
        train_here(directory, quiet=False)
    told = "out of memory in forward, step 1 (asked for 1024.0 PiB): micro-batch 8 -> 4\n"
    assert told in capsys.readouterr().err
    kinds = [type(line) for line in directory.lines()[1:3]]
    assert kinds == [OomEvent, StepLine]
    (event,) = of_kind(directory, OomEvent)
    assert (event.step, event.phase, event.micro_batch, event.next_micro_batch) == (1, "forward", 8, 4)
    assert [step.micro_batch for step in record_of(directory).steps] == [4] * 3 + [8] * 3


def test_memory_that_stays_away_ends_the_run_with_its_checkpoints(new_run):
    directory = new_run()
    with (
        armed("checkpoint", 4, 5, 6),
        pytest.raises(OutOfMemoryError, match=r"ran out 3 times in the checkpoint phase"),
    ):
        train_here(directory)
    record = record_of(directory)
    assert (record.status, len(record.steps), len(record.oom_events)) == ("failed", 4, 3)
    assert "give a larger budget" in record.message
    assert [event.survived for event in record.oom_events] == [True, True, False]
    assert [path.name for path in directory.checkpoints.iterdir()] == ["step-00000002"]


def test_with_no_fallback_left_after_others_failed_it_saves_and_asks_for_a_new_process(new_run, whole, monkeypatch):
    """Every pass of the fourth step fails twice, down to single samples, before the third step has been saved."""
    monkeypatch.setenv("PLIMSOLL_SUPERVISOR", str(os.getppid()))
    directory = new_run()
    with armed("forward", *range(4, 30)), pytest.raises(FragmentedHeapError, match="start a new process"):
        train_here(directory)
    events = of_kind(directory, OomEvent)
    assert [event.next_fallback for event in events] == [0, 1, 1, 2, 2, 3, 3, None]  # all had fitted: two tries
    assert (events[-1].survived, events[-1].action[:13]) == (True, "a new process")
    assert of_kind(directory, CheckpointLine)[-1].step == 3
    train_here(directory, resume_newest=True, fallback=3, restarts=1)
    record = record_of(directory)
    assert [(step.step, step.micro_batch) for step in record.steps] == [(1, 8), (2, 8), (3, 8), (4, 1), (5, 1), (6, 1)]
    assert [start.step for start in record.starts] == [0, 3]
    losses = [[step.loss for step in record_of(one).steps] for one in (directory, whole)]
    assert losses[0][:3] == losses[1][:3]  # later steps have other dropout masks


@pytest.mark.parametrize("options", [{"fallback": 3}, {}], ids=["one fallback", "no supervisor"])
def test_otherwise_there_is_nothing_to_hope_for_from_a_new_process(options, new_run, monkeypatch):
    if options:
        monkeypatch.setenv("PLIMSOLL_SUPERVISOR", str(os.getppid()))
    directory = new_run()
    with armed("forward", *range(1, 30)), pytest.raises(OutOfMemoryError) as caught:
        train_here(directory, **options)
    assert type(caught.value) is OutOfMemoryError
    assert not of_kind(directory, OomEvent)[-1].survived


def test_a_step_that_has_held_is_tried_again_after_a_pause_where_nothing_smaller_is_left(new_run, monkeypatch):
    """The first step, on the last fallback, runs out of memory in two phases, as it would in every other process."""
    monkeypatch.setenv("PLIMSOLL_SUPERVISOR", str(os.getppid()))
    directory = new_run()
    with armed("forward", *range(4, 30)), pytest.raises(FragmentedHeapError):
        train_here(directory)
    monkeypatch.setattr("plimsoll.training.pauses._SECONDS", (0.01,))
    with armed("forward", 1), armed("loss", 2):
        train_here(directory, resume_newest=True, fallback=3, restarts=1)
    record = record_of(directory)
    assert record.status == "finished"
    events = [event for event in record.oom_events if event.step == 4][-2:]
    assert [(event.phase, event.survived) for event in events] == [("forward", True), ("loss", True)]
    assert events[-1].action == "the same again in 0.01 s: it has held before"
    assert [step.step for step in record.steps] == [1, 2, 3, 4, 5, 6]


def test_pauses_end_where_memory_stays_away_and_where_somebody_asks_to_stop(new_run, monkeypatch):
    monkeypatch.setattr("plimsoll.training.pauses._SECONDS", (0.01, 0.02))
    directory = new_run()
    with armed("forward", *range(4, 60)), pytest.raises(OutOfMemoryError):
        train_here(directory)  # without a supervisor
    last = of_kind(directory, OomEvent)[-6:]
    assert [(event.survived, event.action) for event in last if event.next_fallback is None] == [
        (True, "the same again in 0.01 s: it has held before"),
        (True, "the same again in 0.02 s: it has held before"),
        (False, "stopped: nothing is left to try"),
    ]
    assert record_of(directory).status == "failed"
    monkeypatch.setattr("plimsoll.training.pauses._SECONDS", (60.0,))
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr("plimsoll.training.pauses.time", clock)
    with armed("forward", *range(1, 60)), pytest.raises(Interrupted):
        train_here(directory, resume=True)


@pytest.mark.parametrize(
    ("phase", "passages"), [("forward", range(17, 60)), ("fetch", range(3, 6)), ("checkpoint", range(4, 7))]
)
def test_a_process_that_has_done_steps_and_has_no_fallback_left_asks_for_a_new_process(
    phase, passages, new_run, monkeypatch
):
    """The process starts at the last fallback, with eight passes per step, and its third step runs out of memory."""
    monkeypatch.setenv("PLIMSOLL_SUPERVISOR", str(os.getppid()))
    directory = new_run()
    with armed(phase, *passages), pytest.raises(FragmentedHeapError, match="start a new process"):
        train_here(directory, fallback=3)
    assert all(event.survived for event in of_kind(directory, OomEvent))
    train_here(directory, resume_newest=True, fallback=3, restarts=1)
    assert [step.step for step in record_of(directory).steps] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("passages", "checkpoints"), [((4, 5, 6), [2, 3]), ((5, 6, 7), [2, 4])])
def test_what_was_done_before_a_fetch_without_room_is_saved_once_for_the_new_process(
    passages, checkpoints, new_run, monkeypatch
):
    monkeypatch.setenv("PLIMSOLL_SUPERVISOR", str(os.getppid()))
    directory = new_run()
    with (
        armed("fetch", *passages),
        pytest.raises(FragmentedHeapError, match=f"fetch phase after step {passages[0] - 1}"),
    ):
        train_here(directory)
    assert [line.step for line in of_kind(directory, CheckpointLine)] == checkpoints


def test_a_record_without_room_is_left_to_the_supervisor(new_run, monkeypatch):
    monkeypatch.setattr(RunDirectory, "write_record", lambda directory: exhaust_memory())
    directory = new_run()
    train_here(directory)
    assert (record_of(directory).status, directory.has_its_record()) == ("finished", False)
    assert (directory.model / "tokenizer_config.json").is_file()  # it is written after the model


@pytest.mark.parametrize("every", [None, 3], ids=["at the end", "between steps"])
def test_an_evaluation_that_finds_no_room_is_done_in_a_new_process(every, new_run, whole, monkeypatch):
    """Fragmentation by training steps is in the way: a new kernel needs pages of its own."""
    monkeypatch.setenv("PLIMSOLL_SUPERVISOR", str(os.getppid()))
    directory = new_run(evaluate_every=every)
    with armed("evaluation", *range(1, 30)), pytest.raises(FragmentedHeapError, match="start a new process"):
        train_here(directory)
    assert [line.step for line in of_kind(directory, CheckpointLine)] == ([2, 3] if every else [2, 4, 6])
    assert not of_kind(directory, EvaluationLine)
    train_here(directory, resume_newest=True, restarts=1)
    assert [line.step for line in of_kind(directory, EvaluationLine)] == ([3, 6] if every else [6])
    assert [step.step for step in record_of(directory).steps] == [1, 2, 3, 4, 5, 6]
    assert_same_weights(whole, directory)


def test_texts_that_find_no_room_to_be_read_for_an_evaluation_are_tried_three_times(new_run, monkeypatch):
    """Finished steps are saved before the request for a new process, which may have enough memory."""
    monkeypatch.setenv("PLIMSOLL_SUPERVISOR", str(os.getppid()))
    monkeypatch.setattr(plimsoll.training.loop, "iterate_once", lambda *_: exhaust_memory())
    directory = new_run(evaluate_every=3)
    with pytest.raises(FragmentedHeapError, match="the evaluation after step 3 has no room in this process"):
        train_here(directory)
    events = of_kind(directory, OomEvent)
    assert [(event.phase, event.survived) for event in events] == [("evaluation", number < 2) for number in range(3)]
    assert [line.step for line in of_kind(directory, CheckpointLine)] == [2, 3]


def test_a_new_process_without_room_for_an_evaluation_says_so(new_run, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_SUPERVISOR", str(os.getppid()))
    directory = new_run()
    with armed("evaluation", *range(1, 30)), pytest.raises(FragmentedHeapError):
        train_here(directory)
    with armed("evaluation", *range(1, 30)), pytest.raises(OutOfMemoryError) as caught:
        train_here(directory, resume_newest=True, restarts=1)
    assert type(caught.value) is OutOfMemoryError


def test_a_run_goes_on_from_its_newest_checkpoint_to_the_same_bits(new_run, whole):
    directory = new_run()
    with armed("fetch", 6, 7, 8), pytest.raises(OutOfMemoryError):  # in the sixth step, two after the checkpoint
        train_here(directory)
    train_here(directory, resume=True)
    record = record_of(directory)
    assert [step.step for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert [start.step for start in record.starts] == [0, 4]
    assert record.status == "finished"
    assert_same_weights(whole, directory)


def test_an_evaluation_that_was_done_before_the_process_ended_is_not_done_again(new_run, whole):
    directory = new_run(evaluate_every=2)
    with armed("fetch", 5, 6, 7), pytest.raises(OutOfMemoryError):
        train_here(directory)
    train_here(directory, resume=True)
    assert [line.step for line in of_kind(directory, EvaluationLine)] == [2, 4, 6]
    assert [line.step for line in of_kind(directory, CheckpointLine)] == [2, 4, 6]
    assert_same_weights(whole, directory)


def test_it_goes_on_from_an_earlier_one_if_told_to(new_run, whole):
    directory = new_run()
    train_here(directory)
    train_here(directory, resume=True, from_step=4)
    assert [start.step for start in record_of(directory).starts] == [0, 4]
    assert [line.step for line in of_kind(directory, CheckpointLine)] == [2, 4, 6]
    assert_same_weights(whole, directory)


def test_a_finished_run_can_be_made_longer(new_run, whole):
    directory = new_run(steps=4)
    train_here(directory)
    directory.write_job(Job.from_yaml(directory.job, ("steps=6",)))
    train_here(directory, resume=True)
    assert [step.step for step in record_of(directory).steps] == [1, 2, 3, 4, 5, 6]
    assert_same_weights(whole, directory)


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(new_run):
    with pytest.raises(CheckpointError, match="without --resume, and with --force where the run has done steps"):
        train_here(new_run(), resume=True)


def test_after_a_death_before_the_first_checkpoint_it_begins_anew(new_run, whole):
    directory = new_run()
    with armed("fetch", 2, 3, 4), pytest.raises(OutOfMemoryError):
        train_here(directory)
    assert len(of_kind(directory, StepLine)) == 1
    train_here(directory, resume_newest=True, restarts=1)
    record = record_of(directory)
    assert [step.step for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert [start.restarts for start in record.starts] == [0, 1]
    assert_same_weights(whole, directory)


def test_a_signal_stops_it_after_a_step_that_is_saved(new_run, whole):
    directory = new_run(steps=100_000, checkpoint={"every": 100_000})
    done = threading.Event()

    def send_after_some_steps():
        while not done.is_set() and len(of_kind(directory, StepLine)) < 3:
            done.wait(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send_after_some_steps)
    sender.start()
    try:
        with pytest.raises(
            Interrupted, match=r"of 100000, which is saved: go on with `plimsoll train --resume"
        ) as stop:
            train_here(directory)
    finally:
        done.set()
        sender.join()
    record = record_of(directory)
    assert stop.value.exit_code == 128 + signal.SIGTERM
    assert record.status == "interrupted"
    assert [line.step for line in record.checkpoints] == [record.steps[-1].step]


@pytest.mark.parametrize(("number", "checkpoints"), [(3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6])])
def test_a_signal_in_a_step_stops_after_it_and_saves_it_once_and_after_the_last_there_is_nothing_to_stop(
    number, checkpoints, new_run, monkeypatch
):
    def note_and_signal(training, batch, result):
        note_step(training, batch, result)
        if result.step == number:
            os.kill(os.getpid(), signal.SIGTERM)

    note_step = plimsoll.training.loop.note_step
    monkeypatch.setattr(plimsoll.training.loop, "note_step", note_and_signal)
    directory = new_run()
    stopped = nullcontext() if number == 6 else pytest.raises(Interrupted, match=f"after step {number} of 6, which is")
    with stopped:
        train_here(directory)
    assert record_of(directory).status == ("finished" if number == 6 else "interrupted")
    assert [line.step for line in of_kind(directory, CheckpointLine)] == checkpoints


def test_a_loss_that_is_not_finite_names_the_checkpoint_to_go_back_to(new_run):
    # The first update makes weights whose products overflow float32.
    directory = new_run(optimizer={"name": "sgd", "lr": 1e38}, checkpoint={"every": 1})
    with pytest.raises(NonFiniteLossError, match=r"the step was undone.*the last good checkpoint is .*step-0000000"):
        train_here(directory)
    record = record_of(directory)
    assert record.status == "failed"
    assert record.steps
    assert "lower the learning rate (now 1e+38)" in record.message


def test_the_steps_are_on_the_disk_before_the_checkpoint_that_follows_them(new_run, monkeypatch):
    directory, synced, fsync = new_run(steps=2), [], os.fsync

    def note(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((os.path.basename(path), [step.step for step in of_kind(directory, StepLine)]))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    train_here(directory)
    names = [name for name, _ in synced]
    assert ("metrics.jsonl", [1, 2]) in synced[: names.index("model.pt")]
