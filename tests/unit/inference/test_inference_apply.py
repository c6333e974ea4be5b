"""A model applied to a file: each task against the model called by hand, faulty rows, options, and refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_folders import model_folder, read_rows, some_texts, tokenizer, write_rows
from placement_records import streamed_plan
from plimsoll.data.tokens.model_tokenizer import ModelTokenizer
from plimsoll.device.cpu import onednn
from plimsoll.errors import BudgetError, DataError, InputError, Interrupted, JobError, OutputError
from plimsoll.inference.apply import ApplyOptions, _sizes, apply_model
from plimsoll.models.generation import Generation
from plimsoll.models.recurrent.model import build_recurrent, save_recurrent
from plimsoll.step.failpoints import armed

TEXTS = some_texts(60)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("bert"), "BertForSequenceClassification", num_labels=3)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "x.jsonl", TEXTS)


def applied(model: Path, data: Path, force: bool = False, **options: Any) -> list[dict[str, Any]]:
    out = data.with_name("y.jsonl")
    apply_model(model, data, out, ApplyOptions(**options), force=force)
    return read_rows(out)


def by_hand(folder: Path, class_name: str, text: str) -> Any:
    import transformers

    model = getattr(transformers, class_name).from_pretrained(folder).eval()
    return model, tokenizer()(text, return_tensors="pt")["input_ids"]


def test_scores_are_those_of_the_texts_one_by_one(gpt2: Path, data: Path) -> None:
    rows = applied(gpt2, data)
    assert [row["row"] for row in rows] == list(range(60))
    for number in (0, 17, 59):
        model, ids = by_hand(gpt2, "GPT2LMHeadModel", TEXTS[number])
        with torch.inference_mode():
            logs = model(ids).logits[0, :-1].log_softmax(-1)
        expected = logs.gather(1, ids[0, 1:, None]).sum().item()
        assert rows[number]["log_probability"] == pytest.approx(expected, abs=1e-4)
        assert rows[number]["num_predicted_tokens"] == ids.shape[1] - 1


def test_classes_are_those_of_transformers_pipeline(classifier: Path, data: Path) -> None:
    from transformers import pipeline

    rows = applied(classifier, data, keep=("id",))
    theirs = pipeline("text-classification", model=str(classifier), device="cpu")(TEXTS)
    assert [row["id"] for row in rows] == [f"t{number}" for number in range(60)]
    assert [row["label"] for row in rows] == [one["label"] for one in theirs]
    assert [row["score"] for row in rows] == pytest.approx([one["score"] for one in theirs], abs=1e-5)
    assert all(sum(row["probabilities"].values()) == pytest.approx(1) for row in rows)


def test_a_decoder_with_a_head_for_classes_finds_the_last_token(tmp_path: Path, data: Path) -> None:
    folder = model_folder(tmp_path / "m", "LlamaForSequenceClassification", num_labels=2, pad_token_id=None)
    rows = applied(folder, data)
    model, ids = by_hand(folder, "LlamaForSequenceClassification", TEXTS[5])
    with torch.inference_mode():
        expected = model(ids).logits[0].softmax(-1)
    assert list(rows[5]["probabilities"].values()) == pytest.approx(expected.tolist(), abs=1e-5)


def test_continuations_are_those_of_the_prompts_one_by_one(gpt2: Path, data: Path) -> None:
    rows = applied(gpt2, data, task="generate", generation=Generation(8))
    names = tokenizer()
    for number in (0, 33, 59):
        model, ids = by_hand(gpt2, "GPT2LMHeadModel", TEXTS[number])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        new = whole[0, ids.shape[1] :].tolist()
        stopped = 3 in new
        assert rows[number]["generated_text"] == names.decode(new, skip_special_tokens=True)
        assert rows[number]["finish_reason"] == ("stop" if stopped else "length")
        assert rows[number]["num_generated_tokens"] == len(new) - stopped


def test_draws_do_not_depend_on_what_is_computed_together(gpt2: Path, data: Path) -> None:
    sampling = {"task": "generate", "generation": Generation(6, temperature=1.0, top_p=0.9, seed=7)}
    many = applied(gpt2, data, **sampling)
    few = applied(gpt2, data, force=True, rows_per_pass=3, **sampling)
    assert [row["generated_text"] for row in many] == [row["generated_text"] for row in few]
    other = {"task": "generate", "generation": Generation(6, temperature=1.0, top_p=0.9, seed=8)}
    assert applied(gpt2, data, force=True, **other) != many


@pytest.mark.parametrize("rows_per_pass", [1, 7, None])
def test_results_do_not_depend_on_the_size_of_passes_beyond_rounding(
    classifier: Path, data: Path, rows_per_pass: int | None
) -> None:
    whole = applied(classifier, data)
    cut = applied(classifier, data, force=True, rows_per_pass=rows_per_pass)
    for one, other in zip(whole, cut, strict=True):
        assert one["score"] == pytest.approx(other["score"], abs=1e-6)


def test_errors_of_memory_change_no_row(classifier: Path, data: Path, tmp_path: Path) -> None:
    whole = applied(classifier, data)
    with armed("evaluation", 1, 3):
        facts = apply_model(classifier, data, tmp_path / "z.jsonl", ApplyOptions(rows_per_pass=8))
    rows = read_rows(tmp_path / "z.jsonl")
    assert [row["row"] for row in rows] == list(range(60))
    assert [row["label"] for row in rows] == [row["label"] for row in whole]
    assert len(facts.oom_events) == 2


def test_rows_that_cannot_be_used_say_why_and_the_others_are_done(gpt2: Path, tmp_path: Path) -> None:
    data = tmp_path / "x.jsonl"
    data.write_text('{"text": "w1 w2"}\n{"id": 2}\nno json\n{"text": ""}\n{"text": " "}\n{"text": "w3"}\n')
    out = tmp_path / "y.jsonl"
    facts = apply_model(gpt2, data, out)
    rows = read_rows(out)
    assert ["error" in row for row in rows] == [False, True, True, True, False, False]  # a blank text is [CLS] [SEP]
    assert (facts.num_rows, facts.num_faults, facts.num_new_rows) == (6, 3, 6)
    assert facts.faults[0].startswith("row 1: there is no column 'text'")
    with pytest.raises(DataError, match=r"row 1: .* leave out --strict"):
        apply_model(gpt2, data, tmp_path / "z.jsonl", ApplyOptions(is_strict=True))


def test_of_rows_that_cannot_be_used_all_are_counted_and_the_first_five_told(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plimsoll.inference.apply._BLOCK_ROWS", 3)
    data = write_rows(tmp_path / "x.jsonl", ["", "w1", "", "", "", "w2", "", "", ""])
    facts = apply_model(gpt2, data, tmp_path / "y.jsonl")
    assert [reason.partition(":")[0] for reason in facts.faults] == [f"row {number}" for number in (0, 2, 3, 4, 6)]
    assert (facts.num_faults, facts.num_rows, facts.num_tokens, facts.block_rows) == (7, 9, 6, 3)


def told_rows(model: Path, data: Path, **options: Any) -> list[int]:
    """Return a list that receives the number of finished rows at each change."""
    told: list[int] = []
    out = data.with_name("told.jsonl")
    apply_model(model, data, out, ApplyOptions(**options), force=True, progress=lambda *one: told.append(one[2]))
    return sorted({*told} - {0})


def test_a_block_ends_with_the_row_that_fills_it(gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 10 tokens per pass a block has 1280 bytes of text."""
    lengths = [639, 640, 1, 639, 640, 1, 1279]
    data = write_rows(tmp_path / "x.jsonl", ["w" * length for length in lengths])
    options = {"rows_per_pass": 1, "longest_tokens": 10}
    assert told_rows(gpt2, data, **options) == [3, 6, 7]
    monkeypatch.setattr("plimsoll.inference.apply._BLOCK_ROWS", 2)
    assert told_rows(gpt2, data, **options) == [2, 4, 6, 7]


