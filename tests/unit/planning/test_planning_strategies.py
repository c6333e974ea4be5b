"""Fine-tuning strategies of small real jobs on an absent GPU: their needs, and the unavailable ones."""

import sys

import pytest

from plimsoll.errors import InputError, JobError
from plimsoll.planning.strategies import compare_strategies
from plimsoll.records.job import Job

MIB = 1 << 20
BLOCKS = {"architecture": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2}
LSTM = {"architecture": "lstm", "embedding_size": 32, "hidden_size": 32}


def strategies_of(model, limit_mib=1000, **changes):
    fields = {"model": model, "data": "nowhere.txt", "tokenizer": {"vocab_size": 1000}}
    job = Job.from_fields(fields | {"sequence_length": 32, "batch_size": 4} | changes)
    return {
        strategy.name: strategy
        for strategy in compare_strategies(job, device="rtx3060", limit_bytes=limit_mib * MIB).strategies
    }


@pytest.fixture(scope="module")
def of_blocks():
    pytest.importorskip("peft", reason="adapters are peft's")
    return strategies_of(BLOCKS)


@pytest.mark.slow
def test_every_strategy_is_planned_with_the_choices_in_its_name(of_blocks):
    bases = [
        choice.options["base"]
        for strategy in of_blocks.values()
        for choice in strategy.choices
        if choice.technique == "lora"
    ]
    assert bases == ["kept", "int8", "nf4"]
    assert not any(choice.technique == "lora" for choice in of_blocks["full"].choices)
    assert all(
        strategy.fits and strategy.peak.likely_bytes <= 1000 * MIB
        for strategy in of_blocks.values()
        if not strategy.impossible
    )
    assert of_blocks["LoRA, base of 4 bits"].how == "--set 'allow=[lora]' --pin 'lora(base=nf4)'"


def test_without_blocks_adapters_are_impossible_and_the_reason_is_said():
    found = strategies_of(LSTM)
    assert found["full"].fits
    assert "is not a model of transformers" in found["LoRA"].impossible
    assert not found["LoRA"].fits
    assert "leave it out" not in found["LoRA"].impossible


def test_what_is_wrong_with_the_job_is_an_error_and_no_strategy():
    with pytest.raises(JobError, match="embed_dim"):
        strategies_of(BLOCKS | {"n_embd": 65})


def test_a_strategy_says_what_it_changes_and_how_to_ask_for_it():
    found = strategies_of(LSTM, allow=["adafactor"])
    assert list(found) == [
        "full", "full, weights streamed", "LoRA", "LoRA, base of 8 bits", "LoRA, base of 4 bits"
    ]  # fmt: skip
    full = found["full"]
    assert (full.changes, full.how, full.impossible) == ("nothing", "--forbid layer_streaming", "")
    assert full.peak.high_bytes <= 1000 * MIB
    assert full.smallest_budget_bytes is None
    assert found["full, weights streamed"].how == "--pin layer_streaming"
    assert found["LoRA"].how == "--set 'allow=[lora]' --pin 'lora(base=kept)'"


def test_each_strategy_is_reported_when_it_is_planned_and_its_progress_has_its_name():
    told, progress = [], []
    fields = {"model": LSTM, "data": "nowhere.txt", "tokenizer": {"vocab_size": 1000}, "sequence_length": 32}
    job = Job.from_fields(fields | {"batch_size": 4, "allow": ["lora"]})
    strategies = compare_strategies(
        job, device="rtx3060", limit_bytes=1000 * MIB, on_strategy=told.append, progress=progress.append
    )
    assert tuple(told) == strategies.strategies
    assert strategies.limit_bytes == 1000 * MIB
    assert progress[0].startswith("full: tracing: ")


def test_a_model_that_fails_is_an_error_and_no_strategy(tmp_path, monkeypatch):
    source = "from torch import nn\n\n\ndef model(vocab_size):\n    return nn.Embedding(vocab_size, 2)\n"
    (tmp_path / "without_a_loss.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "without_a_loss", raising=False)
    with pytest.raises(InputError, match="the model of this job fails in the"):
        strategies_of("without_a_loss:model")
