"""A language model in two parts: what its head reads, and the head, which then goes over some positions at a time.

    parts, logits_B1V = head_apart(model, {"input_ids": ids, "attention_mask": mask})
    logits_BCV = parts.head(parts.hidden_BTH[:, 5:9])

Of a Hugging Face model the head is its own code, whatever it does beside the matrix (a bias, a transform before it,
soft caps, a scale). Where the body cannot be told apart, the logits are made whole and stand for what the head reads,
and the head does nothing.

It does NOT cover encoder-decoders, and heads in which one position changes another.

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
    """What the head of a language model reads of some texts, and the head.

    Attributes:
        hidden_BTH: with the graph of the body, if there is one; the logits where the head is not apart.
        head: of some positions, (B, C, H) -> (B, C, V); it copies them: with a part of each text that lies apart torch
            would multiply text by text, and oneDNN copies the weights of the head for it (30 MiB of 30,522 words of 512
            numbers in bfloat16, for each text).
        num_outputs: V.
        parameters: those of the head, also where the body has them as well.
        matrix: the layer that gives a number for each word, where it is a plain one.
        states: what the layers pass on, the embeddings first, (B, T, H) each; where they were asked for.
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
        model: a causal language model of transformers, a recurrent one of ours, or one called like them.
        fields: of a batch, without labels.
        num_first: positions that a model of transformers' kind goes on with, for it is called as a whole.
        with_states: whether to keep what each layer passes on; of transformers' models alone.

    Returns:
        the parts, and the logits of the first positions, if these were made.
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
    ):  # another module is the body, or the head reads other positions
        states = tuple(outputs.hidden_states) if with_states else ()
        return HeadApart(logits_BCV, Tensor.contiguous, logits_BCV.shape[-1], states=states), None
    assert body is not None

    def head(hidden_BCH: Tensor) -> Tensor:
        # The model's own forward again, in which the body returns what it has returned before, cut to some positions.
        cut = _with_hidden(kept[0], hidden_BCH.contiguous())
        with forward_of(body, lambda run, *_, **__: cut):
            result: Tensor = model(**fields).logits
        return result

    states = tuple(kept[0].hidden_states) if with_states else ()
    parameters, matrix = _outside(model, body), _matrix_of(model)
    return HeadApart(kept[0][0], head, logits_BCV.shape[-1], parameters, matrix, states), logits_BCV


def _body_of(model: Any) -> nn.Module | None:
    """The module whose output the head reads: the innermost decoder, which some models call past their base model."""
    base: Any = getattr(model, "base_model", None)
    if not hasattr(base, "get_decoder"):
        return None
    body: nn.Module = base.get_decoder()
    return None if body is model else body


def _outside(model: nn.Module, body: nn.Module) -> tuple[nn.Parameter, ...]:
    """The parameters of the modules that are not in the body, each once."""
    inside = set(body.modules())
    modules = [module for module in model.modules() if module not in inside]
    return tuple(dict.fromkeys(one for module in modules for one in module.parameters(recurse=False)))


def _matrix_of(model: Any) -> nn.Linear | None:
    """The output layer, if it does what torch's does: one that a technique made another is called as it is."""
    layer = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return layer if type(layer) is nn.Linear and _is_plain(layer) else None


def _is_plain(layer: nn.Linear) -> bool:
    forward = vars(layer).get("forward")
    return forward is None or getattr(forward, "is_linear", False) is True


def _with_hidden(outputs: Any, hidden_BCH: Tensor) -> Any:
    """What the body returned, with other last hidden states."""
    if isinstance(outputs, tuple):
        return (hidden_BCH, *outputs[1:])
    kept = {name: value for name, value in outputs.items() if name != "past_key_values"}
    return type(outputs)(**{**kept, "last_hidden_state": hidden_BCH})


@contextmanager
def forward_of(module: nn.Module, replacement: Callable[..., Any]) -> Iterator[None]:
    """Have ``replacement`` called in place of a module's ``forward``, which it gets, while the block runs."""
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
