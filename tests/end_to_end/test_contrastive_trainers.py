"""sentence-transformers' trainer with in-batch negatives: embedded in slices, with unchanged losses and weights."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import plimsoll
from plimsoll.errors import OutOfMemoryError
from plimsoll.step.failpoints import armed, exhaust_memory
from plimsoll.techniques.gradient_cache import gradient_cache_fallbacks
from workloads import largest_relative_difference

sentence_transformers = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")

BATCH_SIZE, NUM_COLUMNS, NUM_WORDS = 8, 3, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a BERT model and its tokenizer."""
    folder = tmp_path_factory.mktemp("encoder")
    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{number}": number for number in range(2, NUM_WORDS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", model_max_length=16
    ).save_pretrained(folder)  # fmt: skip
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=NUM_WORDS, **sizes, **rates)).save_pretrained(folder)
    return folder


def trainer_of(folder, tmp_path, is_cached=False):
    """Return a trainer of two steps and its model."""
    from sentence_transformers.sentence_transformer import losses, modules

    parts = [modules.Transformer(str(folder), max_seq_length=16), modules.Pooling(16)]
    model = sentence_transformers.SentenceTransformer(modules=parts, device="cpu")
    generator = torch.Generator().manual_seed(1)

    def text(length):
        return " ".join(f"w{word}" for word in torch.randint(2, NUM_WORDS, (length,), generator=generator).tolist())

    rows = [{"anchor": text(4), "positive": text(9), "negative": text(6)} for _ in range(2 * BATCH_SIZE)]
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        output_dir=tmp_path, per_device_train_batch_size=BATCH_SIZE, max_steps=2, learning_rate=1e-3, logging_steps=1,
        report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no", optim="sgd",
    )  # fmt: skip
    cached = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3)
    dataset = datasets.Dataset.from_list(rows)
    trainer = sentence_transformers.SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=dataset, eval_dataset=dataset,
        loss=cached if is_cached else losses.MultipleNegativesRankingLoss(model),
    )  # fmt: skip
    return trainer, model


def trained(folder, tmp_path, protect, is_cached=False):
    """Return the losses of two steps and the weights after them."""
    trainer, model = trainer_of(folder, tmp_path, is_cached)
    with protect(trainer):
        trainer.train()
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    return losses, {name: one.detach().clone() for name, one in model.named_parameters()}


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    return trained(folder, tmp_path_factory.mktemp("plain"), lambda trainer: nullcontext())


def test_in_slices_it_is_the_same_training(folder, tmp_path, plain):
    fallbacks = gradient_cache_fallbacks(BATCH_SIZE, 3)
    losses, weights = trained(folder, tmp_path, lambda one: plimsoll.transformers.protected(one, fallbacks=fallbacks))
    assert losses == pytest.approx(plain[0], rel=1e-6)
    assert largest_relative_difference(plain[1], weights) < 1e-5


def test_memory_that_runs_out_is_followed_by_smaller_slices_of_the_whole_batch(folder, tmp_path, plain):
    events = []

    def protect(trainer):
        fallbacks = gradient_cache_fallbacks(BATCH_SIZE, 3)
        return plimsoll.transformers.protected(trainer, fallbacks=fallbacks, on_oom=events.append)

    with armed("backward", 1, 1):
        losses, weights = trained(folder, tmp_path, protect)
    assert [(event.action, event.next_micro_batch) for event in events] == [
        ("same micro-batch with gradient_cache=2", BATCH_SIZE)
    ]
    assert losses == pytest.approx(plain[0], rel=1e-6)
    assert largest_relative_difference(plain[1], weights) < 1e-5


@pytest.mark.parametrize("units", [None, "samples"])
def test_where_memory_runs_out_it_is_not_cut_and_told_of_the_cached_loss(folder, tmp_path, units):
    """The units of the loss's mean do not change this."""
    trainer, model = trainer_of(folder, tmp_path)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    with (
        armed("backward", 1, 2),
        pytest.raises(OutOfMemoryError, match=r"8 samples was not cut, .*CachedMultipleNegativesRankingLoss"),
    ):
        plimsoll.transformers.fit(trainer, units=units)
    for name, one in model.named_parameters():
        assert torch.equal(one, before[name])


def test_the_cached_loss_that_it_is_told_of_is_the_same_training(folder, tmp_path, plain):
    losses, weights = trained(folder, tmp_path, plimsoll.transformers.protected, is_cached=True)
    assert losses == pytest.approx(plain[0], rel=1e-6)
    assert largest_relative_difference(plain[1], weights) < 1e-5


def test_its_evaluation_is_not_cut_either(folder, tmp_path):
    trainer, model = trainer_of(folder, tmp_path)
    expected = trainer.evaluate()["eval_loss"]
    most = NUM_COLUMNS * BATCH_SIZE

    def too_large(module, inputs):
        if len(inputs[0]["input_ids"]) > most:
            exhaust_memory()

    handle = model.register_forward_pre_hook(too_large)
    with plimsoll.transformers.protected(trainer, units="samples"):
        assert trainer.evaluate()["eval_loss"] == expected
        most = BATCH_SIZE - 1  # rows; a loss may embed all columns at once
        with pytest.raises(OutOfMemoryError, match="8 samples was not cut, because the loss of a batch is not the sum"):
            trainer.evaluate()
    handle.remove()


def test_a_budget_and_fallbacks_exclude_each_other(folder, tmp_path):
    fallbacks = gradient_cache_fallbacks(BATCH_SIZE, 3)
    with pytest.raises(plimsoll.errors.InputError, match="given with fallbacks"):
        trained(folder, tmp_path, lambda one: plimsoll.transformers.protected(one, fallbacks=fallbacks, budget="1GiB"))