@pytest.mark.parametrize("generation", [None, Generation(8)])
def test_a_pass_has_as_many_of_the_longest_rows_as_were_asked_for(
    gpt2: Path, tmp_path: Path, generation: Generation | None
) -> None:
    data = write_rows(tmp_path / "x.jsonl", ["w1 " * 80] * 4)
    task = "score" if generation is None else "generate"
    facts = apply_model(
        gpt2, data, tmp_path / "y.jsonl", ApplyOptions(task=task, rows_per_pass=2, generation=generation)
    )
    assert (facts.rows_per_pass, facts.tokens_per_pass, facts.num_passes) == (2, 2 * 64, 2)
    assert facts.num_new_tokens == facts.num_padded_tokens == 4 * (64 if generation is None else 56)


@pytest.mark.parametrize(
    ("options", "longest_tokens", "expected"),
    [
        ({}, None, (4096, 256)),
        ({"device": "cuda:1"}, 64, (32768, 256)),
        ({"rows_per_pass": 7}, 50, (350, 7)),
        ({"rows_per_pass": 3}, None, (3 * 4096, 3)),
        ({"rows_per_pass": 7, "task": "generate", "generation": Generation(5)}, 50, (385, 7)),
    ],
)
def test_without_a_budget_a_pass_has_so_many_tokens_and_rows(
    options: dict[str, Any], longest_tokens: int | None, expected: tuple[int, int]
) -> None:
    assert _sizes(ApplyOptions(**options), ModelTokenizer(tokenizer(), longest_tokens), None) == expected


