"""Which folder a model is in, what tells it from another, and what of a text it reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from model_folders import model_folder as written
from model_folders import tokenizer
from plimsoll.errors import JobError, WeightsError
from plimsoll.models.recurrent import build_recurrent, save_recurrent
from plimsoll.run.inference_model import identity_of_model, import_first, load_for_inference, model_folder, tokenizer_of

JOB = "model: {architecture: lstm}\ndata: {train: [x.txt]}\nsequence_length: 24\n"


def run_with_model(run: Path) -> Path:
    """A run directory as `plimsoll train` leaves it, as far as this matters."""
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
        assert names.longest_tokens == 24  # what it was trained with
        assert names.read(["w0 w1"])[0].ids == [4, 5]  # and without special tokens
        assert tokenizer_of(folder, 200).longest_tokens == 200  # a recurrent model has no end
    assert load_for_inference(run / "model", "language-modeling", torch.float64, "cpu").embedding.weight.dtype == (
        torch.float64
    )


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="there is no model folder"):
        model_folder(tmp_path / "missing")
    run = run_with_model(tmp_path / "run")
    (run / "model" / "config.json").unlink()
    with pytest.raises(JobError, match="has no model yet: finish it"):
        model_folder(run)


def test_a_model_is_told_from_another_by_its_content_not_its_place(tmp_path: Path) -> None:
    one, same, other = (
        written(tmp_path / "one"),
        written(tmp_path / "same"),
        written(tmp_path / "other", initializer_range=0.5),
    )
    assert identity_of_model(one) == identity_of_model(same)
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
    with pytest.raises(JobError, match="--max-new-tokens 64 leaves nothing .* give 63 or less"):
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


def test_sentence_models_say_themselves_what_they_read(tmp_path: Path) -> None:
    folder = written(tmp_path / "m", "BertModel")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    assert tokenizer_of(model_folder(folder), None).longest_tokens == 20


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
    monkeypatch.setattr("plimsoll.run.inference_model.sketch_checkpoint", lambda folder, head: sketched.append(folder))
    transformer = written(tmp_path / "m", "BertModel")
    for folder in (transformer, tmp_path / "lstm"):
        import_first(folder, "none")
    assert sketched == [transformer]


def test_a_model_is_loaded_for_evaluation_in_the_type_that_was_asked_for(tmp_path: Path) -> None:
    folder = written(tmp_path / "m", "BertModel")
    model = load_for_inference(folder, "none", torch.bfloat16, "cpu")
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
