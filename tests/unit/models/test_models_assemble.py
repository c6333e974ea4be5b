"""A job becomes live objects, or is refused if its budget cannot hold them. The LSTM is small enough to count."""

import json
import random
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from made_tokenizers import KINDS, TEMPLATES, saved, with_template
from plimsoll.data.prepare import prepare
from plimsoll.data.tokens.tokenizer import export_tokenizer
from plimsoll.errors import BudgetError, DataError, JobError
from plimsoll.models.assemble import assemble, choose_device, fingerprint, loader_of, require_buildable, require_memory
from plimsoll.models.build import save_model
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.records.job import Job
from plimsoll.records.prepared import Prepared, PreparedText

# 300 x 8 embedding, 32 x 16 + 64 LSTM, 300 x 8 + 300 output: 5,676 parameters of 4 bytes.
PARAMETER_BYTES = 4 * (300 * 8 + 32 * 16 + 64 + 300 * 8 + 300)
LSTM = {"architecture": "lstm", "embedding_size": 8, "hidden_size": 8}
BERT = {
    "architecture": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32,
}  # fmt: skip
GPT2 = {"architecture": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2}


def job(**changes):
    fields = {"model": LSTM, "data": {"train": "/text"}, "sequence_length": 16, "batch_size": 4, "steps": 10}
    return Job.from_fields(fields | changes)


@pytest.fixture(scope="module")
def prepared():
    text = PreparedText(
        corpus_key="k",
        index_folder="index",
        tokens_folder="tokens",
        num_samples=1,
        num_documents=1,
        num_bytes=1,
        num_tokens=1,
        num_skipped=0,
        skipped=(),
    )
    return Prepared(key="k1", train=text, tokenizer_folder="tokenizer", vocab_size=300, end_id=0)


@pytest.mark.parametrize("special_tokens", [True, False])
@pytest.mark.parametrize(
    ("kind", "model"), [("word_piece", "bert"), ("byte_level", "gpt2"), ("sentence_piece", "gpt2")]
)
def test_the_exported_pair_says_what_the_model_said_in_training(tmp_path, kind, model, special_tokens):
    texts = [f"The cat number {number} sat on the mat{', and the dog ran' * (number % 4)}." for number in range(40)]
    tokenizer = with_template(KINDS[kind](texts), TEMPLATES[kind])
    folder = saved(tmp_path / "tokenizer", tokenizer, kind)
    rows = [json.dumps({"text": text, "label": number % 2}) for number, text in enumerate(texts)]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))
    small = {"bert": BERT, "gpt2": GPT2}[model]
    given = job(
        model=small, task="classification", data={"train": str(tmp_path / "texts.jsonl"), "label": "label"},
        tokenizer={"path": str(folder), "special_tokens": special_tokens}, sequence_length=256,
    )  # fmt: skip
    prepared = prepare(given, tmp_path / "cache")
    parts = assemble(given, prepared, "cpu")
    trained = parts.model.eval()
    batch = parts.samples.batch(np.arange(len(texts)))
    with torch.no_grad():
        in_training = trained(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits
    save_model(trained, tmp_path / "model")
    export_tokenizer(Path(prepared.tokenizer_folder), tmp_path / "model")
    ours = AutoTokenizer.from_pretrained(tmp_path / "model")
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    assert exported.config.pad_token_id == ours.pad_token_id == prepared.pad_id
    for number, text in enumerate(texts):
        with torch.no_grad():
            logits = exported(**ours(text, return_tensors="pt")).logits[0]
        torch.testing.assert_close(logits, in_training[number], rtol=1e-5, atol=1e-6)


class Slow:
    """Samples that make worker processes worthwhile."""

    def __len__(self) -> int:
        return 100

    def batch(self, ids, epoch=0):
        return {"input_ids": torch.zeros(len(ids), 8)}


@pytest.mark.parametrize(("host", "are_there"), [(None, True), ("1TiB", True), ("1MiB", False)])
def test_workers_take_what_the_host_has_left(host, are_there):
    others = set(active_children())
    loader = loader_of(job(budget={"host": host}), Slow())
    try:
        loader.peek()
        assert bool(set(active_children()) - others) == are_there
    finally:
        loader.close()


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [({"name": "sgd"}, 2), ({"name": "adagrad"}, 3), ({"name": "adamw"}, 4)],
    ids=lambda value: str(value),
)
def test_what_is_there_before_the_first_activation_must_fit(prepared, optimizer, copies):
    """Parameters, gradients and optimizer states count, besides the memory that the process uses already."""
    need_bytes = 1000 + copies * PARAMETER_BYTES
    require_memory(job(optimizer=optimizer), prepared, lambda: 1000, need_bytes)
    with pytest.raises(BudgetError):
        require_memory(job(optimizer=optimizer), prepared, lambda: 1000, need_bytes - 1)


