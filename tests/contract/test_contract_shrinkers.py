"""The contract of all methods that make a model smaller, on each kind of model.

A method is listed once (`plimsoll.compression.methods`). It is then tested here on each model of `shrink_models`, with
its strongest available choice. If it offers none, the test checks its reason.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from plimsoll.compression.methods import SHRINKERS, Bundle, Calibration
from plimsoll.compression.saving import form_of, save_bundle
from plimsoll.models.loading import load_model
from plimsoll.records.plan import Choice
from plimsoll.records.shrink import METHODS
from plimsoll.weights.parts import plain_parts
from quantized_models import logits, made
from shrink_models import (
    MODELS,
    bundle,
    calibration,
    ids_of,
    is_language_model,
    meta_bundle,
    num_bytes,
    outputs,
)

DOCS = Path(__file__).parents[2] / "docs" / "shrink"

VALUES = [method for method in SHRINKERS if METHODS[method].stage == "values"]

CASES = [(method, model) for method in SHRINKERS for model in MODELS]


def choices_for(method: str, given: Bundle) -> tuple[Choice, ...] | str:
    """Return the available choices, or the reason against the method."""
    return SHRINKERS[method].choices(given)


def case(method: str, name: str) -> tuple[Bundle, Choice, Calibration]:
    """Return a model with the strongest available choice; skip if no choice is available."""
    given = bundle(name)
    found = choices_for(method, given)
    if isinstance(found, str):
        pytest.skip(f"{method} is not for {name}: {found}")
    return given, found[-1], calibration(given)


def weights_of(model: nn.Module) -> list[tuple[str, torch.Size, bytes]]:
    """Return names, shapes and bits of the weights."""
    return [
        (f"{name} {inner}", part.shape, repr(part.detach().flatten().tolist()).encode())
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
        for inner, part in plain_parts(value).items()
    ]


def shapes_of(model: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Return names, shapes and types of the weights, each once."""
    return [(name, value.shape, value.dtype) for name, value in model.named_parameters()]


@pytest.mark.parametrize("method", SHRINKERS)
def test_it_says_what_it_saves_and_has_a_page(method):
    one = SHRINKERS[method]
    page = DOCS / f"{method}.md"
    assert page.is_file(), f"{method} has no page {page.name}"
    assert one.saves[0].islower() or one.saves[0].isalnum()
    assert METHODS[method].stage in {"structure", "values"}
    assert not re.search(r"\d+(\.\d+)?x\b", one.saves), "how much faster is measured, not promised"


@pytest.mark.parametrize(("method", "name"), CASES)
def test_what_is_offered_is_not_refused_or_there_is_a_reason(method, name):
    given = bundle(name)
    found = choices_for(method, given)
    if isinstance(found, str):
        assert len(found.split()) > 5, found
        return
    assert found
    for choice in found:
        assert choice.technique == method
        assert SHRINKERS[method].refusal(given, choice) is None
        assert SHRINKERS[method].needs(choice) <= {"batches", "gradients", "corpus"}
    refused = SHRINKERS[method].refusal(given, Choice(technique=method, options={"nonsense": 1}))
    assert refused is not None
    assert "nonsense" in refused


@pytest.mark.parametrize("method", SHRINKERS)
def test_what_is_no_model_of_text_has_a_reason(method):
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

    assert isinstance(SHRINKERS[method].choices(Bundle(Other(), bundle("gpt2").tokenizer)), str)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("method", "name"), CASES)
def test_twice_the_same_gives_the_same_bits_and_fewer_bytes(method, name):
    given, choice, data = case(method, name)
    before = num_bytes(given.model)
    SHRINKERS[method].shrink(given, choice, data)
    again = bundle(name)
    SHRINKERS[method].shrink(again, choice, data)
    assert weights_of(given.model) == weights_of(again.model)
    if METHODS[method].stage == "structure":
        assert num_bytes(given.model) < before
    assert outputs(given.model, ids_of(given.tokenizer, "the ship")).isfinite().all()


