"""Predictions of a job: verdicts, other sizes, and changes that would make it fit."""

from contextlib import nullcontext

import pytest

from plimsoll.data.quick_facts import TextSketch
from plimsoll.device.cuda.gpus import all_gpus, find_gpu
from plimsoll.errors import DeviceError, InputError, JobError
from plimsoll.planning.cached_traces import trace_of
from plimsoll.planning.dry_run.processes import Tracers
from plimsoll.planning.predict_job import batch_lengths, predict_job
from plimsoll.records.comparison import Calibration, Learned
from plimsoll.records.comparison import Target as LearnedTarget
from plimsoll.records.job import Job
from processes import run_program

MIB = 1 << 20
LSTM = {"architecture": "lstm", "embedding_size": 64, "hidden_size": 64}


def job(**changes):
    fields = {
        "model": LSTM,
        "data": {"train": "nowhere.txt"},
        "tokenizer": {"train": "bpe", "vocab_size": 2000},
        "sequence_length": 32,
        "batch_size": 16,
    }
    return Job.from_fields(fields | changes)


def test_a_small_job_fits_a_gpu_that_is_not_here():
    prediction = predict_job(job(), device="rtx3060")
    assert prediction.fits
    assert prediction.verdict == "fits"
    assert (prediction.micro_batch, prediction.sequence_length, prediction.batch_size) == (16, 32, 16)
    assert sum(prediction.parts.values()) == prediction.peak.likely_bytes
    assert prediction.answers == ()


@pytest.mark.long
def test_where_it_does_not_fit_the_largest_micro_batch_that_does_is_found_and_is_right():
    whole = predict_job(job(batch_size=256), device="rtx3060")
    limit_bytes = (whole.peak.likely_bytes + whole.context.likely_bytes) // 2
    prediction = predict_job(job(batch_size=256), device="rtx3060", limit_bytes=limit_bytes)
    assert not prediction.fits
    (answer,) = prediction.answers
    assert answer.question == "largest micro-batch"
    assert predict_job(job(batch_size=256), device="rtx3060", limit_bytes=limit_bytes, micro_batch=answer.value).fits
    larger = max(answer.value + 1, int(1.03 * answer.value) + 1)
    assert not predict_job(job(batch_size=256), device="rtx3060", limit_bytes=limit_bytes, micro_batch=larger).fits


def test_no_micro_batch_fits_where_the_model_does_not():
    prediction = predict_job(job(), device="rtx3060", limit_bytes=160 * MIB)
    assert [answer.value for answer in prediction.answers] == [None]


def test_all_three_questions_are_answered():
    prediction = predict_job(job(), device="rtx3060", limit_bytes=512 * MIB, search=True)
    answers = {answer.question: answer for answer in prediction.answers}
    assert answers["largest micro-batch"].value > 16
    assert answers["longest sequence"].value > 32
    assert answers["smallest device"].peak.likely_bytes <= answers["largest micro-batch"].peak.likely_bytes
    for answer in prediction.answers[:2]:
        assert answer.peak.likely_bytes <= 512 * MIB


def test_other_sizes_are_predicted_and_grow():
    """Passes have 2,048 tokens or more: below that, a block with a segment of its own reduces the reserved memory."""
    prediction = predict_job(job(batch_size=64, sequence_length=64), device="t4", what_if=True)
    peaks = {(one.micro_batch, one.sequence_length): one.peak.likely_bytes for one in prediction.what_ifs}
    assert sorted(peaks) == [(size, length) for size in (32, 64, 128) for length in (32, 64, 128)]
    assert peaks[32, 32] < peaks[64, 64] < peaks[128, 128]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_size_is_predicted_as_a_job_of_that_size_is(ranks):
    whole = predict_job(job(ranks=ranks), device="t4", what_if=True)
    own = 16 // ranks
    (larger,) = [one for one in whole.what_ifs if (one.micro_batch, one.sequence_length) == (2 * own, 32)]
    assert larger.peak == predict_job(job(ranks=ranks, batch_size=32), device="t4").peak
    (longer,) = [one for one in whole.what_ifs if (one.micro_batch, one.sequence_length) == (own, 64)]
    assert longer.peak == predict_job(job(ranks=ranks, sequence_length=64), device="t4").peak


def test_other_sizes_are_no_smaller_than_one_sample_of_two_tokens():
    prediction = predict_job(job(sequence_length=2, batch_size=1), device="t4", what_if=True)
    sizes = [(one.sequence_length, one.micro_batch) for one in prediction.what_ifs]
    assert sizes == [(2, 1), (2, 2), (4, 1), (4, 2)]


