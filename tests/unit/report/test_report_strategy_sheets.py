"""The text about fine-tuning strategies: which fit, which memory each needs, and which change the training."""

import shlex

from plimsoll.report.render import render
from plimsoll.report.strategy_sheets import done_line, give_lines, headline, strategy_sheets
from strategy_records import none_fits, strategies


def test_the_sentence_names_what_fits():
    assert headline(strategies()) == "1 of 3 fine-tuning strategies fit 2.0 GiB of cpu: full, weights streamed."
    assert headline(none_fits()) == "No fine-tuning strategy fits 2.0 GiB of cpu."


def test_each_strategy_has_its_numbers_or_its_reason():
    numbers, words = strategy_sheets(strategies())
    assert numbers.rows == (
        ("full", "needs 3100MiB", "2.8 to 3.0 GiB", "1.0 to 2.0 s"),
        ("full, weights streamed", "fits", "1.5 GiB", "12.0 s"),
        ("LoRA", "impossible", "-", "-"),
    )
    assert [row[2] for row in words.rows] == [
        "checkpointing=all micro_batch=1",
        "parameter_offload=true micro_batch=2",
        "peft is not installed",
    ]


def test_what_to_give_is_a_line_each_that_a_terminal_does_not_break():
    lines = give_lines(strategies())
    assert lines[0::2] == (
        "--forbid parameter_offload  # full",
        "--set 'allow=[lora]' --pin 'lora(base=kept)'  # LoRA",
    )
    printed = render(strategies()).splitlines()
    assert all(line in printed for line in lines)
    assert shlex.split(lines[2], comments=True) == ["--set", "allow=[lora]", "--pin", "lora(base=kept)"]
    assert "lora(base=kept)" in render(strategies(), "html")


def test_a_planned_strategy_is_a_line():
    assert [done_line(strategy) for strategy in strategies().strategies] == [
        "full: needs 3100MiB, 2.8 to 3.0 GiB, 1.0 to 2.0 s per step",
        "full, weights streamed: fits, 1.5 GiB, 12.0 s per step",
        "LoRA: impossible",
    ]
