"""Saving of a smaller model as a folder that also loads without Plimsoll.

The result is a Hugging Face folder, or the folder of a recurrent model of Plimsoll (``model.safetensors`` and
``config.json``), with the tokenizer. The module and pooling settings of sentence-transformers are copied.

Not handled: adapters, which must be merged first, and optimizer states.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from torch import nn

from plimsoll.compression.methods import Bundle
from plimsoll.errors import OutputError
from plimsoll.models.build import save_model
from plimsoll.models.pooling import MODULES_FILE
from plimsoll.models.recurrent.model import RecurrentModel
from plimsoll.records.shrink import Form
from plimsoll.weights.structure import FIELD

_SENTENCE_FILES = ("sentence_bert_config.json", "config_sentence_transformers.json")


def form_of(model: nn.Module) -> Form:
    """Return the way in which a saved model can be loaded if Plimsoll is not installed."""
    if isinstance(model, RecurrentModel):
        return "recurrent"
    config = getattr(model, "config", None)
    if getattr(config, "quantization_config", None) is not None:
        return "torchao"
    return "code" if getattr(config, FIELD, None) else "plain"


def save_bundle(bundle: Bundle, folder: Path, origin: Path | None = None) -> None:
    """Write a model and its tokenizer into a folder, and create the folder if necessary.

    Args:
        bundle: the model to save.
        folder: an empty folder, or a new one.
        origin: the folder of the original, whose sentence-transformers files are copied; ``None`` to copy no files.

    Raises:
        OutputError: if the folder is not empty, cannot be written, or the disk is full.
    """
    if folder.exists() and any(folder.iterdir()):
        raise OutputError(f"{folder} is not empty: give another --out, or delete what is in it")
    save_model(bundle.model, folder)
    try:
        if bundle.tokenizer is not None:
            bundle.tokenizer.save_pretrained(folder)
        if origin is not None:
            _copy_what_belongs(origin, folder)
    except OSError as error:
        raise OutputError(
            f"cannot write the tokenizer to {folder}: {error}; free some space or give another --out"
        ) from error


def _copy_what_belongs(origin: Path, folder: Path) -> None:
    """Copy the files of sentence-transformers, if the original has them: the list of its modules, and their folders."""
    if not (origin / MODULES_FILE).is_file():
        return
    shutil.copyfile(origin / MODULES_FILE, folder / MODULES_FILE)
    for name in _SENTENCE_FILES:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)
    for module in json.loads((origin / MODULES_FILE).read_text(encoding="utf-8")):
        path = str(module.get("path", ""))
        if path and (origin / path).is_dir():
            shutil.copytree(origin / path, folder / path)
