"""Low-rank factors: no loss if the weight has the rank, the least error for the inputs, and no larger layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plimsoll.compression.methods import Bundle, Calibration
from plimsoll.compression.methods.low_rank import LowRank, best_factors, rank_for
from plimsoll.compression.methods.shared_layers import SharedLayers
from plimsoll.errors import WeightsError
from plimsoll.records.plan import Choice
from plimsoll.weights.structure import FactoredLinear
from shrink_models import CORPUS, bundle, calibration, ids_of, num_bytes, outputs

METHOD = LowRank()


def choice(**options) -> Choice:
    return Choice(technique="low_rank", options=options)


def test_the_rank_follows_from_the_share_by_hand():
    # 32 x 48 is 1536 numbers, and 0.75 * 1536 is 1152. Rank 14 has 14 * 80 = 1120, rank 15 has 1200.
    assert rank_for(32, 48, 0.25) == 14
    assert rank_for(32, 32, 0.5) == 8


def test_a_weight_that_has_the_rank_already_loses_nothing():
    torch.manual_seed(0)
    weight = torch.randn(20, 3) @ torch.randn(3, 12)
    moment = torch.randn(12, 40).double()
    for second in (
        None,
        moment @ moment.t(),
        torch.zeros(12, 12).double(),
        torch.eye(12).double()[:, :1].repeat(1, 12),
    ):
        left, right = best_factors(weight, 3, second)
        assert left.shape == (20, 3)
        assert torch.allclose(left @ right, weight, atol=1e-5)
        assert torch.allclose(left.norm(dim=0), right.norm(dim=1), rtol=1e-4)  # both factors have equal norms


def test_the_error_on_the_inputs_is_the_least_there_is():
    torch.manual_seed(0)
    weight = torch.randn(16, 12)
    inputs = torch.randn(200, 12) * torch.logspace(0, -3, 12)
    moment = inputs.t().double() @ inputs.double()
    errors = {}
    for name, second in (("aware", moment), ("plain", None)):
        left, right = best_factors(weight, 4, second)
        errors[name] = float(((left @ right - weight) @ inputs.t()).norm())
    whole = torch.linalg.svdvals(weight.double() @ torch.linalg.cholesky(moment))
    assert errors["aware"] < errors["plain"]
    assert errors["aware"] == pytest.approx(float(whole[4:].norm()), rel=1e-3)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_on_the_calibration_a_first_layer_differs_less_than_by_a_plain_svd(name):
    errors = []
    for aware in (True, False):
        given = bundle(name)
        wanted = [hidden_of(given, text) for text in CORPUS]
        METHOD.shrink(given, choice(share=0.5, aware=aware), calibration(given))
        errors.append(
            sum(float((hidden_of(given, text) - one).square().sum()) for text, one in zip(CORPUS, wanted, strict=True))
        )
    assert errors[0] < errors[1]


def hidden_of(given: Bundle, text: str) -> torch.Tensor:
    """Return the output of the first block."""
    with torch.no_grad():
        return given.model(input_ids=ids_of(given.tokenizer, text), output_hidden_states=True).hidden_states[1]


def test_layers_for_which_it_does_not_pay_are_left():
    given = bundle("llama")  # keys and values are 32 x 16, the other layers 32 x 32 and 32 x 48
    METHOD.shrink(given, choice(rank=12, aware=False), Calibration())
    layer = given.model.model.layers[0]
    assert type(layer.self_attn.k_proj) is nn.Linear
    assert isinstance(layer.self_attn.q_proj, FactoredLinear)
    assert layer.self_attn.q_proj.rank == 12
    assert type(given.model.lm_head) is nn.Linear  # belongs to no block


def test_layers_that_share_are_factored_once_and_share_on():
    given = bundle("gpt2")
    SharedLayers().shrink(given, Choice(technique="shared_layers", options={"groups": 2}), Calibration())
    before = num_bytes(given.model)
    METHOD.shrink(given, choice(share=0.5), calibration(given))
    assert num_bytes(given.model) < before
    first, second = (given.model.transformer.h[number].mlp.c_fc for number in (0, 1))
    assert first is not second
    assert first[0].weight is second[0].weight
    assert outputs(given.model, ids_of(given.tokenizer, CORPUS[0])).isfinite().all()


def test_padding_does_not_count():
    given, padded = bundle("bert"), bundle("bert")
    [plain, *_] = calibration(given).batches()
    ids, mask = plain["input_ids"], plain["attention_mask"]
    more = {"input_ids": nn.functional.pad(ids, (0, 5)), "attention_mask": nn.functional.pad(mask, (0, 5))}
    METHOD.shrink(given, choice(), Calibration(lambda: iter([plain])))
    METHOD.shrink(padded, choice(), Calibration(lambda: iter([more])))
    ids_BT = ids_of(given.tokenizer, CORPUS[0])
    assert torch.allclose(outputs(given.model, ids_BT), outputs(padded.model, ids_BT), atol=1e-4)


def test_bad_input_is_refused_with_what_to_do():
    given = bundle("bert")
    assert "no linear layers in blocks" in METHOD.choices(bundle("lstm-lm"))
    assert [one.options["share"] for one in METHOD.choices(given)] == [0.25, 0.5]
    assert "give a smaller rank" in METHOD.refusal(given, choice(rank=400))
    with pytest.raises(WeightsError, match="set aware=false"):
        METHOD.shrink(given, choice(), Calibration())