@pytest.mark.parametrize(("asked", "expected"), [(None, 256), (7, 7), (900, 256)])
def test_within_a_budget_a_pass_has_the_tokens_of_the_plan(asked: int | None, expected: int) -> None:
    plan = streamed_plan(micro_batch=3, longest_tokens=128, new_tokens=5)
    options = ApplyOptions(rows_per_pass=asked, limit_bytes=1)
    assert _sizes(options, ModelTokenizer(tokenizer(), 64), plan) == (3 * 133, expected)


def test_a_plan_is_made_for_the_first_rows_and_only_of_what_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def refuse(*given: Any) -> None:
        asked.append(given)
        raise BudgetError("nothing fits")

    monkeypatch.setattr("plimsoll.inference.apply.plan_apart", refuse)
    folder = model_folder(tmp_path / "m", max_position_embeddings=512)
    names = tokenizer()
    names.model_max_length = 512
    names.save_pretrained(folder)
    data = tmp_path / "x.jsonl"
    write_rows(data, ["w1 w2"] * 255 + ["w1 " * 150, "w1 " * 400])
    options = ApplyOptions(limit_bytes=9 << 30, dtype="bf16", task="generate", generation=Generation(3))
    with pytest.raises(BudgetError):
        apply_model(folder, data, tmp_path / "y.jsonl", options)
    assert asked == [(folder, "generate", 256, 3, 9 << 30, "cpu", "bf16")]
    data.write_text('{"id": 1}\n{"text": 3}\n')
    with pytest.raises(BudgetError):
        apply_model(folder, data, tmp_path / "y.jsonl", ApplyOptions(limit_bytes=9 << 30))
    assert asked[1] == (folder, "score", 64, 0, 9 << 30, "cpu", "stored")
    write_rows(data, ["w1"])
    fields = {"architecture": "lstm", "vocab_size": 94, "embedding_size": 8, "hidden_size": 8, "num_labels": 2}
    (tmp_path / "lstm").mkdir()
    save_recurrent(build_recurrent(fields), tmp_path / "lstm")
    tokenizer().save_pretrained(tmp_path / "lstm")
    onednn._compile_products.cache_clear()
    assert "label" in applied(tmp_path / "lstm", data, limit_bytes=9 << 30)[0]
    assert onednn._compile_products.cache_info().currsize == 1
    apply_model(folder, data, tmp_path / "z.jsonl", ApplyOptions())
    assert len(asked) == 2