def test_the_refusal_lists_what_is_needed(prepared):
    listed = (
        r"a budget of 64\.0 KiB cannot hold this training: before the first activation 98\.7 KiB are needed "
        r"\(process and libraries 10\.0 KiB, parameters 22\.2 KiB, gradients 22\.2 KiB, optimizer states 44\.3 KiB"
    )
    with pytest.raises(BudgetError, match=listed):
        require_memory(job(), prepared, lambda: 10 * 1024, 64 * 1024)


SAME = [
    {"budget": {"device": "2GiB", "host": "1GiB"}},
    {"checkpoint": {"every": 7, "keep": 9}},
    {"evaluate_every": 3},
    {"steps": 1000},
    {"device": "cpu"},
    {"pin": ["micro_batch=2"]},
    {"ranks": 2},
]
OTHER = [
    ({"model": {**LSTM, "num_layers": 2}}, "model.num_layers"),
    ({"model": {**LSTM, "hidden_size": 9}}, "model.hidden_size"),
    ({"task": "classification"}, "task"),
    ({"sequence_length": 17}, "sequence_length"),
    ({"batch_size": 5}, "batch_size"),
    ({"optimizer": {"lr": 1e-5}}, "optimizer.lr"),
    ({"optimizer": {"clip_norm": 1.0}}, "optimizer.clip_norm"),
    ({"optimizer": {"weight_decay": 0.1}}, "optimizer.arguments.weight_decay"),
    ({"precision": "bf16"}, "precision"),
    ({"quantization_aware": "int8"}, "quantization_aware"),
    ({"allow": ["recut_batch_norm"]}, "allow"),
    ({"seed": 1}, "seed"),
    ({"data": {"train": "a.txt", "stride": 2}}, "data.stride"),
    ({"data": {"train": "a.txt", "order": "blocks"}}, "data.order"),
    ({"data": {"train": "a.txt", "pack": True}}, "data.pack"),
    ({"data": {"train": "a.txt", "order": "streams"}}, "data.order"),
]


def differences(one, other):
    return [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]


@pytest.mark.parametrize("changes", SAME, ids=str)
def test_what_does_not_change_what_is_learned_does_not_change_the_fingerprint(prepared, changes):
    assert fingerprint(job(**changes), prepared) == fingerprint(job(), prepared)


@pytest.mark.parametrize(("changes", "name"), OTHER, ids=str)
def test_what_changes_what_is_learned_changes_its_mark_and_no_other(prepared, changes, name):
    assert differences(fingerprint(job(), prepared), fingerprint(job(**changes), prepared)) == [name]


def test_where_a_state_begins_anew_is_a_mark_of_streams_alone(prepared):
    """Without streams the fingerprint lacks this entry, so older checkpoints stay valid."""
    streams = {"train": "a.txt", "order": "streams"}
    marks, reset = (fingerprint(job(data=data), prepared) for data in (streams, streams | {"reset": "texts"}))
    assert differences(marks, reset) == ["data.reset"]
    assert "data.reset" not in marks


def test_the_values_can_be_read_and_only_long_ones_are_hashed(prepared):
    marks = fingerprint(job(model={**LSTM, "notes": "long " * 50}), prepared)
    assert (marks["model.hidden_size"], marks["optimizer.lr"], marks["precision"]) == ("8", "0.0003", "fp32")
    assert marks["model.notes"].startswith("sha256:")
    assert max(map(len, marks.values())) < 110


def test_every_field_of_a_job_is_in_one_of_the_lists():
    changed = {name for changes in [*SAME, *(changes for changes, _ in OTHER)] for name in changes}
    assert changed | {"tokenizer", "batch_tokens", "embeddings", "distill"} == set(
        Job.model_fields
    )  # with batch_tokens batch_size changes too


