"""The limit holds: what a training process really uses, read from outside, stays under its budget."""

from __future__ import annotations

from end_to_end.commands import PeakWatch, assert_each_sample_once, finish, start, steps_of, wait_for_worker, write_job
from plimsoll.records.run import RunRecord

BUDGET_BYTES = 360 << 20


def test_private_memory_stays_under_a_tight_budget(cache, tmp_path):
    """The whole batch needs some 250 MiB more than the 240 MiB that the process takes by itself."""
    run = tmp_path / "run"
    model = {"architecture": "lstm", "embedding_size": 64, "hidden_size": 64}
    job = write_job(
        tmp_path / "job.yaml", model=model, batch_size=128, sequence_length=64, tokenizer={"vocab_size": 2000}
    )
    process = start("train", job, "--out", run, "--cache", cache, "--budget", BUDGET_BYTES, "--json")
    with PeakWatch(wait_for_worker(process).pid).watching() as watch:
        done = finish(process)
    assert done.returncode == 0, done.stderr
    record = RunRecord.from_directory(run)
    print(f"{watch.peak_bytes >> 20} of {BUDGET_BYTES >> 20} MiB in {watch.num_readings} readings; {record.oom_events}")
    assert watch.num_readings > 100
    assert watch.peak_bytes <= BUDGET_BYTES
    assert record.oom_events
    assert record.steps[-1].micro_batch < 128
    assert abs(record.peak_bytes - watch.peak_bytes) < 32 << 20
    assert_each_sample_once(steps_of(run), 5)
