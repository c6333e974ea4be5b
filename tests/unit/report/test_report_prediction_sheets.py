"""The sentences and tables of a prediction, compared with the hand-built predictions of `prediction_records`."""

from __future__ import annotations

import pytest

from plimsoll.records.prediction import Answer, Estimate, Exchange, WhatIf
from plimsoll.records.trace import Assumption
from plimsoll.report import prediction_sheets as sheets
from prediction_records import GPT2, MIB, bare, estimate, fitting, moment, on_cpu, too_large

RTX = "on NVIDIA GeForce RTX 3060"


@pytest.mark.parametrize(
    ("prediction", "sentence"),
    [
        (fitting(), f"Fits: 1000.0 MiB of 2.0 GiB (range 960.0 MiB to 1.0 GiB) {RTX}."),
        (on_cpu(), "Probably fits: 1000.0 MiB of 1.0 GiB (range 900.0 MiB to 1.1 GiB) on Example CPU."),
        (
            too_large(),
            f"Does not fit: 3.0 GiB of 2.0 GiB (range 2.9 to 3.1 GiB) {RTX}, 1.0 GiB too much; "
            "the largest micro-batch that fits is 5.",
        ),
        (
            too_large(answers=(Answer(question="largest micro-batch", value=None, peak=None),)),
            f"Does not fit: 3.0 GiB of 2.0 GiB (range 2.9 to 3.1 GiB) {RTX}, 1.0 GiB too much; "
            "no micro-batch fits, not even 1.",
        ),
        (
            fitting(runs_out_at=moment(), answers=()),
            f"Probably does not fit: 1000.0 MiB of 2.0 GiB (range 960.0 MiB to 1.0 GiB) {RTX}, "
            "but the allocator has no free block large enough for one request.",
        ),
        (bare(), f"Fits: 1000.0 MiB of 2.0 GiB {RTX}."),
    ],
)
def test_the_verdict_is_one_sentence(prediction, sentence):
    assert sheets.verdict_sentence(prediction) == sentence


def test_when_the_peak_is_and_where_memory_runs_out():
    assert sheets.moment_sentences(too_large()) == (
        "The peak is in step 2, backward: aten::mm in lm_head, at …/models/gpt2/modeling_gpt2.py:97.",
        "Memory runs out in step 1, backward: aten::addmm in transformer.h.2.mlp, "
        "at …/models/gpt2/modeling_gpt2.py:97.",
    )
    assert sheets.moment_sentences(bare()) == ("The peak is in setup.",)


def test_a_moment_without_op_or_module_leaves_them_out():
    assert sheets.moment_text(moment(op="", line="a.py:1")) == "step 2, backward in lm_head, at a.py:1"
    assert sheets.moment_text(moment(op="", module="", line="", step=1000)) == "step 1,000, backward"


@pytest.mark.parametrize(
    ("line", "short"),
    [
        ("train.py:12", "train.py:12"),
        (f"/opt/venv/{GPT2}", "…/models/gpt2/modeling_gpt2.py:97"),
        ("a/" * 19 + "b.py:1", "…/" + "a/" * 16 + "b.py:1"),  # 44 characters are shortened to 40 and "…/"
        (f"/opt/{'x' * 50}.py:7", f"…/{'x' * 50}.py:7"),
        ("C:\\Users\\somebody\\projects\\training\\run\\train.py:3", "…/projects/training/run/train.py:3"),
        ("", ""),
    ],
)
def test_a_path_is_shortened_from_the_left_and_keeps_its_file_and_line(line, short):
    assert sheets.short_path(line) == short


def test_a_range_has_its_unit_once_if_it_is_the_same():
    assert sheets.range_text(estimate(800, 10)) == "790.0 to 810.0 MiB"
    assert sheets.range_text(estimate(1020, 10)) == "1010.0 MiB to 1.0 GiB"
    assert sheets.range_text(estimate(800)) == "800.0 MiB"


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (1, 2, "50 %"), (1, 1000, "<1 %"), (999, 1000, ">99 %"), (0, 9, "0 %"), (9, 9, "100 %"), (-1, 10, "-10 %"),
        (1, 0, "unknown"),
    ],
)  # fmt: skip
def test_a_share_is_not_rounded_to_nothing_or_to_all(part, whole, text):
    assert sheets.share_text(part, whole) == text


def test_how_the_peak_is_known():
    assert sheets.known_how_sentence(fitting()) == ("Sources of the peak: 80 % traced, 15 % measured, 5 % modelled.")
    assert sheets.known_how(Estimate(likely_bytes=1, low_bytes=1, high_bytes=1)) == "unknown"


def exchange(kept, **sizes):
    names = ("added_up", "gathered", "scattered", "largest_added_up", "largest_gathered", "largest_scattered")
    return Exchange(num_ranks=4, kept=kept, **{f"{name}_bytes": sizes.get(name, 0) * MIB for name in names})


def test_what_ranks_exchange_is_said_with_what_the_library_keeps_for_it():
    sharded = exchange(estimate(6, 2, modelled=6), gathered=80, scattered=40, largest_gathered=7, largest_scattered=7)
    assert sheets.exchange_sentences(on_cpu(exchange=sharded)) == (
        "In each step, each of 4 ranks all-gathers parameters of 80.0 MiB (largest tensor 7.0 MiB), reduce-scatters "
        "gradients of 40.0 MiB (largest tensor 7.0 MiB).",
        "The peak includes 6.0 MiB for buffers of gloo (range 4.0 to 8.0 MiB, 100 % modelled).",
    )
    added = exchange(estimate(256, 192, assumed=256), added_up=40, largest_added_up=4)
    first, second = sheets.exchange_sentences(fitting(exchange=added))
    assert first == ("In each step, each of 4 ranks all-reduces gradients of 40.0 MiB (largest tensor 4.0 MiB).")
    assert second.startswith("The peak includes 256.0 MiB for buffers of NCCL (range 64.0 to 448.0 MiB, 100 % assumed)")
    assert sheets.exchange_sentences(fitting()) == ()