def test_word_vectors_are_known_by_their_bits(prepared):
    """The fingerprint depends on their contents and on whether they are trained, but not on the path."""
    with_vectors = prepared.model_copy(update={"vectors_folder": "a", "vectors_digest": "d1"})
    marks = fingerprint(job(embeddings="a.txt"), with_vectors)
    assert differences(fingerprint(job(), prepared), marks) == ["embeddings.trainable", "embeddings.vectors"]
    moved = with_vectors.model_copy(update={"vectors_folder": "b"})
    assert fingerprint(job(embeddings="b.txt"), moved) == marks
    other = with_vectors.model_copy(update={"vectors_digest": "d2"})
    assert differences(marks, fingerprint(job(embeddings="a.txt"), other)) == ["embeddings.vectors"]
    trained = job(embeddings={"path": "a.txt", "trainable": True})
    assert differences(marks, fingerprint(trained, with_vectors)) == ["embeddings.trainable"]


def test_a_teacher_is_known_by_what_it_is_and_by_its_numbers(prepared, tmp_path):
    """The place of its folder and weights does not matter, except for 8-bit codes."""
    marks = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(seed)
        save_model(build_recurrent({"architecture": "gru", "vocab_size": 300}), tmp_path / folder)
        marks.append(fingerprint(job(distill=str(tmp_path / folder)), prepared))
    assert marks[0] == marks[1]
    assert differences(*marks[1:]) == ["distill.teacher"]
    forms = [{"form": "memory"}, {"form": "mapped"}, {"form": "int8"}, {"temperature": 1.0}, {"cache": 4}]
    others = [fingerprint(job(distill={"teacher": str(tmp_path / "a"), **one}), prepared) for one in forms]
    assert [differences(marks[0], one) for one in others] == [
        [], [], ["distill.codes"], ["distill.temperature"], ["distill.cache"]
    ]  # fmt: skip
    plain = fingerprint(job(), prepared)
    assert not any(name.startswith("distill") for name in plain)


def test_the_data_are_known_by_their_key(prepared):
    """Their path, and their name in the job, do not matter."""
    moved = job(data={"train": "/elsewhere"})
    assert fingerprint(moved, prepared) == fingerprint(job(), prepared)
    other = prepared.model_copy(update={"key": "k2"})
    assert differences(fingerprint(job(), prepared), fingerprint(job(), other)) == ["data"]


def test_a_table_of_synonyms_is_known_by_what_is_in_it(prepared, tmp_path):
    marks = []
    for folder, words in (("a", "quick\tfast"), ("b", "quick\tfast"), ("b", "quick\tswift")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "words.tsv").write_text(words)
        augment = {"synonyms": str(tmp_path / folder / "words.tsv")}
        data = {"train": "a.txt", "on_the_fly": True, "long_texts": "truncate", "augment": augment}
        marks.append(fingerprint(job(data=data), prepared))
    assert marks[0] == marks[1]
    assert differences(*marks[1:]) == ["data.augment.synonyms"]


def test_the_length_matters_where_the_learning_rate_follows_it(prepared):
    marks = [
        fingerprint(job(optimizer={"schedule": schedule}, steps=steps), prepared)
        for schedule in ("linear", "cosine")
        for steps in (10, 20)
    ]
    assert [differences(*marks[:2]), differences(*marks[2:])] == [["steps"], ["steps"]]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_device_that_is_named_is_taken(device):
    assert choose_device(job(device=device)) == device


def test_otherwise_it_is_the_one_there_is():
    assert choose_device(job()) == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Return the fields of a job and its prepared data, about 400 windows of 16 tokens."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("\n".join(f"line {i} of the text" for i in range(1000)))
    source = {"data": {"train": str(folder / "text.txt"), "validation": 0.1}, "tokenizer": {"vocab_size": 300}}
    return source, prepare(job(**source), folder / "cache")


