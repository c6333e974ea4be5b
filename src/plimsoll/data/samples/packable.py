"""A test that a model keeps the texts of a packed row apart. It runs the model, so no list of models is needed.

The test runs packed rows of two texts, with different tokens in the first text. The outputs for the second text must
not change, and must equal the outputs for the second text alone. This detects recurrent and state-space layers,
convolutions, attention that ignores ``position_ids`` or a mask, and a cache that disables packing. It costs three
forward passes of 24 tokens and two shorter passes. Not handled: gradients (they follow from the outputs), models
without an output per token.

Shapes: B rows, T tokens of a row, O outputs per token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from plimsoll.data.samples.masks import block_diagonal_mask

_FIRST_LENGTHS, _ROW_TOKENS = (5, 7), 12  # two rows, because some attention is correct only for one row
_TOLERANCE_SHARE = {torch.float32: 1e-3, torch.float64: 1e-6}  # relative to the effect of a token of the same text
_COARSE_TOLERANCE_SHARE = 0.1  # for bf16 and fp16, because rounding depends on the shape


def packing_fault(model: nn.Module, mask: Literal["causal", "bidirectional"] | None = None) -> str | None:
    """Return why packed rows would change the results of this model, or ``None`` if they would not.

    Args:
        model: a model with the call signature of transformers. Its training mode is restored.
        mask: the ``attention_mask`` that `plimsoll.data.samples.packing.PackedDataset` will add. ``None``: no mask is
            added, so the model must separate the texts by ``position_ids``.
    """
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    needed = ["position_ids"] if mask is None else ["position_ids", "attention_mask"]
    if missing := [name for name in needed if name not in parameters and not takes_any]:
        return f"{_kind(model)} takes no {' and no '.join(missing)}, so it cannot tell where a text of a row begins"
    input_ids, position_ids = _rows(next(model.parameters()).device)
    other_first, other_own = input_ids.clone(), input_ids.clone()
    for row, length in enumerate(_FIRST_LENGTHS):
        other_first[row, :length] += 7
        other_own[row, length] += 7
    with _evaluating(model), torch.no_grad():
        try:
            outputs, after_first, after_own = (
                _second_texts(model, rows, position_ids, mask) for rows in (input_ids, other_first, other_own)
            )
            alone = [
                _output(model, input_ids[row : row + 1, length:], position_ids[row : row + 1, length:], None)[0]
                for row, length in enumerate(_FIRST_LENGTHS)
            ]
        except (TypeError, ValueError, IndexError) as error:
            return f"{_kind(model)} cannot read packed rows ({error})"
    own = _difference(outputs, after_own)
    most = own * _TOLERANCE_SHARE.get(outputs[0].dtype, _COARSE_TOLERANCE_SHARE)
    if not own:
        return f"the outputs of {_kind(model)} do not depend on its inputs, so its texts cannot be told apart"
    if (leak := _difference(outputs, after_first)) > most:
        return (
            f"in {_kind(model)}, the output for a text changes with the text before it in the row (by {leak:.1e}; a "
            f"token of the same text changes it by {own:.1e}): {_reason(model)}"
        )
    if (shift := _difference(outputs, alone)) > most:
        return f"{_kind(model)} returns other outputs for a text after another text than alone (by {shift:.1e})"
    return None


def _rows(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the token ids and the positions, each (B, T), of two rows that each pack two texts.

    The ids are so small that they exist in every vocabulary.
    """
    places_T = torch.arange(_ROW_TOKENS, device=device)
    firsts_B = torch.tensor(_FIRST_LENGTHS, device=device)[:, None]
    return 3 + (places_T + firsts_B) * 3 % 7, torch.where(places_T < firsts_B, places_T, places_T - firsts_B)


def _second_texts(
    model: nn.Module, input_ids: Tensor, position_ids: Tensor, mask: Literal["causal", "bidirectional"] | None
) -> list[Tensor]:
    attention_mask = None if mask is None else block_diagonal_mask(position_ids, causal=mask == "causal")
    output_BTO = _output(model, input_ids, position_ids, attention_mask)
    return [output_BTO[row, length:] for row, length in enumerate(_FIRST_LENGTHS)]


def _output(model: nn.Module, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    masks = {} if attention_mask is None else {"attention_mask": attention_mask}
    result = model(input_ids=input_ids, position_ids=position_ids, **masks)
    output: Tensor = result.logits if hasattr(result, "logits") else result[0]
    if output.shape[:2] != input_ids.shape:
        raise ValueError(f"its output has shape {tuple(output.shape)}, not one per token: use samples of one text")
    return output


def _difference(outputs: list[Tensor], others: list[Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(outputs, others, strict=True))


def _kind(model: nn.Module) -> str:
    return type(model).__name__


def _reason(model: nn.Module) -> str:
    recurrent = next((_kind(module) for module in model.modules() if isinstance(module, nn.RNNBase)), None)
    if recurrent is not None:
        return f"its {recurrent} carries its state from one text into the next"
    if getattr(getattr(model, "config", None), "use_cache", False):
        return "with a cache it ignores where texts begin; set use_cache=False in its config"
    return "its layers carry a state over, or its attention does not stop where position_ids restart"


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
