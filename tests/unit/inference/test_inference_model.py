"""The folder of a model, its fingerprint, and the part of a text that the model reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model_folders import model_folder as written
from model_folders import tokenizer
from plimsoll.errors import JobError, WeightsError
from plimsoll.inference.model import (
    identity_of_model,
    import_first,
    load_for_inference,
    model_folder,
    stored_dtype,
    tokenizer_of,
)
from plimsoll.models.recurrent.model import RecurrentTagger, build_recurrent, save_recurrent

JOB = "model: {architecture: lstm}\ndata: {train: [x.txt]}\nsequence_length: 24\n"


def run_with_model(run: Path) -> Path:
    """Create a run directory with the files of `plimsoll train` that matter here."""
    (run / "model").mkdir(parents=True)
    (run / "job.yaml").write_text(JOB)
    (run / ".plimsoll").touch()
    sizes = {"architecture": "lstm", "vocab_size": 94, "embedding_size": 4, "hidden_size": 4}
    save_recurrent(build_recurrent(sizes).eval(), run / "model")
    tokenizer().save_pretrained(run / "model")
    return run


def test_a_run_stands_for_its_model(tmp_path: Path) -> None:
    run = run_with_model(tmp_path / "run")
    for given in (run, run / "model"):
        folder = model_folder(given)
        assert (folder.path, folder.job is not None) == (run / "model", True)
        names = tokenizer_of(folder, None)
        assert names.longest_tokens == 24  # the length in training
        assert names.read(["w0 w1"])[0].ids == [4, 5]  # without special tokens, the default of old jobs
        assert tokenizer_of(folder, 200).longest_tokens == 200  # a recurrent model has no maximum length
    assert load_for_inference(run / "model", "language-modeling", torch.float64, "cpu").embedding.weight.dtype == (
        torch.float64
    )


@pytest.mark.parametrize("special_tokens", [True, False])
def test_a_run_reads_what_its_tokenizer_puts_around_a_text(tmp_path: Path, special_tokens: bool) -> None:
    """The saved tokenizer adds the special tokens that the model was trained with, or none."""
    run = run_with_model(tmp_path / "run")
    said = f"tokenizer: {{path: t, special_tokens: {str(special_tokens).lower()}}}\n"
    (run / "job.yaml").write_text(JOB + said)
    assert tokenizer_of(model_folder(run), None).read(["w0 w1"])[0].ids == [2, 4, 5, 3]


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="there is no model folder"):
        model_folder(tmp_path / "missing")
    run = run_with_model(tmp_path / "run")
    (run / "model" / "config.json").unlink()
    for given in (run, run / "model"):
        with pytest.raises(JobError, match="has no model yet: finish it"):
            model_folder(given)


@pytest.mark.parametrize(
    ("lacking", "name", "is_of_the_run"),
    [
        ([], "model", True),
        ([], "adapters", False),  # a user's folder next to the files of the run
        ([".plimsoll"], "model", False),  # job.yaml without .plimsoll does not make a run
        (["job.yaml"], "model", False),
    ],
)
def test_a_model_is_of_the_run_that_has_written_it(
    tmp_path: Path, lacking: list[str], name: str, is_of_the_run: bool
) -> None:
    run = run_with_model(tmp_path / "run")
    (run / "model").rename(run / name)
    for file in lacking:
        (run / file).unlink()
    folder = model_folder(run / name)
    assert (folder.path, folder.job is not None) == (run / name, is_of_the_run)


def test_a_run_that_is_a_model_folder_itself_stands_for_that(tmp_path: Path) -> None:
    run = run_with_model(tmp_path / "run")
    (run / "config.json").write_text("{}")
    folder = model_folder(run)
    assert (folder.path, folder.job is not None) == (run, True)


def test_a_model_is_told_from_another_by_its_content_not_its_place(tmp_path: Path) -> None:
    one, same, other = (
        written(tmp_path / "one"),
        written(tmp_path / "same"),
        written(tmp_path / "other", initializer_range=0.5),
    )
    assert identity_of_model(one) == identity_of_model(same)
    assert {name: num_bytes for name, (num_bytes, _) in identity_of_model(one).items()} == {
        path.name: path.stat().st_size for path in one.iterdir()
    }
    assert identity_of_model(one) != identity_of_model(other)


def test_notes_beside_a_model_change_nothing_and_its_pooling_does(tmp_path: Path) -> None:
    folder = written(tmp_path / "m")
    before = identity_of_model(folder)
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= before.keys()
    for name in ("README.md", "training_args.bin", "eval_results.json"):
        (folder / name).write_text("{}")
    assert identity_of_model(folder) == before
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    assert identity_of_model(folder).keys() - before.keys() == {"1_Pooling/config.json"}


def test_new_tokens_have_positions_too(tmp_path: Path) -> None:
    folder = model_folder(written(tmp_path / "m"))
    assert tokenizer_of(folder, None, new_tokens=20).longest_tokens == 44
    assert tokenizer_of(folder, 44, new_tokens=20).longest_tokens == 44
    with pytest.raises(JobError, match="--max-length 45 with --max-new-tokens 20 .* give 44 or less"):
        tokenizer_of(folder, 45, new_tokens=20)
    assert tokenizer_of(folder, None, new_tokens=63).longest_tokens == 1
    with pytest.raises(JobError, match="--max-new-tokens 64 leaves no tokens .* give 63 or less"):
        tokenizer_of(folder, None, new_tokens=64)


@pytest.mark.parametrize(
    ("class_name", "fields", "longest_tokens"),
    [("GPT2LMHeadModel", {}, 64), ("RobertaModel", {"pad_token_id": 1}, 62), ("BertModel", {}, 64)],
)
def test_texts_are_truncated_to_the_positions_there_are(
    tmp_path: Path, class_name: str, fields: dict[str, int], longest_tokens: int
) -> None:
    folder = model_folder(written(tmp_path / "m", class_name, **fields))
    assert tokenizer_of(folder, None).longest_tokens == longest_tokens
    assert tokenizer_of(folder, 9).longest_tokens == 9
    with pytest.raises(JobError, match=f"give {longest_tokens} or less"):
        tokenizer_of(folder, longest_tokens + 1)


@pytest.mark.parametrize(
    ("settings", "longest_tokens"),
    [
        (json.dumps({"max_seq_length": 20}), 20),
        (json.dumps({"max_seq_length": 100}), 64),  # more than the model's positions
        (json.dumps({"max_seq_length": "20"}), 64),
        (json.dumps([20]), 64),
        ("torn", 64),
    ],
)
def test_sentence_models_say_themselves_what_they_read(tmp_path: Path, settings: str, longest_tokens: int) -> None:
    folder = written(tmp_path / "m", "BertModel")
    (folder / "sentence_bert_config.json").write_text(settings)
    assert tokenizer_of(model_folder(folder), None).longest_tokens == longest_tokens


@pytest.mark.parametrize(
    ("said", "longest_tokens"), [(10**30, None), (1 << 24, None), ((1 << 24) - 1, (1 << 24) - 1), (50, 50)]
)
def test_a_recurrent_model_reads_what_its_tokenizer_says_unless_that_is_no_limit(
    tmp_path: Path, said: int, longest_tokens: int | None
) -> None:
    run = run_with_model(tmp_path / "run")
    names = tokenizer()
    names.model_max_length = said
    names.save_pretrained(run / "model")
    (run / "job.yaml").unlink()
    folder = model_folder(run / "model")
    assert tokenizer_of(folder, None).longest_tokens == longest_tokens
    assert tokenizer_of(folder, 9).longest_tokens == 9


def test_of_a_text_that_is_gone_on_with_the_end_is_kept(tmp_path: Path) -> None:
    folder = model_folder(run_with_model(tmp_path / "run"))
    text = ["w0 w1 w2 w3"]
    assert tokenizer_of(folder, 2).read(text)[0].ids == [4, 5]
    assert tokenizer_of(folder, 2, new_tokens=1).read(text)[0].ids == [6, 7]


def test_weights_that_are_not_there_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "m", "BertModel")
    with pytest.raises(JobError, match=r"lacks weights \(classifier"):
        load_for_inference(written(tmp_path / "b", "BertModel"), "classification", None, "cpu")
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(WeightsError):
        load_for_inference(folder, "none", None, "cpu")


def test_what_a_model_is_made_of_is_imported_before_it_is_needed(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "lstm").mkdir()
    fields = {"architecture": "lstm", "vocab_size": 50, "embedding_size": 8, "hidden_size": 8}
    save_recurrent(build_recurrent(fields), tmp_path / "lstm")
    sketched: list[Path] = []
    monkeypatch.setattr("plimsoll.inference.model.sketch_checkpoint", lambda folder, head: sketched.append(folder))
    transformer = written(tmp_path / "m", "BertModel")
    for folder in (transformer, tmp_path / "lstm"):
        import_first(folder, "none")
    assert sketched == [transformer]


def test_a_model_is_loaded_for_evaluation_in_the_type_that_was_asked_for(tmp_path: Path) -> None:
    folder = written(tmp_path / "m", "BertModel")
    model = load_for_inference(folder, "none", torch.bfloat16, "cpu")
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_recurrent_model_is_loaded_in_the_type_it_is_stored_in(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tmp_path / "lstm"
    folder.mkdir()
    fields = {"architecture": "lstm", "vocab_size": 50, "embedding_size": 8, "hidden_size": 8}
    save_recurrent(build_recurrent(fields).to(dtype), folder)
    model = load_for_inference(folder, "language-modeling", None, "cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not model.training


def test_a_tagger_is_loaded_as_one(tmp_path: Path) -> None:
    fields = {"architecture": "lstm", "vocab_size": 50, "embedding_size": 8, "hidden_size": 8, "num_labels": 3}
    save_recurrent(build_recurrent(fields | {"is_tagger": True}), tmp_path)
    assert isinstance(load_for_inference(tmp_path, "token-classification", None, "cpu"), RecurrentTagger)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"a": torch.zeros(4, dtype=torch.float16), "b": torch.zeros(3)}, torch.float32),  # 8 and 12 bytes
        ({"a": torch.zeros(7, dtype=torch.float16), "b": torch.zeros(3)}, torch.float16),
        (
            {"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.zeros(2, dtype=torch.float64)},
            torch.float32,  # the total per dtype counts
        ),
        ({"a": torch.zeros(9, dtype=torch.int64), "b": torch.zeros(1, dtype=torch.float16)}, torch.float16),
        ({"a": torch.zeros(9, dtype=torch.int64)}, torch.float32),
    ],
)
def test_the_type_of_a_checkpoint_is_that_of_most_bytes_of_its_floats(
    tmp_path: Path, tensors: dict[str, torch.Tensor], expected: torch.dtype
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path) == expected