def test_two_trainings_of_one_job_are_the_same(real):
    source, prepared = real
    one, two = (assemble(job(**source), prepared, "cpu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    assert torch.equal(one.loader.peek().fields["input_ids"], two.loader.peek().fields["input_ids"])
    other = assemble(job(**source, seed=1), prepared, "cpu")
    assert not torch.equal(next(one.model.parameters()), next(other.model.parameters()))


def test_the_parts_are_those_of_the_job(real):
    source, prepared = real
    optimizer = {"name": "sgd", "lr": 0.5, "schedule": "linear"}
    parts = assemble(job(**source, optimizer=optimizer), prepared, "cpu")
    assert isinstance(parts.optimizer, torch.optim.SGD)
    assert parts.schedule is not None
    assert parts.units == "next-tokens"
    assert parts.model.training
    assert parts.loader.peek().fields["input_ids"].shape == (4, 16)
    assert len(parts.validation) == pytest.approx(0.1 * (len(parts.validation) + len(parts.loader) * 4), abs=4)
    assert assemble(job(**source), prepared, "cpu").schedule is None


def test_streams_come_in_order_to_a_model_that_keeps_the_state_of_each_slot(real):
    source, prepared = real
    streams = {"data": source["data"] | {"order": "streams"}}
    parts = assemble(job(**streams), prepared, "cpu")
    assert parts.model.carried.num_slots == 4
    seen = []
    for _ in range(3):
        seen.append(parts.loader.peek().fields["windows"].tolist())
        parts.loader.advance()
    assert seen == [[0] * 4, [1] * 4, [2] * 4]


def test_a_batch_that_the_data_cannot_fill_is_refused(real):
    source, prepared = real
    with pytest.raises(DataError, match=r"batch_size = 100000: give more text"):
        assemble(job(**source, batch_size=100_000), prepared, "cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {**LSTM, "hiden_size": 8}}, "did you mean `hidden_size`"),
        ({"model": {"architecture": "gpt2", "n_layers": 2}}, "did you mean `n_layer`"),
        ({"model": {"architecture": "gpt2", "n_embd": 10, "n_head": 3}}, "`gpt2` cannot be built"),
        ({"model": "no/such/folder"}, "there is no folder"),
        ({"model": "no_such_module:build"}, "cannot be imported"),
        ({"model": LSTM, "precision": "fp16", "device": "cpu"}, "no float16 kernels"),
        ({"optimizer": {"name": "adamv"}}, "did you mean `adam"),
        ({"optimizer": {"weight_decoy": 1}}, "did you mean `weight_decay`"),
        ({"optimizer": {"warmup_steps": 11}}, "is longer than the training of 10 steps"),
    ],
    ids=str,
)
def test_what_cannot_be_built_is_refused_before_there_are_data(changes, message):
    with pytest.raises(JobError, match=message):
        require_buildable(job(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "lstm"},
        {"task": "classification"},
        {"model": {"architecture": "gpt2", "n_layer": 1, "vocab_size": 300}, "tokenizer": {"vocab_size": 8000}},
        {"model": {"architecture": "gpt2", "n_layer": 1, "vocab_size": 20}, "tokenizer": {"train": "words"}},
        {"model": {"architecture": "bert", "vocab_size": 60}, "tokenizer": {"path": "/a"}, "task": "classification"},
    ],
    ids=str,
)
def test_what_only_the_data_can_decide_is_not_refused_before(changes):
    require_buildable(job(**changes))


def test_a_function_of_the_users_is_found_but_not_called(tmp_path, monkeypatch):
    (tmp_path / "users_slow_model.py").write_text("def build(vocab_size):\n    raise RuntimeError\n")
    monkeypatch.syspath_prepend(tmp_path)
    require_buildable(job(model="users_slow_model:build"))


def test_every_generator_that_a_checkpoint_keeps_is_seeded(prepared, monkeypatch):
    monkeypatch.setattr("plimsoll.models.assemble.open_datasets", lambda prepared, job: ([0] * 8, None))
    drawn = []
    for seed in (3, 3, 4):
        assemble(job(seed=seed), prepared, "cpu")
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[1], drawn[2], strict=True))


@pytest.mark.parametrize(
    ("augment", "why"),
    [
        ({"synonyms": "/absent/table.tsv"}, "cannot read the synonyms /absent/table.tsv"),
        ({"function": "no_such_module:change"}, "no_such_module"),
        ({"token_function": "json:no_such_name"}, "no_such_name"),
    ],
)
def test_what_augments_is_looked_at_before_the_data_are_prepared(augment, why):
    data = {"train": "/text", "augment": augment, "on_the_fly": True, "long_texts": "truncate"}
    of_texts = job(data=data, task="classification")
    with pytest.raises(DataError, match=why):
        require_buildable(of_texts)