def test_the_parts_are_sorted_and_end_with_the_peak_they_add_up_to():
    sheet = sheets.part_sheet(fitting())
    assert sheet.rows == (
        ("activations", "500.0 MiB", "50 %"),
        ("optimizer states", "200.0 MiB", "20 %"),
        ("context", "150.0 MiB", "15 %"),
        ("parameters", "100.0 MiB", "10 %"),
        ("fragmentation", "50.0 MiB", "5 %"),
        ("peak", "1000.0 MiB", "100 %"),
    )
    assert sheets.part_sheet(on_cpu()).rows[2] == ("baseline", "195.0 MiB", "20 %")
    assert sheets.part_sheet(bare()).rows == ()


def test_the_largest_allocations_say_where_they_were_made():
    first, _, unknown = sheets.largest_sheet(fitting()).rows
    assert first == (
        "300.0 MiB",
        "activations",
        "float32[8, 1024, 50257]",
        "step 1, forward: aten::addmm",
        "lm_head",
        "…/models/gpt2/modeling_gpt2.py:97",
    )
    assert unknown == ("40.0 MiB", "parameters", "float32[50257, 768]", "setup", "unknown", "unknown")


def test_at_most_ten_of_the_largest_are_listed():
    assert len(sheets.largest_sheet(fitting(largest=fitting().largest * 4)).rows) == 10


def test_what_fits():
    sheet = sheets.answer_sheet(fitting())
    assert sheet.title == "What fits in 2.0 GiB"
    assert sheet.rows == (
        ("Largest micro-batch", "14", "2.0 GiB (range 1.9 to 2.0 GiB)"),
        ("Longest sequence", "1,024 or more", "1000.0 MiB (range 960.0 MiB to 1.0 GiB)"),
        ("Smallest device", "NVIDIA T1000 (4 GiB)", "unknown"),
    )
    nothing = Answer(question="smallest device", value=None, peak=None)
    assert sheets.answer_sheet(fitting(answers=(nothing,))).rows == (("Smallest device", "none", "unknown"),)


def test_the_what_ifs_are_a_grid_with_a_mark_where_it_does_not_fit():
    (sheet,) = sheets.what_if_sheets(fitting(), 5)
    assert [column.title for column in sheet.columns] == ["Micro-batch", "512", "1,024"]
    assert sheet.rows == (("8", "700.0 MiB", "1000.0 MiB"), ("16", "1000.0 MiB", "✗ 3.0 GiB"))


def test_a_grid_with_holes_and_more_lengths_than_fit_is_set_in_pieces():
    what_ifs = tuple(
        WhatIf(micro_batch=batch, sequence_length=length, peak=estimate(batch * length), fits=True)
        for batch, length in ((1, 1), (1, 2), (2, 3))
    )
    first, second = sheets.what_if_sheets(fitting(what_ifs=what_ifs), 2)
    assert first.rows == (("1", "1.0 MiB", "2.0 MiB"), ("2", "", ""))
    assert second.rows == (("1", ""), ("2", "6.0 MiB"))
    assert list(sheets.what_if_sheets(bare(), 2)) == []


@pytest.mark.parametrize(
    ("low_mib", "high_mib", "text"),
    [
        (0, 0, "not counted"),
        (0, 64, "up to 64.0 MiB more"),
        (-64, 0, "up to 64.0 MiB less"),
        (-16, 64, "16.0 MiB less to 64.0 MiB more"),
        (16, 64, "16.0 MiB more to 64.0 MiB more"),
        (64, 64, "64.0 MiB more"),
    ],
)
def test_an_assumption_says_by_how_much_the_peak_may_differ(low_mib, high_mib, text):
    assumption = Assumption(text="x", low_bytes=low_mib * MIB, high_bytes=high_mib * MIB)
    assert sheets.assumption_sheet(fitting(assumptions=(assumption,))).rows == (("x", text),)


def test_estimates_have_the_names_of_the_device_and_leave_out_what_there_is_not():
    assert [row[0] for row in sheets.estimate_sheet(fitting()).rows] == [
        "Peak (on the device)", "Reserved", "Allocated", "Context", "Host"
    ]  # fmt: skip
    assert sheets.estimate_sheet(on_cpu()).rows == (
        ("Peak (private memory)", "1000.0 MiB", "900.0 MiB to 1.1 GiB", "80 % traced, 20 % measured"),
        ("Reserved", "850.0 MiB", "810.0 to 890.0 MiB", "94 % traced, 6 % modelled"),
        ("Allocated", "800.0 MiB", "800.0 MiB", "100 % traced"),
        ("Baseline", "200.0 MiB", "200.0 MiB", "100 % measured"),
    )


def test_key_numbers_are_an_even_number_of_them():
    numbers = sheets.key_numbers(fitting())
    assert len(numbers) % 2 == 0
    assert dict(numbers) == {
        "Micro-batch": "8",
        "Sequence length": "1,024",
        "Batch size": "64",
        "Precision": "bf16",
        "Limit": "2.0 GiB",
        "Limit from": "--budget",
        "Device memory": "12.0 GiB",
        "Predicted in": "12.3 s",
    }