@pytest.mark.parametrize(("method", "name"), CASES)
def test_on_the_meta_device_the_sizes_are_the_same(method, name):
    given, choice, data = case(method, name)
    if METHODS[method].stage != "structure":
        pytest.skip("values of fewer bits are counted by their method")
    sketch = meta_bundle(name)
    SHRINKERS[method].shrink(given, choice, data)
    counts = data.token_counts if "corpus" in SHRINKERS[method].needs(choice) else None
    SHRINKERS[method].shrink(sketch, choice, Calibration(token_counts=counts))
    assert shapes_of(sketch.model) == shapes_of(given.model)
    assert all(value.is_meta for value in sketch.model.parameters())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("method", "name"), CASES)
def test_it_is_saved_and_loaded_with_the_same_outputs(method, name, tmp_path):
    given, choice, data = case(method, name)
    SHRINKERS[method].shrink(given, choice, data)
    ids_BT = ids_of(given.tokenizer, "load the ship")
    wanted = outputs(given.model, ids_BT)
    save_bundle(given, tmp_path / "small")
    loaded = load_model(tmp_path / "small")
    # The address of a tensor determines the order of sums; in bfloat16 that changes a digit.
    near = {"rtol": 1e-2, "atol": 1e-2} if wanted.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(outputs(loaded.model, ids_BT), wanted, **near)
    assert weights_of(loaded.model) == weights_of(given.model) or method == "int4", "bits of int4 are packed anew"
    assert not loaded.missing + loaded.unexpected
    assert type(loaded.model).__name__ == type(given.model).__name__
    if form_of(given.model) == "plain":
        plain = getattr(transformers, type(given.model).__name__).from_pretrained(tmp_path / "small").eval()
        torch.testing.assert_close(outputs(plain, ids_BT), wanted, **near)
    own = transformers.AutoTokenizer.from_pretrained(tmp_path / "small")
    assert own("load the ship")["input_ids"] == ids_BT[0].tolist()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("method", "name"), CASES)
def test_it_trains_on(method, name):
    given, choice, data = case(method, name)
    if METHODS[method].stage != "structure":
        pytest.skip("values of fewer bits do not learn")
    SHRINKERS[method].shrink(given, choice, data)
    model = given.model.train()
    ids_BT = ids_of(given.tokenizer, "past the line")
    labels = ids_BT if is_language_model(model) else torch.tensor([1])
    model(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), labels=labels).loss.backward()
    used = [value for name, value in model.named_parameters() if value.grad is not None]
    assert len(used) > 2
    assert all(value.grad.isfinite().all() for value in used)
    assert len(used) == len([*model.parameters()])


@pytest.mark.parametrize("method", VALUES)
def test_the_page_says_when_a_quantized_model_needs_code_too(method):
    given = Bundle(made("gpt2"))
    if SHRINKERS[method].refusal(given, Choice(technique=method)) is not None:
        return
    SHRINKERS[method].shrink(given, Choice(technique=method), Calibration())
    if getattr(given.model.config, "shrunk", None):
        assert form_of(given.model) == "torchao"
        assert "trust_remote_code=True" in (DOCS / f"{method}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("second", VALUES)
@pytest.mark.parametrize("first", VALUES)
def test_two_methods_of_values_go_together_in_this_order_or_it_is_said_why_not(first, second, tmp_path):
    given = Bundle(made("bert"))
    for method in (first, second):
        choice = Choice(technique=method)
        fault = SHRINKERS[method].refusal(given, choice)
        if fault is not None:
            assert method == second, f"{method} alone is refused: {fault}"
            assert re.match(r"`?\w+`?.*[:;] \w+", fault), "what, why, and what to do instead"
            return
        SHRINKERS[method].shrink(given, choice, Calibration())
    expected = logits(given.model)
    assert expected.isfinite().all()
    save_bundle(given, tmp_path / "small")
    again = logits(load_model(tmp_path / "small").model)
    assert again.dtype == expected.dtype
    assert torch.allclose(again.float(), expected.float(), atol=1e-6)
