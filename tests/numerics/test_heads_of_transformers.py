"""Every head of transformers that can be built small: a head that is known to be additive is additive in its units."""

import inspect
import warnings

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto import modeling_auto

from plimsoll.device.base import backend_for
from plimsoll.models.hugging_face import MODEL_FAULTS
from plimsoll.models.workload import Workload
from plimsoll.step.losses.additive import loss_check_of
from plimsoll.step.losses.known import known_units, shifts_labels

SMALL = {
    1: ("encoder_layers", "decoder_layers", "n_groups", "n_group", "topk_group", "first_k_dense_replace"),
    2: ("num_key_value_heads", "num_experts_per_tok", "type_vocab_size", "linear_num_key_heads", "eos_token_id"),
    4: (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_attention_heads", "n_head", "n_heads"),
        *("num_heads", "encoder_attention_heads", "decoder_attention_heads", "num_experts", "num_local_experts"),
        *("n_routed_experts", "block_size", "linear_num_value_heads", "moe_num_experts"),
    ),
    8: (
        *("d_kv", "head_dim", "attention_window", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "state_size"),
        *("mamba_d_state", "linear_key_head_dim", "linear_value_head_dim", "rotary_dim"),
    ),
    16: ("moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "entity_vocab_size", "entity_emb_size"),
    32: ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"),
    64: (
        *("vocab_size", "intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim", "hidden_dim"),
        *("max_position_embeddings", "n_positions"),
    ),
}
MOST_PARAMETERS = 4_000_000
NOT_BUILT = (*MODEL_FAULTS, ImportError, StrictDataclassError)
HEADS = {  # with the minimum number of known heads, in transformers 5.23
    "CAUSAL_LM": ("next-tokens", 110),
    "MASKED_LM": ("tokens", 30),
    "TOKEN_CLASSIFICATION": ("tokens", 70),
    "SEQUENCE_CLASSIFICATION": ("samples", 80),
}


def small(kind, is_causal):
    """Build a model with few parameters; a failure here is not a failure of the check."""
    fields = set(inspect.signature(kind.config_class.__init__).parameters)
    fields |= set(getattr(kind.config_class, "__dataclass_fields__", {}))
    options = {name: value for value, names in SMALL.items() for name in names if name in fields}
    options |= {name: 0.0 for name in fields if "dropout" in name or name.endswith("pdrop") or name == "layerdrop"}
    if "qk_rope_head_dim" in fields:
        options.pop("head_dim", None)
    if is_causal and "is_decoder" in fields:
        options["is_decoder"] = True
    options.pop("token_dropout", None)  # a boolean
    config = kind.config_class(**options, pad_token_id=0, bos_token_id=1, num_labels=3)
    with torch.device("meta"):
        num_parameters = sum(one.numel() for one in kind(config).parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(num_parameters)
    return kind(config).train()


def batch_for(task):
    draws = torch.Generator().manual_seed(0)
    mask = (torch.arange(12) < torch.tensor([12, 3, 7, 12, 5, 9])[:, None]).long()
    ids = torch.randint(3, 60, mask.shape, generator=draws) * mask
    labels = {
        "SEQUENCE_CLASSIFICATION": torch.arange(6) % 3,
        "TOKEN_CLASSIFICATION": torch.where(mask == 1, ids % 3, -100),
    }
    of_tokens = torch.where(mask == 1, ids, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.get(task, of_tokens)}


def verdict_of(model, batch, units):
    workload = Workload(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(**batch).loss, units
    )
    return loss_check_of(workload, batch, backend_for("cpu"), recut_loss=False, never_cut=False).verdict


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("task", HEADS)
def test_a_head_that_is_known_is_additive_with_its_units(task):
    units_of_task, least = HEADS[task]
    batch, num_known, wrong = batch_for(task), 0, []
    for names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
        for name in names if isinstance(names, tuple) else (names,):
            torch.manual_seed(0)
            with warnings.catch_warnings(action="ignore"):
                try:
                    model = small(getattr(transformers, name), task == "CAUSAL_LM")
                    model(**batch)
                except NOT_BUILT:
                    continue
                known = known_units(model)
                guessed = "next-tokens" if shifts_labels(model) else "tokens"
                units = known or ("samples" if task == "SEQUENCE_CLASSIFICATION" else guessed)
                verdict = verdict_of(model, batch, units)
                if verdict == "not shown":  # noise in the router, or random attention, in training
                    verdict = verdict_of(model.eval(), batch, units)
            num_known += known is not None
            wrong += (
                [(name, known, units, verdict)] if verdict != "additive" or known not in {None, units_of_task} else []
            )
    assert wrong == []
    assert num_known >= least
