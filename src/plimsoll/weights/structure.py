"""Transformers models with a structure that their configuration class cannot express, built from its field ``shrunk``.

`KINDS` documents the content of the field. Module names refer to the model in which a change was recorded. In a model
with another head, or without a head, `find` finds the same modules, and changes to a missing head are skipped.

This file is also copied unchanged into the folder of such a model (``modeling_shrunk.py``). transformers loads it from
there without Plimsoll: ``AutoModel.from_pretrained(folder, trust_remote_code=True)``. It therefore imports only torch
and transformers. Loading the folder in any other way must fail, not return a different model (`marked`).

Written for transformers 5.23. Does NOT cover `resize_token_embeddings` of factored embeddings.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIELD = "shrunk"
CODE_FILE = "modeling_shrunk.py"
KINDS = (  # in the order of application
    # {"bert.encoder.layer.0.attention.self.query": [384, 192]}: input and output size of a Linear or Conv1D, rows and
    # width of an Embedding, or width of a norm; null keeps a size
    "resized",
    # {"bert.encoder.layer.0.attention.self": {"num_attention_heads": 6, "all_head_size": 192}}
    "attributes",
    # ["transformer.h.0.attn.c_attn"]: an nn.Linear replaces a Conv1D
    "as_linear",
    # {"bert.encoder.layer.0.output.dense": 64}: two factors of this rank replace a Linear, Conv1D or Embedding
    "factored",
    # {"bert.encoder.layer.1": "bert.encoder.layer.0"}: the parameters of another module; the module objects stay
    # separate, so that each layer has its own entry in a cache of keys and values
    "shared",
    # ["bert.encoder.layer.0.output.dense"]: weights that only Plimsoll can use on a CPU; it changes no structure
    "gpu_only",
)

LISTS = ("as_linear", "gpu_only")  # kinds that record only names
UNMARKED = "shrunk_from"  # field for the original fields, as pairs (a dict would be parsed as a model config)

_AUTO_CLASSES = (
    *("AutoModel", "AutoModelForPreTraining", "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"),
    *("AutoModelForSequenceClassification", "AutoModelForTokenClassification", "AutoModelForQuestionAnswering"),
    *("AutoModelForMultipleChoice", "AutoModelForNextSentencePrediction", "AutoModelForTextEncoding"),
)
_HOW_TO_LOAD = (
    "this model was made smaller: load it with AutoModel.from_pretrained(folder, trust_remote_code=True), or the Auto "
    f"class of its head, which runs the {CODE_FILE} next to this file; or with plimsoll.load_model(folder)"
)
_NEW_WEIGHTS_STD = 0.02  # for transformers' Conv1D, which has no reset_parameters
_IS_INITIALIZED = "_is_hf_initialized"  # transformers' mark, on modules and parameters


class FactoredLinear(nn.Sequential):
    """A linear layer as two layers: from the inputs to the rank, without a bias, and from the rank to the outputs."""

    def __init__(self, first: nn.Linear, second: nn.Linear) -> None:
        super().__init__(first, second)
        self.in_features, self.rank, self.out_features = first.in_features, first.out_features, second.out_features

    @property
    def weight(self) -> Tensor:
        """The weight of the equivalent single layer, (out, in): a new tensor each time."""
        first, second = cast(tuple[Any, Any], tuple(self))
        return cast(Tensor, second.weight @ first.weight)

    @property
    def bias(self) -> Tensor | None:
        """The bias of the second layer; ``None`` if it has no bias."""
        return cast("Tensor | None", cast(Any, self[1]).bias)


class FactoredEmbedding(nn.Sequential):
    """An embedding as two layers: rows of width `rank`, and a linear layer to the full width."""

    def __init__(self, first: nn.Embedding, second: nn.Linear) -> None:
        super().__init__(first, second)
        self.num_embeddings, self.rank, self.embedding_dim = (
            first.num_embeddings,
            first.embedding_dim,
            second.out_features,
        )

    @property
    def weight(self) -> Tensor:
        """The weight of the equivalent single embedding, (rows, width): a new tensor each time."""
        first, second = cast(tuple[Any, Any], tuple(self))
        return cast(Tensor, first.weight @ second.weight.t())

    @property
    def padding_idx(self) -> int | None:
        """The index of the row that is not trained; ``None`` if all rows are."""
        return cast("int | None", cast(Any, self[0]).padding_idx)

    @padding_idx.setter
    def padding_idx(self, row: int | None) -> None:
        cast(Any, self[0]).padding_idx = row


def shrunk_class(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass of a model class that builds the structure in its configuration.

    The subclass has the name of the model class, so that a configuration names the same architecture.
    """
    made: type[PreTrainedModel] = (
        model_class if issubclass(model_class, _Shrunk) else _made_class(cast(Any, model_class))
    )
    return made


