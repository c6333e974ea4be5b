"""Hugging Face models: the right objective and length, faults by name, matching checkpoints, and no output."""

import pytest
import torch
import transformers
from torch.nn import functional

from plimsoll.errors import JobError
from plimsoll.models.hugging_face import TextShape, build_hugging_face, load_hugging_face, save_hugging_face

TEXT = TextShape(vocab_size=50, num_labels=None, end_id=3, sequence_length=16)
LABELS = TextShape(vocab_size=50, num_labels=3, end_id=3, sequence_length=16)

GPT2 = {"n_embd": 8, "n_layer": 2, "n_head": 2}
LLAMA = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
}
BERT = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
DISTILBERT = {"dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 16}

LANGUAGE_MODELS = [("gpt2", GPT2), ("llama", LLAMA), ("bert", BERT), ("roberta", BERT)]
CLASSIFIERS = [("bert", BERT), ("distilbert", DISTILBERT), ("roberta", BERT), ("gpt2", GPT2), ("llama", LLAMA)]


def build(architecture, fields, shape, device="cpu"):
    torch.manual_seed(0)
    return build_hugging_face(architecture, fields, shape, device)


@pytest.mark.parametrize(("architecture", "fields"), LANGUAGE_MODELS)
def test_a_language_model_learns_the_next_token_and_sees_no_future(architecture, fields):
    model = build(architecture, fields, TEXT).eval()
    input_ids = torch.randint(0, 50, (2, 16))
    labels = input_ids.clone()
    labels[1, 9:] = -100
    output = model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), labels=labels)
    by_hand = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(output.loss, by_hand)
    changed = input_ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 50
    torch.testing.assert_close(model(input_ids=changed).logits[:, :-1], output.logits[:, :-1])


@pytest.mark.parametrize(("architecture", "fields"), LANGUAGE_MODELS)
def test_the_end_token_of_packed_text_learns(architecture, fields):
    model = build(architecture, fields, TEXT)
    input_ids = torch.full((1, 16), TEXT.end_id)
    model(input_ids=input_ids, labels=input_ids).loss.backward()
    assert model.get_input_embeddings().weight.grad[TEXT.end_id].abs().sum() > 0


@pytest.mark.parametrize(("architecture", "fields"), CLASSIFIERS)
def test_a_classifier_averages_over_samples_and_does_not_see_padding(architecture, fields):
    model = build(architecture, fields, LABELS).eval()
    input_ids = torch.randint(4, 50, (2, 16))
    input_ids[1, 6:] = model.config.pad_token_id
    mask = torch.ones_like(input_ids)
    mask[1, 6:] = 0
    labels = torch.tensor([0, 2])
    output = model(input_ids=input_ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(output.loss, functional.cross_entropy(output.logits, labels))
    alone = model(input_ids=input_ids[1:, :6], attention_mask=mask[1:, :6]).logits
    torch.testing.assert_close(output.logits[1:], alone, rtol=0, atol=1e-6)


def test_a_new_model_trains_in_float32_without_a_cache():
    model = build("gpt2", GPT2, TEXT)
    assert model.training
    assert not model.config.use_cache
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (3, 3, None)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("architecture", "fields", "length_field", "rows"),
    # RoBERTa keeps its first pad_token_id + 1 = 4 positions for padding.
    [
        ("gpt2", GPT2, "n_positions", 2000),
        ("bert", BERT, "max_position_embeddings", 2000),
        ("roberta", BERT, "max_position_embeddings", 2004),
    ],
)
def test_positions_grow_to_the_sequence(architecture, fields, length_field, rows):
    shape = LABELS._replace(sequence_length=2000)
    model = build(architecture, fields, shape, "meta")
    assert getattr(model.config, length_field) == rows
    with pytest.raises(
        JobError,
        match=f"{length_field} 512 cannot hold sequence_length 2000, which takes {rows}: set sequence_length to",
    ):
        build(architecture, {**fields, length_field: 512}, shape)


def test_the_longest_sequence_runs():
    model = build("roberta", {**BERT, "max_position_embeddings": 20}, LABELS)
    assert model(input_ids=torch.full((1, 16), 7)).logits.shape == (1, 3)
    with pytest.raises(JobError, match="set sequence_length to 15 or less"):
        build("roberta", {**BERT, "max_position_embeddings": 19}, LABELS)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("gpt2", {"n_layers": 2}, "`gpt2` has no field `n_layers`; did you mean `n_layer`"),
        ("gpt2", {"n_layer": "six"}, "`gpt2` cannot be built with .*expected int, got str"),
        ("gpt2", {"n_embd": 10, "n_head": 3}, "`gpt2` cannot be built .*must be divisible by num_heads"),
        ("gpt2", {"n_embd": -8}, "`gpt2` cannot be built"),
        ("bert", {"hidden_act": "sigmoidal", **BERT}, "`bert` cannot be built"),
        ("gpt2", {"eos_token_id": 1}, "`eos_token_id` of `gpt2` is set from the job"),
        ("gpt2", {"vocab_size": 49}, "vocab_size is 49, but the tokenizer has 50 tokens"),
        ("bart", {}, "`bart` is an encoder-decoder"),
        ("xlnet", {}, "`xlnet` learns by permutation, so its loss is not a language model's"),
        ("llama4", {}, "`llama4` holds several models"),
    ],
)
def test_faults_are_named(architecture, fields, message):
    with pytest.raises(JobError, match=message):
        build(architecture, fields, TEXT)


