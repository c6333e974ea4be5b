"""From a job to a model and to a folder, for every way to name a model."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from plimsoll.data.batch import count_units, split_batch
from plimsoll.errors import JobError, OutputError
from plimsoll.models.build import build_model, loss_of, name_labels, save_model
from plimsoll.models.workload import resident_bytes
from plimsoll.records.job import Job
from processes import run_program

GPT2 = {"architecture": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}
LSTM = {"architecture": "lstm", "embedding_size": 4, "hidden_size": 4}
BERT = {"architecture": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def job(model, task="language-modeling", **fields):
    return Job.from_fields({"model": model, "task": task, "data": {"train": "x"}, "sequence_length": 16, **fields})


def build(model, task="language-modeling", device="cpu"):
    torch.manual_seed(0)
    num_labels = 3 if task == "classification" else None
    return build_model(job(model, task), vocab_size=50, num_labels=num_labels, end_id=3, device=device)


@pytest.mark.parametrize("model", [GPT2, LSTM, "gru"], ids=str)
@pytest.mark.parametrize("task", ["language-modeling", "classification"])
def test_models_save_and_load_back_bitwise(tmp_path, model, task):
    built = build(model, task)
    save_model(built, tmp_path / "run" / "model")
    loaded = build(str(tmp_path / "run" / "model"), task)
    assert type(loaded) is type(built)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in built.state_dict().items())
    shapes = build(str(tmp_path / "run" / "model"), task, device="meta")
    assert {p.device.type for p in shapes.parameters()} == {"meta"}


SAVE_RECURRENT = """
import sys
from pathlib import Path
from plimsoll.models.build import save_model
from plimsoll.models.recurrent.model import build_recurrent
save_model(build_recurrent({"architecture": "gru", "vocab_size": 9, "num_labels": None}), Path(sys.argv[1]))
print("transformers" in sys.modules)
"""


def test_saving_a_recurrent_model_loads_nothing_more_into_a_memory_that_is_limited(tmp_path):
    assert run_program(SAVE_RECURRENT, tmp_path).stdout == "False\n"


@pytest.mark.parametrize("model", [GPT2, LSTM], ids=str)
@pytest.mark.parametrize("task", ["language-modeling", "classification"])
def test_the_loss_is_the_models_own_and_the_mean_over_its_units(model, task):
    built = build(model, task).eval()
    loss, units = loss_of(task)
    input_ids = torch.randint(4, 50, (5, 9))
    mask = torch.ones_like(input_ids)
    labels = torch.tensor([0, 1, 2, 0, 1])
    if task == "language-modeling":
        labels = input_ids.masked_fill(torch.rand(5, 9) < 0.4, -100)
    batch = {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
    assert loss(built, batch) == built(**batch).loss
    pieces = [(loss(built, piece), count_units(piece, units)) for piece in split_batch(batch, 2)]
    weighted = sum(mean * count for mean, count in pieces) / count_units(batch, units)
    torch.testing.assert_close(weighted, loss(built, batch))


@pytest.mark.parametrize(
    ("model", "num_parameters"),
    [
        # embedding 50 x 4; four gates of 4 x 4 twice and 4 twice; head 50 x 4 + 50
        (LSTM, 200 + 4 * (16 + 16 + 4 + 4) + 250),
        # tokens 50 x 8 (tied); positions 1024 x 8; two norms of one block 2 x 16; attention 8 x 24 + 24 + 8 x 8 + 8;
        # feed-forward 8 x 32 + 32 + 32 x 8 + 8; the last norm 16
        (GPT2, 400 + 8192 + 32 + 288 + 552 + 16),
    ],
    ids=str,
)
def test_resident_bytes_without_an_allocation(model, num_parameters):
    built = build(model, device="meta")
    assert {p.device.type for p in built.parameters()} == {"meta"}
    assert resident_bytes(built, job(model).optimizer) == {
        "parameters": 4 * num_parameters,
        "gradients": 4 * num_parameters,
        "optimizer_states": 8 * num_parameters,
    }


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"architecture": "gtp2"}, "no language model of architecture `gtp2`; did you mean `gpt2`"),
        ({"architecture": "lsmt"}, "did you mean `lstm`"),
        ({"n_layer": 2}, "it has the fields n_layer, but no architecture; add one, for example `architecture: gpt2`"),
        ({"architecture": "distilbert"}, "no language model of architecture `distilbert`"),
        ({"architecture": "lstm", "n_layer": 2}, "there is no field `n_layer`"),
        ("gpt2", "no folder gpt2; for a new model write `model: {architecture: gpt2}`"),
        (
            "org/gpt2-tiny",
            "no folder org/gpt2-tiny: download a model first .hf download org/gpt2-tiny --local-dir gpt2-tiny",
        ),
        ("no_such_module:build", "`no_such_module:build` cannot be imported"),
    ],
)
def test_models_that_cannot_be_named(model, message):
    with pytest.raises(JobError, match=message):
        build(model)


STREAMS = {"train": "x", "order": "streams"}


def test_streams_have_their_state_in_any_language_model_that_has_one(tmp_path):
    save_model(build(LSTM), tmp_path)
    for model in (LSTM, "gru", str(tmp_path)):
        built = build_model(job(model, data=STREAMS, batch_size=7), vocab_size=50, num_labels=None, end_id=3)
        assert built.carried.training_state.shape[1] == 7
    assert build(LSTM).carried is None


@pytest.mark.parametrize("name", ["gpt2", "folder"])
def test_streams_need_a_model_that_carries_a_state(name, tmp_path):
    save_model(build(GPT2), tmp_path)
    model = GPT2 if name == "gpt2" else str(tmp_path)
    why = r"data\.order: streams needs a model that carries a state .*GPT2LMHeadModel has none: use .* lstm, gru or rnn"
    with pytest.raises(JobError, match=why):
        build_model(job(model, data=STREAMS), vocab_size=50, num_labels=None, end_id=3, device="meta")


def test_folders_that_do_not_fit_are_named(tmp_path):
    with pytest.raises(JobError, match="is not a checkpoint folder"):
        build(str(tmp_path))
    save_model(build(LSTM), tmp_path)
    with pytest.raises(JobError, match=r"made for .*'num_labels': None.*but the text has .*'num_labels': 3"):
        build(str(tmp_path), "classification")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("classification", "is_tagger True makes a classifier of tokens, not of texts: leave it out"),
        ("language-modeling", "is_tagger True needs num_labels"),
    ],
)
def test_a_tagger_is_for_the_classification_of_tokens(task, message):
    with pytest.raises(JobError, match=message):
        build(LSTM | {"is_tagger": True}, task)


def test_a_classification_needs_two_labels():
    with pytest.raises(JobError, match="at least 2 labels, but the data have 1"):
        build_model(job("lstm", "classification"), vocab_size=50, num_labels=1, end_id=3)


def test_other_models_save_their_weights(tmp_path):
    save_model(nn.Linear(2, 2), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"cannot write the model to .*file"):
        save_model(nn.Linear(2, 2), tmp_path / "file")


SCRIPT = """
import sys, torch
from plimsoll.models.build import build_model, save_model
from plimsoll.records.job import Job
from pathlib import Path
models = {
    "language-modeling": [{"architecture": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}, "lstm"],
    "classification": [{"architecture": "bert", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}],
}
for task, specs in models.items():
    for number, spec in enumerate(specs):
        job = {"task": task, "data": {"train": "x"}, "model": spec}
        model = build_model(Job.from_fields(job), 50, 2, 3)
        ids = torch.randint(0, 50, (2, 5))
        model(input_ids=ids, labels=ids if task == "language-modeling" else ids[:, 0] % 2).loss.backward()
        folder = Path(sys.argv[1]) / f"{task}-{number}"
        save_model(model, folder)
        build_model(Job.from_fields(job | {"model": str(folder)}), 50, 2, 3)
