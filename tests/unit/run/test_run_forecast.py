"""Predictions of a job: verdicts, what would fit, and other sizes."""

import pytest

from plimsoll.errors import DeviceError, InputError, JobError
from plimsoll.records.job import Job
from plimsoll.run.forecast import predict_job

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
    prediction = predict_job(job(), device="t4", what_if=True)
    peaks = {(one.micro_batch, one.sequence_length): one.peak.likely_bytes for one in prediction.what_ifs}
    assert sorted(peaks) == [(size, length) for size in (8, 16, 32) for length in (16, 32, 64)]
    assert peaks[8, 16] <= peaks[16, 32] < peaks[32, 64]


def test_on_the_cpu_the_process_is_counted_too():
    prediction = predict_job(job(), device="cpu", limit_bytes=2048 * MIB)
    assert prediction.device_kind == "cpu"
    assert prediction.parts["baseline"] > 50 * MIB
    assert prediction.peak.measured_bytes > 50 * MIB


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(DeviceError, match="there is no GPU 'rtx'"):
        predict_job(job(), device="rtx")
    with pytest.raises(InputError, match="a micro-batch of 17 is not a part of a batch of 16"):
        predict_job(job(), device="t4", micro_batch=17)
    with pytest.raises(JobError, match="there is no field `hiden_size`"):
        predict_job(job(model=LSTM | {"hiden_size": 3}), device="t4")