def class_for(model_class: type[PreTrainedModel], config: Any) -> type[PreTrainedModel]:
    """Return the model class for a configuration: its `shrunk_class` if the configuration has the field ``shrunk``."""
    return shrunk_class(model_class) if getattr(config, FIELD, None) else model_class


@functools.cache
def _made_class(model_class: Any) -> type[PreTrainedModel]:
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        self._ties_before = dict(self.all_tied_weights_keys)
        restructure(self, getattr(config, FIELD, None) or {})
        refresh_ties(self)
        self.init_weights()  # initializes only new weights; on the meta device, none

    def get_expanded_tied_weights_keys(self: Any, all_submodels: bool = False) -> dict[str, str]:
        if not all_submodels:
            return cast(dict[str, str], model_class.get_expanded_tied_weights_keys(self))
        tables = (self.get_input_embeddings(), self.get_output_embeddings())
        if any(isinstance(one, FactoredLinear | FactoredEmbedding) for one in tables):
            return _tied_names(self, self._ties_before)  # transformers would look for weights that no longer exist
        return _tied_names(self, model_class.get_expanded_tied_weights_keys(self, all_submodels=True))

    def _adjust_bias(self: Any, output: Any, source: Any) -> None:
        # Layers that share weights need no adjustment; transformers would truncate the bias of a Conv1D.
        if output is self.get_output_embeddings():
            model_class._adjust_bias(self, output, source)

    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        self.config.auto_map = auto_map(model_class)
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        _copy_code(Path(save_directory))
        with _all_ties_told(self):
            model_class.save_pretrained(self, save_directory, *args, **kwargs)
        _mark(Path(save_directory) / "config.json", self.config)

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = model_class.from_pretrained.__func__(cls, *args, **kwargs)
        _refuse_cpu(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    own = {
        "__module__": __name__,
        "__doc__": f"{model_class.__name__} with the structure that its configuration stores in `{FIELD}`.",
        "__init__": __init__,
        "get_expanded_tied_weights_keys": get_expanded_tied_weights_keys,
        "_adjust_bias": _adjust_bias,
        "save_pretrained": save_pretrained,
        "from_pretrained": classmethod(from_pretrained),
    }
    return type(model_class.__name__, (_Shrunk, model_class), own)


@contextmanager
def _all_ties_told(model: Any) -> Iterator[None]:
    """Declare all names of each tied weight to transformers inside the ``with`` block.

    A model that is saved in the block stores each tied weight once.
    """
    model._tied_weights_keys = {f"^{re.escape(name)}$": source for name, source in model.all_tied_weights_keys.items()}
    try:
        yield
    finally:
        del model._tied_weights_keys  # the attribute of the class applies again


class _Shrunk:
    """A base class that marks the classes created by `shrunk_class`."""


def _refuse_cpu(model: Any) -> None:
    """Raise if the first pass of a model would fail because there are no kernels for its weights.

    Raises:
        RuntimeError: if 4-bit weights are on the CPU in the layout of files, which only GPUs support.
    """
    for name in (getattr(model.config, FIELD, None) or {}).get("gpu_only", ()):
        found = find(model, name)
        weight = None if found is None else _weight(model.get_submodule(found))
        if weight is not None and weight.device.type == "cpu" and type(weight).__name__ == "Int4Tensor":
            raise RuntimeError(
                f'{name} has 4-bit weights, which torchao supports on a GPU only: give device_map="cuda", '
                "or load the folder with plimsoll.load_model(folder) for the CPU (pip install torch-plimsoll)"
            )


def marked(fields: Mapping[str, Any], number_of_layers: str) -> dict[str, Any]:
    """Return the fields of a configuration file, changed so that transformers cannot load a plain model from it.

    If the code in the folder is not allowed to run, the Auto classes do not know the ``model_type``. Their error names
    the required argument (``trust_remote_code``). A class that is called by name (``BertModel.from_pretrained``)
    accepts any ``model_type`` with a warning, and would initialize missing weights randomly. The number of layers is
    therefore replaced by a text that explains how to load the model. The configuration class rejects the text, and its
    error shows it.

    Args:
        fields: the content of a config.json.
        number_of_layers: the name of the field with the number of layers.
    """
    marks = {"model_type": f"shrunk-{fields['model_type']}", number_of_layers: _HOW_TO_LOAD}
    return {**fields, **marks, UNMARKED: [[name, fields[name]] for name in marks]}


def unmarked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the original fields of a configuration before `marked`; any other configuration is returned unchanged."""
    return {name: value for name, value in fields.items() if name != UNMARKED} | dict(fields.get(UNMARKED, ()))


def _mark(path: Path, config: Any) -> None:
    fields = json.loads(path.read_text(encoding="utf-8"))
    made = marked(fields, config.attribute_map.get("num_hidden_layers", "num_hidden_layers"))
    path.write_text(json.dumps(made, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class ShrunkConfig:
    """The class that ``AutoConfig`` loads from the folder of a shrunk model."""

    @classmethod
    def from_pretrained(cls, folder: Any, **kwargs: Any) -> Any:
        """Return the configuration of the model's architecture, with the recorded changes in the field ``shrunk``."""
        from transformers import CONFIG_MAPPING, PreTrainedConfig

        found, unused = PreTrainedConfig.get_config_dict(folder, **kwargs)
        fields = unmarked(found)
        return CONFIG_MAPPING[fields["model_type"]].from_dict(fields, **unused)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: saving the model again copies the code."""


def __getattr__(name: str) -> Any:
    """Return a class of this file that ``auto_map`` names: the `shrunk_class` of the transformers model ``name``."""
    if name.startswith("_"):
        raise AttributeError(name)
    import transformers

    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise AttributeError(f"transformers has no model `{name}`")  # noqa: TRY004 -- the module has no such attribute
    return shrunk_class(found)


def auto_map(model_class: Any) -> dict[str, str]:
    """Return the name of the class in this file for each Auto class of transformers, as a configuration stores it."""
    from transformers.models.auto import modeling_auto

    found = {"AutoConfig": f"{Path(CODE_FILE).stem}.{ShrunkConfig.__name__}"}
    for name in _AUTO_CLASSES:
        mapping = getattr(getattr(modeling_auto, name, None), "_model_mapping", {})
        if model_class.config_class in mapping:
            chosen = mapping[model_class.config_class]
            chosen = chosen[0] if isinstance(chosen, tuple) else chosen
            found[name] = f"{Path(CODE_FILE).stem}.{chosen.__name__}"
    return found


def _copy_code(folder: Path) -> None:
    target, own = folder / CODE_FILE, Path(__file__)
    if not (target.exists() and target.samefile(own)):
        shutil.copyfile(own, target)


def note(model: Any, kind: str, name: str, value: Any = None) -> None:
    """Record a change of a model in its configuration. The model then becomes an instance of its `shrunk_class`.

    Args:
        model: the changed model.
        kind: kind of the change, one of `KINDS`.
        name: name of the changed module. A later record replaces an earlier one, except that ``attributes`` are merged.
        value: the content of the change, see `KINDS`; omitted for ``as_linear`` and ``gpu_only``.
    """
    before = getattr(model.config, FIELD, None) or {}
    if kind in LISTS:
        value = [*(one for one in before.get(kind, ()) if one != name), name]
        model.config.shrunk = {**before, kind: value}
    else:
        if kind == "attributes":
            value = {**before.get(kind, {}).get(name, {}), **value}
        model.config.shrunk = {**before, kind: {**before.get(kind, {}), name: value}}
    _become_shrunk(model)
    refresh_ties(model)


def _become_shrunk(model: Any) -> None:
    if isinstance(model, _Shrunk):
        return
    model.__class__ = shrunk_class(type(model))
    model._ties_before = dict(model.all_tied_weights_keys)
    from transformers.utils import output_capturing

    # transformers (5.23) looks up in this registry which hidden states and attentions a model can return.
    registry = getattr(output_capturing, "_CAN_RECORD_REGISTRY", None)
    if registry is not None:
        registry[model] = model._can_record_outputs


def restructure(model: nn.Module, shrunk: Mapping[str, Any]) -> None:
    """Apply the recorded structure to a newly built model. New weights are initialized.

    Args:
        model: a model with the standard structure of its class; on the meta device, only shapes are created.
        shrunk: the content of the configuration's field ``shrunk``.

    Raises:
        ValueError: if the field contains a kind that this version does not know.
    """
    unknown = set(shrunk) - set(KINDS)
    if unknown:
        raise ValueError(f"`{FIELD}` has {sorted(unknown)}, but only {', '.join(KINDS)} are known: update this file")
    for name, sizes in _present(model, shrunk.get("resized", {})):
        set_sizes(model.get_submodule(name), sizes)
    for name, attributes in _present(model, shrunk.get("attributes", {})):
        for key, value in attributes.items():
            setattr(model.get_submodule(name), key, value)
    for name, _ in _present(model, dict.fromkeys(shrunk.get("as_linear", ()))):
        put(model, name, as_linear(model.get_submodule(name)))
    for name, rank in _present(model, shrunk.get("factored", {})):
        put(model, name, factored(model.get_submodule(name), rank))
    for name, source in _present(model, shrunk.get("shared", {})):
        found = find(model, source)
        assert found is not None, "shared layers are in the same list of layers"
        use_parameters_of(model.get_submodule(found), model.get_submodule(name))


def find(model: Any, name: str) -> str | None:
    """Return the name that the recorded module ``name`` has in this model; ``None`` if the model lacks it.

    The names differ if the recorded model had another head.
    """
    prefix = getattr(model, "base_model_prefix", "")
    candidates = [name]
    if prefix:
        candidates.append(name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}")
    for candidate in candidates:
        try:
            model.get_submodule(candidate)
        except AttributeError:
            continue
        return candidate
    return None


def _present(model: nn.Module, changes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in changes.items():
        found = find(model, name)
        if found is not None:
            yield found, value


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module ``name`` of a model by ``module``."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def sizes_of(module: nn.Module) -> list[int]:
    """Return the sizes of a module, in the order in which `KINDS` stores them for ``resized``.

    They are the inputs and outputs of a linear layer, the rows and width of an embedding, or the width of a norm.
    """
    shape = [*_weight(module).shape]
    return shape[::-1] if isinstance(module, nn.Linear) else shape


def set_sizes(module: Any, sizes: list[int | None]) -> None:
    """Resize a module in place, and initialize its weights again.

    ``sizes`` has the same order as the result of `sizes_of`. ``None`` leaves a size unchanged.
    """
    before = sizes_of(module)
    first, last = (new or old for new, old in zip((sizes[0], sizes[-1]), (before[0], before[-1]), strict=True))
    if len(before) == 1:
        for name, value in list(module._parameters.items()):
            if value is not None and value.dim() == 1:
                _set(module, name, value.detach()[:1].expand(last).clone())
        if hasattr(module, "normalized_shape"):
            module.normalized_shape = (last,)
        return
    shape = (last, first) if isinstance(module, nn.Linear) else (first, last)
    _set(module, "weight", module.weight.detach().new_empty(shape))
    if getattr(module, "bias", None) is not None:
        _set(module, "bias", module.bias.detach().new_zeros(last))
    tell_sizes(module)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    else:
        nn.init.normal_(module.weight, std=_NEW_WEIGHTS_STD)
    module.__dict__.pop(_IS_INITIALIZED, None)


def keep(module: Any, *, inputs: Tensor | None = None, outputs: Tensor | None = None) -> None:
    """Keep only some inputs or outputs of a module, in the given order, with their values.

    Args:
        module: a Linear, Conv1D, Embedding (whose rows are ``inputs``), or norm (whose width is ``outputs``).
        inputs: indices to keep, (number,), or ``None`` for all.
        outputs: indices to keep, (number,), or ``None`` for all.
    """
    weight = module.weight.detach()
    is_turned, is_vector = isinstance(module, nn.Linear), weight.dim() == 1
    for kept, dim in ((inputs, 1 if is_turned else 0), (outputs, 0 if is_turned or is_vector else 1)):
        if kept is not None:
            weight = weight.index_select(dim, kept.to(weight.device))
    _set(module, "weight", weight)
    bias = getattr(module, "bias", None)
    if outputs is not None and bias is not None:
        _set(module, "bias", bias.detach().index_select(0, outputs.to(bias.device)))
    tell_sizes(module)


def tell_sizes(module: Any) -> None:
    """Update the size attributes of a module to match its weight."""
    sizes = sizes_of(module)
    names = (("in_features", "out_features"), ("nx", "nf"), ("num_embeddings", "embedding_dim"))
    for pair in names:
        if all(hasattr(module, name) for name in pair):
            for name, size in zip(pair, sizes, strict=True):
                setattr(module, name, size)
    if hasattr(module, "normalized_shape"):
        module.normalized_shape = tuple(sizes)


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    before = module._parameters[name]
    assert before is not None
    setattr(module, name, nn.Parameter(value, requires_grad=before.requires_grad))


def as_linear(module: Any) -> nn.Linear:
    """Convert a transformers Conv1D to an ``nn.Linear`` with the same values. A Linear is returned as it is."""
    if isinstance(module, nn.Linear):
        return module
    weight = module.weight.detach()
    made = _linear(weight.shape[0], weight.shape[1], module.bias is not None, weight)
    made.weight = nn.Parameter(weight.t().contiguous(), requires_grad=module.weight.requires_grad)
    if module.bias is not None:
        made.bias = module.bias
    return made.train(module.training)


def factored(module: Any, rank: int) -> FactoredLinear | FactoredEmbedding:
    """Return two newly initialized factors of rank ``rank`` that can replace a Linear, Conv1D or Embedding."""
    weight = module.weight.detach()
    num_in, num_out = sizes_of(module)
    second = _linear(rank, num_out, getattr(module, "bias", None) is not None, weight)
    if isinstance(module, nn.Embedding):
        first = nn.Embedding(num_in, rank, module.padding_idx, device=weight.device, dtype=weight.dtype)
        return FactoredEmbedding(first, second).train(module.training)
    return FactoredLinear(_linear(num_in, rank, False, weight), second).train(module.training)


def _linear(num_in: int, num_out: int, has_bias: bool, like: Tensor) -> nn.Linear:
    return nn.Linear(num_in, num_out, bias=has_bias, device=like.device, dtype=like.dtype)


def use_parameters_of(source: nn.Module, module: nn.Module) -> None:
    """Make ``module`` use the parameters of ``source``, which has the same structure."""
    for name, parameter in list(source.named_parameters(remove_duplicate=False)):
        path, _, last = name.rpartition(".")
        setattr(module.get_submodule(path), last, parameter)


def _weight(module: Any) -> Tensor:
    return cast(Tensor, module.weight)


def refresh_ties(model: Any) -> None:
    """Recompute which weights of a model transformers treats as tied."""
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def _tied_names(model: Any, keys: Mapping[str, str]) -> dict[str, str]:
    """Map the name of each tied parameter to the name of the parameter with which it is tied.

    ``keys`` is transformers' map. Names in factored modules are corrected, and parameters of shared layers are added.
    """
    adjusted = {}
    for target, source in keys.items():
        pair = _tied_part(model, target), _tied_part(model, source)
        are_same_shape = None not in pair and (pair[0] == target) == (pair[1] == source)
        if are_same_shape or (target.endswith("bias") and None not in pair):
            adjusted[str(pair[0])] = str(pair[1])
    shared = (getattr(model.config, FIELD, None) or {}).get("shared", {})
    for name, source in shared.items():
        here, first = find(model, name), find(model, source)
        if here is None or first is None:
            continue
        for inner, _ in model.get_submodule(first).named_parameters(remove_duplicate=False):
            origin = f"{first}.{inner}"
            adjusted[f"{here}.{inner}"] = adjusted.get(origin, origin)
    return adjusted


def _tied_part(model: Any, name: str) -> str | None:
    """Return the name of the parameter that replaces ``name`` in a factored module; ``None`` if it no longer exists."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, FactoredLinear):
        return f"{path}.1.{last}"
    if isinstance(module, FactoredEmbedding):
        return f"{path}.0.{last}"
    return name if hasattr(module, last) else None