"""


@pytest.mark.long
def test_nothing_is_printed(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, tmp_path], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.parametrize("model", ["gru", BERT], ids=["gru", "bert"])
def test_a_tagger_has_logits_for_each_token_and_keeps_the_names_of_tags(model, tmp_path):
    job = Job.from_fields({"model": model, "task": "token-classification", "data": "x", "sequence_length": 8})
    names = ("B-X", "I-X", "O")
    built = build_model(job, 50, 3, 0).eval()
    name_labels(built, names)
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.long), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    labels = torch.full((2, 8), -100)
    labels[0, :3] = torch.tensor([0, 1, 2])
    output = built(**batch, labels=labels)
    assert output.logits.shape == (2, 8, 3)
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(output.logits[0, :3], labels[0, :3]))
    assert loss_of(job.task)[1] == "tokens"
    save_model(built, tmp_path / "saved")
    loaded = build_model(job.model_copy(update={"model": str(tmp_path / "saved")}), 50, 3, 0).eval()
    assert torch.equal(loaded(**batch).logits, output.logits)
    config = loaded.config
    assert tuple(getattr(config, "label_names", None) or config.id2label.values()) == names
    with pytest.raises(JobError, match="the data have 2|was made for"):
        build_model(job.model_copy(update={"model": str(tmp_path / "saved")}), 50, 2, 0)
    with pytest.raises(JobError, match="model: token-classification needs at least 2 labels"):
        build_model(job, 50, None, 0)
