import pytest

import watch_records
from plimsoll.diagnose.explain import explain
from plimsoll.diagnose.of_watch import diagnosis_of_watch
from plimsoll.records.watch import WatchEnd, WatchRecord, append, begin
from watch_records import MIB, growing, killed, line, use


def _causes(record):
    return [finding.cause for finding in diagnosis_of_watch(record).findings]


def _with(record, **changes):
    """Return the record with some fields replaced in every sample."""
    samples = tuple(sample.model_copy(update=changes) for sample in record.samples)
    return record.model_copy(update={"samples": samples})


def test_a_process_that_grew_until_it_was_killed_is_named_with_its_rate_and_the_limit():
    found = diagnosis_of_watch(killed())
    growth, ran_out, limit = found.findings
    assert (growth.cause, growth.title) == ("growth", "Process 7 (python) grows by 5.0 MiB a second")
    assert growth.effect_bytes == 710 * MIB  # 18 samples are warm-up: from 280 to 990
    assert ran_out.cause == "out_of_memory"
    assert "cgroup v2 memory.max of /job, 990.0 MiB of 1000.0 MiB (99%)" in ran_out.evidence[-1].text
    assert "docker run --memory" in ran_out.remedy
    assert limit.title == "A limit was reached: cgroup v2 memory.max of /job"
    assert found.peak_bytes == 1040 * MIB
    assert found.has_answer


def test_level_memory_far_from_its_limits_explains_nothing():
    found = diagnosis_of_watch(growing(40, 0))
    assert found.findings == ()
    assert not found.has_answer


def test_workers_that_grow_together_are_one_finding_and_one_alone_is_its_own():
    def at(number):
        return (use(7, 500), *(use(pid, 100 + number, parent=7) for pid in (8, 9)))

    record = growing(30, 0)
    samples = tuple(sample.model_copy(update={"processes": at(number)}) for number, sample in enumerate(record.samples))
    (found,) = diagnosis_of_watch(record.model_copy(update={"samples": samples})).findings
    assert (found.cause, found.title) == (
        "workers_grow", "2 processes that process 7 started grow by 1.0 MiB a second",
    )  # fmt: skip
    assert found.effect_bytes == 2 * 23 * MIB
    alone = tuple(sample.model_copy(update={"processes": sample.processes[:2]}) for sample in samples)
    (found,) = diagnosis_of_watch(record.model_copy(update={"samples": alone})).findings
    assert (found.cause, found.title) == ("growth", "Process 8 (python) grows by 512.0 KiB a second")


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (line("machine", "memory of the machine", 960), "Close other programs"),
        (line("shm", "/dev/shm", 1000), "--shm-size"),
        (line("address", "RLIMIT_AS of 7", 990), "ulimit -v"),
        (line("data", "RLIMIT_DATA of 7", 600, seconds_left=30.0), "ulimit -d"),
        (line("gpu", "GPU 0", 950), "nvidia-smi"),
        (line("swap", "swap of the machine", 950), "the kernel kills"),
    ],
    ids=lambda value: value.kind if hasattr(value, "kind") else "",
)
def test_a_limit_that_was_reached_or_near_has_a_remedy_of_its_kind(limit, words):
    (found,) = diagnosis_of_watch(_with(growing(3, 0), lines=(limit,))).findings
    assert found.cause == "limit_reached"
    assert ("was reached" in found.title) == (limit.seconds_left is None)
    assert words in found.remedy


def test_a_run_may_use_its_budget_and_is_told_of_it_only_where_memory_ran_out():
    lines = (line("budget", "budget of the run", 399, 400), line("data", "RLIMIT_DATA of 9", 399, 400))
    record = _with(watch_records.run_watch(), lines=lines, num_kills=0)
    assert _causes(record) == []
    end = WatchEnd(seconds=6.0, how="out_of_memory", exit_code=3, text="process 8 ended with exit code 3")
    (found,) = diagnosis_of_watch(record.model_copy(update={"end": end})).findings
    assert found.cause == "out_of_memory"
    assert "--budget" in found.remedy


def test_a_kill_on_the_way_and_swap_are_found():
    record = _with(growing(12, 0), num_kills=2, processes=(use(7, 100, swap_bytes=20 * MIB),))
    assert _causes(record) == ["out_of_memory", "swap"]
    (facts, _) = (finding.evidence for finding in diagnosis_of_watch(record).findings)
    assert "rose by 2 processes" in facts[0].text
    assert "memory of the machine" in facts[1].text


@pytest.mark.parametrize("num_samples", [0, 1, 2, 10])
def test_few_samples_say_what_they_cannot_tell(num_samples):
    found = diagnosis_of_watch(growing(num_samples))
    assert found.findings == ()
    assert "cannot be told from fewer than 11 samples" in " ".join(found.notes)


def test_explain_reads_a_recording_by_its_content(tmp_path):
    path = tmp_path / "anything.log"
    record = killed()
    begin(path, WatchRecord(subject=record.subject))
    for sample in record.samples:
        append(path, sample)
    append(path, record.end)
    assert explain(path) == diagnosis_of_watch(record)