@pytest.mark.long
def test_a_model_with_places_for_so_many_tokens_is_not_predicted_beyond_them():
    """100 positions are enough for twice the job's 32 tokens, and too few for four times as many."""
    gpt2 = {"architecture": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 100}
    prediction = predict_job(job(model=gpt2, batch_size=1), device="h200", search=True)
    answers = {answer.question: answer for answer in prediction.answers}
    assert (answers["longest sequence"].value, answers["longest sequence"].is_bound) == (64, True)
    assert answers["longest sequence"].peak.likely_bytes >= prediction.peak.likely_bytes
    none = predict_job(job(model=gpt2 | {"n_positions": 48}, batch_size=1), device="h200", what_if=True).what_ifs
    assert {one.sequence_length for one in none} == {16, 32}


@pytest.mark.long
def test_the_smallest_card_is_one_on_which_it_fits_and_none_with_less_memory_does():
    large = job(batch_size=64, sequence_length=512, tokenizer={"vocab_size": 20_000})
    answers = predict_job(large, device="h200", search=True).answers
    (value,) = [answer.value for answer in answers if answer.question == "smallest device"]
    assert predict_job(large, device=value).fits
    smaller = [gpu for gpu in all_gpus() if gpu.capacity_bytes < find_gpu(value).capacity_bytes]
    largest = max(smaller, key=lambda gpu: gpu.capacity_bytes)
    assert not predict_job(large, device=largest.name).fits


def test_the_budget_of_a_job_is_the_limit_where_no_other_is_given():
    of_less = job(budget={"device": "900MiB"})
    assert predict_job(of_less, device="t4").limit_bytes == 900 * MIB
    assert predict_job(of_less, device="t4", limit_bytes=800 * MIB).limit_bytes == 800 * MIB


def test_on_the_cpu_the_process_is_counted_too():
    prediction = predict_job(job(), device="cpu", limit_bytes=2048 * MIB)
    assert prediction.device_kind == "cpu"
    assert prediction.parts["baseline"] > 50 * MIB
    assert prediction.peak.measured_bytes > 50 * MIB


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(DeviceError, match="there is no GPU 'rtx'"):
        predict_job(job(), device="rtx")
    for size in (17, -1):
        with pytest.raises(InputError, match=f"a micro-batch of {size} is not a part of a batch of 16"):
            predict_job(job(), device="t4", micro_batch=size)
    assert [predict_job(job(), device="t4", micro_batch=size).micro_batch for size in (1, 16)] == [1, 16]
    with pytest.raises(JobError, match="there is no field `hiden_size`"):
        predict_job(job(model=LSTM | {"hiden_size": 3}), device="t4")


def test_the_longest_batch_decides_where_texts_have_lengths(tmp_path):
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "text.txt").write_text("a text\n")
    classification = job(task="classification", data={"train": str(tmp_path)}, sequence_length=512, batch_size=4)
    whole = predict_job(classification, device="t4")
    short = predict_job(classification, device="t4", lengths=[8] * 99 + [64])
    as_long = predict_job(classification.model_copy(update={"sequence_length": 64}), device="t4")
    assert as_long.allocated.likely_bytes == short.allocated.likely_bytes < whole.allocated.likely_bytes


def test_lengths_that_do_not_matter_or_cannot_be_are_refused():
    with pytest.raises(InputError, match="lengths of texts do not matter for language-modeling"):
        predict_job(job(), device="t4", lengths=[3])
    for lengths in ([], [5, 0, 7]):
        with pytest.raises(InputError, match=rf"cannot use {len(lengths)} lengths, the shortest 0 tokens: give 1 or"):
            predict_job(job(task="classification"), device="t4", lengths=lengths)


def test_batches_are_as_long_as_their_longest_text():
    lengths = batch_lengths([8] * 999 + [30], job(batch_size=1))
    assert lengths[1] == lengths[3] == 30
    assert lengths[0] == lengths[2] == 8
    assert batch_lengths([100], job(batch_size=1)) == (32, 32, 32, 32)
    first, longest, second, again = batch_lengths(range(1, 1001), job(batch_size=1, sequence_length=1000))
    assert longest == again == 1000
    assert len({first, second, longest}) == 3