def test_names_of_other_architectures_for_the_same_field_are_known():
    assert build("gpt2", {**GPT2, "max_position_embeddings": 32}, TEXT).config.n_positions == 32


def test_the_vocabulary_may_be_rounded_up():
    assert build("gpt2", {**GPT2, "vocab_size": 64}, TEXT).get_input_embeddings().num_embeddings == 64


@pytest.mark.parametrize(
    ("architecture", "fields", "shape"), [("gpt2", GPT2, TEXT), ("llama", LLAMA, TEXT), ("bert", BERT, LABELS)]
)
def test_checkpoints_load_back_bitwise(tmp_path, architecture, fields, shape):
    model = build(architecture, fields, shape)
    save_hugging_face(model, tmp_path)
    loaded = load_hugging_face(tmp_path, shape, "cpu")
    assert loaded.training
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert load_hugging_face(tmp_path, shape, "meta").num_parameters() == model.num_parameters()


def test_a_saved_language_model_generates_with_its_cache(tmp_path):
    save_hugging_face(build("gpt2", GPT2, TEXT), tmp_path)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.use_cache


def test_a_half_precision_checkpoint_trains_in_float32(tmp_path):
    save_hugging_face(build("gpt2", GPT2, TEXT).bfloat16(), tmp_path)
    assert load_hugging_face(tmp_path, TEXT, "cpu").dtype == torch.float32


def test_a_language_model_becomes_a_classifier(tmp_path):
    base = build("gpt2", GPT2, TEXT)
    save_hugging_face(base, tmp_path)
    model = load_hugging_face(tmp_path, LABELS, "cpu")
    assert torch.equal(model.transformer.wte.weight, base.transformer.wte.weight)
    assert model.score.out_features == 3
    assert model.config.pad_token_id == LABELS.end_id


@pytest.mark.parametrize(("architecture", "fields"), CLASSIFIERS)
def test_the_token_for_padding_is_not_that_for_the_end(architecture, fields):
    model = build(architecture, fields, LABELS._replace(padding_id=1))
    assert model.config.pad_token_id == 1
    input_ids = torch.full((1, 4), LABELS.end_id)
    model(input_ids=input_ids, labels=torch.tensor([0])).loss.backward()
    assert model.get_input_embeddings().weight.grad[LABELS.end_id].abs().sum() > 0


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (TEXT._replace(vocab_size=51), "has 50 token embeddings, but the tokenizer has 51 tokens"),
        (TEXT._replace(sequence_length=2000), "n_positions 1024 cannot hold sequence_length 2000"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(tmp_path, shape, message):
    save_hugging_face(build("gpt2", GPT2, TEXT), tmp_path)
    with pytest.raises(JobError, match=message):
        load_hugging_face(tmp_path, shape, "cpu")


def test_a_tokenizer_far_smaller_than_the_checkpoint_is_named(tmp_path):
    save_hugging_face(build("gpt2", {**GPT2, "vocab_size": 1074}, TEXT), tmp_path)
    with pytest.raises(JobError, match="has 1074 token embeddings, but the tokenizer has 50 tokens"):
        load_hugging_face(tmp_path, TEXT, "cpu")
    assert load_hugging_face(tmp_path, TEXT._replace(vocab_size=51), "meta")


def test_a_classifier_of_other_labels_is_named(tmp_path):
    save_hugging_face(build("bert", BERT, LABELS), tmp_path)
    with pytest.raises(JobError, match="has 3 labels, but the data have 2"):
        load_hugging_face(tmp_path, LABELS._replace(num_labels=2), "cpu")


def test_a_checkpoint_without_a_language_model_head_is_named(tmp_path):
    save_hugging_face(build("llama", {**LLAMA, "tie_word_embeddings": False}, LABELS), tmp_path)
    with pytest.raises(JobError, match=r"lacks weights of a language model \(lm_head.weight\)"):
        load_hugging_face(tmp_path, TEXT, "cpu")


def test_a_damaged_checkpoint_is_named(tmp_path):
    save_hugging_face(build("gpt2", GPT2, TEXT), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(JobError, match=r"the weights in .* cannot be read"):
        load_hugging_face(tmp_path, TEXT, "cpu")
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(JobError, match="is not a Hugging Face checkpoint that can be read"):
        load_hugging_face(tmp_path, TEXT, "cpu")
