"""A language model split into its body and its head, so that the head can run on a few positions at a time.

    parts, logits_B1V = head_apart(model, {"input_ids": ids, "attention_mask": mask})
    logits_BCV = parts.head(parts.hidden_BTH[:, 5:9])

For a Hugging Face model the head is all code of the model after its body: the output matrix and, if the model has them,
a bias, a transform, soft caps or a scale. If the body cannot be separated, all logits are computed and take the place
of the hidden states, and the head does nothing.

Not handled: encoder-decoder models, and heads in which positions affect each other.

Shapes: B texts, T tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from plimsoll.models.recurrent.model import RecurrentLanguageModel


@dataclass(frozen=True)
class HeadApart:
    """The hidden states that the head of a language model reads, and the head.

    Attributes:
        hidden_BTH: the output of the body, with its autograd graph if gradients are enabled. It is the logits if the
            body could not be separated.
        head: computes the logits of some positions, (B, C, H) -> (B, C, V). It makes its input contiguous. Otherwise
            torch would multiply text by text, and oneDNN would copy the head's weights for each text (30 MiB for 30,522
            words with 512 features in bfloat16).
        num_outputs: V, the number of logits per position.
        parameters: the parameters of the head, including those shared with the body.
        matrix: the output layer, if it is a plain linear layer; ``None`` otherwise.
        states: the embeddings and the output of each layer, each (B, T, H); empty if not requested.
    """

    hidden_BTH: Tensor
    head: Callable[[Tensor], Tensor]
    num_outputs: int
    parameters: tuple[nn.Parameter, ...] = ()
    matrix: nn.Linear | None = None
    states: tuple[Tensor, ...] = ()


def head_apart(
    model: nn.Module, fields: Mapping[str, Any], num_first: int = 1, with_states: bool = False
) -> tuple[HeadApart, Tensor | None]:
    """Run a language model up to its head.

    Args:
        model: a causal transformers model, a recurrent Plimsoll model, or a model that is called in the same way.
        fields: the fields of a batch, without labels.
        num_first: number of first positions whose logits are computed in this call, because a transformers model runs
            its head too.
        with_states: whether to return the output of each layer; transformers models only.

    Returns:
        The hidden states with the head, and the logits of the first ``num_first`` positions, if they were computed.
    """
    if isinstance(model, RecurrentLanguageModel):
        hidden_BTH = model.hidden_states(fields["input_ids"])
        plain = model.head if type(model.head) is nn.Linear and _is_plain(model.head) else None
        parameters = tuple(model.head.parameters())
        return HeadApart(hidden_BTH, model.logits_of, model.config.vocab_size, parameters, plain), None
    return _of_called(cast(Any, model), fields, num_first, with_states)


def _of_called(
    model: Any, fields: Mapping[str, Any], num_first: int, with_states: bool
) -> tuple[HeadApart, Tensor | None]:
    body, kept = _body_of(model), []
    named = {**fields, "output_hidden_states": True} if with_states else fields

    def first(run: Callable[..., Any], *arguments: Any, **given: Any) -> Any:
        kept.append(run(*arguments, **given))
        return _with_hidden(kept[0], kept[0][0][:, :num_first].contiguous())

    with forward_of(body, first) if body is not None else nullcontext():
        outputs = model(**named)
    logits_BCV: Tensor = outputs.logits
    length = fields["input_ids"].shape[1]
    if (
        not kept or num_first >= length or logits_BCV.shape[1] != num_first
    ):  # the body is another module, or the head reads other positions
        states = tuple(outputs.hidden_states) if with_states else ()
        return HeadApart(logits_BCV, Tensor.contiguous, logits_BCV.shape[-1], states=states), None
    assert body is not None

    def head(hidden_BCH: Tensor) -> Tensor:
        # Runs the model's forward again, while the body returns its earlier output for these positions only.
        cut = _with_hidden(kept[0], hidden_BCH.contiguous())
        with forward_of(body, lambda run, *_, **__: cut):
            result: Tensor = model(**fields).logits
        return result

    states = tuple(kept[0].hidden_states) if with_states else ()
    parameters, matrix = _outside(model, body), _matrix_of(model)
    return HeadApart(kept[0][0], head, logits_BCV.shape[-1], parameters, matrix, states), logits_BCV


def _body_of(model: Any) -> nn.Module | None:
    """Return the module whose output the head reads, the innermost decoder; ``None`` if it cannot be separated."""
    base: Any = getattr(model, "base_model", None)
    if not hasattr(base, "get_decoder"):
        return None
    body: nn.Module = base.get_decoder()
    return None if body is model else body


def _outside(model: nn.Module, body: nn.Module) -> tuple[nn.Parameter, ...]:
    """Return the parameters of the modules outside the body, without duplicates."""
    inside = set(body.modules())
    modules = [module for module in model.modules() if module not in inside]
    return tuple(dict.fromkeys(one for module in modules for one in module.parameters(recurse=False)))


def _matrix_of(model: Any) -> nn.Linear | None:
    """Return the output layer if it is a plain linear layer, and ``None`` otherwise.

    A layer whose forward a technique has replaced is not plain: the replacement must be called.
    """
    layer = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return layer if type(layer) is nn.Linear and _is_plain(layer) else None


def _is_plain(layer: nn.Linear) -> bool:
    forward = vars(layer).get("forward")
    return forward is None or getattr(forward, "is_linear", False) is True


def _with_hidden(outputs: Any, hidden_BCH: Tensor) -> Any:
    """Return the output of the body with its last hidden states replaced."""
    if isinstance(outputs, tuple):
        return (hidden_BCH, *outputs[1:])
    kept = {name: value for name, value in outputs.items() if name != "past_key_values"}
    return type(outputs)(**{**kept, "last_hidden_state": hidden_BCH})


@contextmanager
def forward_of(module: nn.Module, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's ``forward`` while the block runs.

    Args:
        module: the module.
        replacement: called with the original ``forward``, followed by the arguments.
    """
    own = vars(module).get("forward")
    run = module.forward
    module.forward = lambda *arguments, **named: replacement(run, *arguments, **named)
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