@pytest.mark.parametrize("counter", ["reserved", "allocated"])
def test_calibration_by_measured_runs_widens_the_range_and_leaves_the_answer(counter, tmp_path):
    """Only the range of the traced part changes: cuBLAS's workspaces have a known size."""
    learned = Learned(num_runs=2, mean=1.1, low=0.9, high=1.3)
    path = tmp_path / "calibration.json"
    Calibration(targets={"cuda 7.5": LearnedTarget(live_ratio=learned)}).save(path)
    prediction = predict_job(job(), device="t4")
    plain = getattr(prediction, counter)
    calibrated = getattr(predict_job(job(), device="t4", calibration=Calibration.load(path)), counter)
    workspaces_bytes = prediction.parts["context"] - prediction.context.likely_bytes
    assert workspaces_bytes > 0
    less_bytes, more_bytes = (
        workspaces_bytes + sum(getattr(one, name) for one in prediction.assumptions)
        for name in ("low_bytes", "high_bytes")
    )
    assert calibrated.likely_bytes == plain.likely_bytes
    assert calibrated.low_bytes - less_bytes == pytest.approx(0.9 * (plain.low_bytes - less_bytes), abs=2)
    assert calibrated.high_bytes - more_bytes == pytest.approx(1.3 * (plain.high_bytes - more_bytes), abs=2)
    elsewhere = getattr(predict_job(job(), device="rtx3060", calibration=Calibration.load(path)), counter)
    assert elsewhere == getattr(predict_job(job(), device="rtx3060"), counter)


@pytest.mark.long
def test_what_a_job_pins_is_predicted_and_so_is_what_its_ranks_exchange():
    """Each of the two blocks has 198,272 parameters, and rank 0 of 4 gathers one at a time."""
    gpt2 = {"architecture": "gpt2", "n_layer": 2, "n_embd": 128, "n_head": 2}
    plain, sharded = (
        predict_job(job(model=gpt2, ranks=4, pin=pin), device="a100-pcie-40gb")
        for pin in ([], ["fully_shard=twice", "micro_batch=1"])
    )
    assert plain.micro_batch == sharded.micro_batch == 4  # per rank: each prediction has its own size
    assert plain.exchange.gathered_bytes == 0 < plain.exchange.added_up_bytes
    assert sharded.exchange.added_up_bytes == 0
    assert sharded.exchange.largest_gathered_bytes >= 4 * 198_272
    assert sharded.parts["optimizer states"] < plain.parts["optimizer states"] / 3
    assert predict_job(job(model=gpt2), device="a100-pcie-40gb").exchange is None


TWICE = """
import sys
from plimsoll.records.job import Job
from plimsoll.planning import predict_job as forecast
from plimsoll.planning.dry_run import step as dry_run

traces, dry_run_job = [], dry_run.dry_run_job
forecast.trace_of = lambda *given, **named: (traces.append(dry_run_job(*given, **named)) or traces[-1], False)
fields = {"model": {"architecture": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2}, "data": sys.argv[1]}
job = forecast.Job.from_fields(fields | {"tokenizer": {"vocab_size": 300}, "sequence_length": 16, "batch_size": 4})
for _ in range(2):
    forecast.predict_job(job, device="rtx3060")
first, second = traces
print(first.ops.name == second.ops.name, first.storages.num_bytes == second.storages.num_bytes)
"""


@pytest.mark.cold
@pytest.mark.long
def test_the_first_prediction_of_a_process_is_that_of_the_second(tmp_path):
    """Modules that are imported in a dry run would not see its stubs, and GPT-2 would build a mask."""
    text = tmp_path / "text.txt"
    text.write_text("a ship sails on the sea " * 200)
    done = run_program(TWICE, text)
    assert done.stdout == "True True\n", done.stderr


def test_the_size_below_the_first_guess_is_supposed_and_says_the_same(monkeypatch):
    """Only for the unchanged job: larger batches belong to another job."""
    supposed, taken = [], []

    class Fake(Tracers):
        def suppose(self, asked):
            supposed.extend(asked)

        def take(self, asked):
            taken.append(asked)
            return trace_of(job(batch_size=256), TextSketch(2000, None, 0), *asked[:2]) if asked in supposed else None

    whole = predict_job(job(batch_size=256), device="rtx3060")
    limit_bytes = int(0.8 * whole.peak.likely_bytes)
    alone = predict_job(job(batch_size=256), device="rtx3060", limit_bytes=limit_bytes)
    monkeypatch.setattr(Tracers, "started", lambda *asked: nullcontext(Fake()))
    beside = predict_job(job(batch_size=256), device="rtx3060", limit_bytes=limit_bytes)
    assert beside.answers == alone.answers
    sizes = [one.choices[-1].options["samples"] for one in taken]
    assert [one.choices[-1].options["samples"] for one in supposed] == [sizes[1] - 1]
    taken.clear()
    predict_job(job(), device="rtx3060", limit_bytes=limit_bytes, search=True)
    assert {one.choices[-1].options["samples"] for one in taken} == {16}