def test_what_a_signal_stops_is_gone_on_with(gpt2: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plimsoll.inference.apply._BLOCK_ROWS", 25)
    whole, told = applied(gpt2, data), []

    def progress(done_bytes: int, total_bytes: int, num_rows: int, num_tokens: int) -> None:
        told.append((done_bytes, total_bytes, num_rows, num_tokens))
        if num_rows == 25 and sum(one[2] == 25 for one in told) == 1:  # a second signal would end the tests
            signal.raise_signal(signal.SIGTERM)

    out = data.with_name("z.jsonl")
    with pytest.raises(Interrupted, match="stopped with 25 rows written: run the same command again") as raised:
        apply_model(gpt2, data, out, progress=progress)
    assert raised.value.exit_code == 143
    facts = apply_model(gpt2, data, out, progress=progress)
    assert (facts.first_row, facts.num_new_rows, facts.num_rows) == (25, 35, 60)
    assert facts.num_new_tokens < facts.num_tokens == sum(len(text.split()) + 2 for text in TEXTS)
    num_bytes = data.stat().st_size
    assert told[-1] == (num_bytes, num_bytes, 35, facts.num_new_tokens)
    assert read_rows(out) == whole


def test_long_texts_are_truncated_and_counted(gpt2: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "x.jsonl", ["w1 w2", "w3 " * 500, "w4 " * 100_000])
    facts = apply_model(gpt2, data, tmp_path / "y.jsonl")
    assert (facts.num_truncated, facts.longest_tokens) == (2, 64)
    assert [row["num_predicted_tokens"] for row in read_rows(tmp_path / "y.jsonl")] == [3, 63, 63]
    facts = apply_model(gpt2, data, tmp_path / "z.jsonl", ApplyOptions(longest_tokens=10))
    assert facts.num_tokens == 4 + 10 + 10


def test_a_file_without_rows_has_no_results(gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").touch()
    facts = apply_model(gpt2, tmp_path / "x.jsonl", tmp_path / "y.jsonl")
    assert (facts.num_rows, facts.num_passes, (tmp_path / "y.jsonl").read_bytes()) == (0, 0, b"")


def test_what_is_kept_is_as_it_was(gpt2: Path, tmp_path: Path) -> None:
    record = {"text": "w1 w2", "id": "ü 🚢 \u2028", "half": "\ud800", "nested": {"a": [1, None]}}
    (tmp_path / "x.jsonl").write_text(json.dumps(record) + "\n")
    apply_model(gpt2, tmp_path / "x.jsonl", tmp_path / "y.jsonl", ApplyOptions(keep=("id", "half", "nested")))
    line = (tmp_path / "y.jsonl").read_bytes()
    found = json.loads(line)
    assert {name: found[name] for name in ("id", "half", "nested")} == {
        name: record[name] for name in ("id", "half", "nested")
    }


def test_weights_have_the_precision_that_was_asked_for(gpt2: Path, data: Path, tmp_path: Path) -> None:
    facts = apply_model(gpt2, data, tmp_path / "y.jsonl", ApplyOptions(dtype="bf16"))
    assert facts.dtype == "bfloat16"
    exact = applied(gpt2, data, force=True)
    for one, other in zip(exact, read_rows(data.with_name("y.jsonl")), strict=True):
        assert one["log_probability"] == pytest.approx(other["log_probability"], rel=0.02)


def test_weights_that_are_no_numbers_give_rows_that_say_so(tmp_path: Path, data: Path) -> None:
    folder = model_folder(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["transformer.ln_f.bias"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    rows = applied(folder, data)
    assert all(row["error"].startswith("the result is not a finite number") for row in rows)


def test_a_tokenizer_of_another_vocabulary_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", vocab_size=50)
    rows = applied(folder, write_rows(tmp_path / "x.jsonl", ["w45", "w46"]))
    assert "error" not in rows[0]
    assert rows[1]["error"].startswith("its token 50 is outside the model's vocabulary of 50 tokens")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"task": "generate"}, InputError, "needs --max-new-tokens"),
        ({"task": "generate", "generation": Generation(64)}, JobError, "leaves no tokens for the prompt"),
        ({"task": "generate", "generation": Generation(8), "longest_tokens": 60}, JobError, "give 56 or less"),
        ({"task": "generate", "generation": Generation(8, cache="offloaded")}, InputError, "--cache offloaded moves"),
        ({"task": "score", "generation": Generation(3)}, InputError, "generates nothing"),
        ({"task": "classify"}, JobError, "use --task score or generate"),
        ({"keep": ("label",)}, InputError, "results have a field of this name"),
        ({"longest_tokens": 0}, InputError, "--max-length 0 leaves nothing"),
        ({"longest_tokens": 65}, JobError, "more than the 64 positions"),
        ({"rows_per_pass": 0}, InputError, "--batch-size 0"),
        ({"columns": ("body",)}, DataError, "no column 'body'"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(
    gpt2: Path, data: Path, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        applied(gpt2, data, is_strict=True, **options)
    if "columns" not in options:  # a missing column is a fault of each row
        assert not list(data.parent.glob("y*"))


def test_another_model_or_other_data_is_refused_where_results_are_begun(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plimsoll.inference.apply._BLOCK_ROWS", 1)
    data = tmp_path / "x.jsonl"
    data.write_text('{"text": "w1 w2"}\n[]\n')
    strict = ApplyOptions(is_strict=True)
    with pytest.raises(DataError):
        apply_model(gpt2, data, tmp_path / "y.jsonl", strict)
    other = model_folder(tmp_path / "other", n_inner=64)
    with pytest.raises(OutputError, match=r"different model: config.json \(was .*--force to start over"):
        apply_model(other, data, tmp_path / "y.jsonl", strict)
    before = data.read_bytes()
    (gpt2 / "README.md").write_text("A note changes no result.")
    data.write_bytes(before)  # a new time changes none either
    os.utime(data, ns=(1, 1))
    with pytest.raises(DataError):
        apply_model(gpt2, data, tmp_path / "y.jsonl", strict)
    data.write_text('{"text": "w1 w2"}\n{"text": "w2"}\n')
    with pytest.raises(OutputError, match="results with a different data: num_bytes"):
        apply_model(gpt2, data, tmp_path / "y.jsonl", strict)
    apply_model(gpt2, data, tmp_path / "y.jsonl", strict, force=True)
    assert len(read_rows(tmp_path / "y.jsonl")) == 2


@pytest.mark.parametrize(("kind", "apart"), [("int8", 0.02), ("int4", 0.2)])
def test_weights_in_integers_give_about_the_same(classifier: Path, data: Path, kind: str, apart: float) -> None:
    pytest.importorskip("torchao", reason="integers are torchao's")
    plain = applied(classifier, data)
    found = applied(classifier, data, force=True, quantize=kind)
    differences = [
        abs(one["probabilities"][label] - other["probabilities"][label])
        for one, other in zip(plain, found, strict=True)
        for label in one["probabilities"]
    ]
    assert 0 < max(differences) < apart


@pytest.mark.long
def test_a_head_that_is_not_there_is_no_head_under_a_budget_either(classifier: Path, data: Path) -> None:
    folder = data.parent / "m"
    shutil.copytree(classifier, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: weights[name] for name in weights if "classifier" not in name}, folder / "model.safetensors")
    for limit_bytes in (None, 4 << 30):
        with pytest.raises(InputError, match="lacks weights .classifier"):
            applied(folder, data, limit_bytes=limit_bytes)


def test_of_a_prompt_that_is_too_long_the_end_goes_on(gpt2: Path, tmp_path: Path) -> None:
    long = " ".join(some_texts(40))
    data = write_rows(tmp_path / "x.jsonl", [long, "w1 w2"])
    rows = applied(gpt2, data, task="generate", generation=Generation(8))
    ids = [2, *tokenizer()(long)["input_ids"][-55:]]  # special token, and tokens that fit
    model, _ = by_hand(gpt2, "GPT2LMHeadModel", "w1")
    prompt = torch.tensor([ids])
    whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    assert rows[0]["generated_text"] == tokenizer().decode(whole[0, 56:], skip_special_tokens=True)
    assert "error" not in rows[1]


def test_a_model_that_fails_is_said_and_the_rows_before_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of positions is unknown, as in architectures that name it differently."""
    folder = model_folder(tmp_path / "m", max_position_embeddings=32)
    monkeypatch.setattr("plimsoll.inference.apply._BLOCK_ROWS", 1)
    monkeypatch.setattr("plimsoll.inference.model._positions", lambda folder: None)
    data = write_rows(tmp_path / "x.jsonl", ["w1 w2", "w3 " * 80])
    with pytest.raises(InputError, match=r"fails to score texts of rows 1 to 1 .*try it with a smaller --max-len"):
        applied(folder, data)
    assert len(read_rows(tmp_path / "y.jsonl.part")) == 1


@pytest.mark.parametrize("num_tokens", [94, 7])
def test_a_classifier_without_padding_finds_the_end_of_texts_that_have_the_end_token(
    tmp_path: Path, num_tokens: int
) -> None:
    fields = {"num_labels": 2, "pad_token_id": None, "vocab_size": num_tokens}
    folder = model_folder(tmp_path / "m", "LlamaForSequenceClassification", **fields)
    names = tokenizer()
    names.pad_token, names.eos_token = None, "[SEP]"  # each text ends with it
    names.save_pretrained(folder)
    texts = ["w0", "w1 w0 w1 w2", "w2 w2", "[UNK] [PAD] w1"]  # all 7 tokens are used
    rows = applied(folder, write_rows(tmp_path / "x.jsonl", texts))
    for row, text in zip(rows, texts, strict=True):
        model, ids = by_hand(folder, "LlamaForSequenceClassification", text)
        with torch.inference_mode():
            expected = model(ids).logits[0].softmax(-1)
        assert list(row["probabilities"].values()) == pytest.approx(expected.tolist(), abs=1e-6)


def test_results_are_json_also_where_what_is_kept_is_not(gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "w1", "a": NaN, "b": [1.5, -Infinity, {"c": NaN}]}\n')
    (row,) = applied(gpt2, tmp_path / "x.jsonl", keep=("a", "b"))
    assert (row["a"], row["b"]) == (None, [1.5, None, {"c": None}])
    assert "NaN" not in (tmp_path / "y.jsonl").read_text()


def test_results_of_columns_that_are_not_there_are_refused(gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "w1"}\n{"text": "w1", "late": 1}\n')
    for options in ({"keep": ("nope",)}, {"columns": ("nope",)}):
        with pytest.raises(DataError, match="there is no column 'nope': it has 'text', 'late'; give one of them"):
            applied(gpt2, tmp_path / "x.jsonl", **options)
    assert not list(tmp_path.glob("y*"))
    assert [row.get("late") for row in applied(gpt2, tmp_path / "x.jsonl", keep=("late",))] == [None, 1]


def test_what_would_destroy_data_or_the_model_is_refused(gpt2: Path, data: Path) -> None:
    before = data.read_bytes()
    with pytest.raises(OutputError, match="is the input"):
        apply_model(gpt2, data, data, force=True)
    with pytest.raises(OutputError, match="is inside the model folder"):
        apply_model(gpt2, data, gpt2 / "config.json", force=True)
    assert data.read_bytes() == before
    assert not list(data.parent.glob("*.part*"))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_adapters_are_merged_and_are_part_of_what_makes_the_results(
    gpt2: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft", reason="adapters are peft's")
    from transformers import GPT2LMHeadModel

    config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    wrapped = peft.get_peft_model(GPT2LMHeadModel.from_pretrained(gpt2), config)
    wrapped.save_pretrained(data.parent / "adapter")
    wrapped.merge_and_unload().save_pretrained(data.parent / "merged")
    tokenizer().save_pretrained(data.parent / "merged")
    data.write_text(data.read_text() + "[]\n")
    monkeypatch.setattr("plimsoll.inference.apply._BLOCK_ROWS", 10)
    with pytest.raises(DataError):
        applied(gpt2, data, is_strict=True)
    with pytest.raises(OutputError, match="different --adapter .was "):
        applied(gpt2, data, adapters=(data.parent / "adapter",))
    plain = applied(gpt2, data)
    found = applied(gpt2, data, force=True, adapters=(data.parent / "adapter",), limit_bytes=8 << 30)
    expected = applied(data.parent / "merged", data, force=True)
    for one, other in zip(found[:60], expected[:60], strict=True):
        assert one["log_probability"] == pytest.approx(other["log_probability"], abs=1e-5)
    assert plain != found


def test_the_weights_that_are_loaded_are_told(gpt2: Path, data: Path) -> None:
    told: list[tuple[str, int, int]] = []
    apply_model(gpt2, data, data.with_name("y.jsonl"), loading=lambda *one: told.append(one))
    assert told[-1][0] == "loading weights"
    assert told[-1][1] == told[-1][2] > 0


def test_seconds_are_those_of_the_clock(gpt2: Path, data: Path) -> None:
    began = time.monotonic()
    facts = apply_model(gpt2, data, data.with_name("y.jsonl"))
    passed = time.monotonic() - began
    assert 0 < facts.load_seconds < passed
    assert 0 < facts.seconds < passed - facts.load_seconds
