"""The classes of texts, from a column with labels or from the names of their folders, as in ``data/<label>/*.txt``.

Each text has one class. Plain text has one class per file, which all lines of the file share with ``unit: line``.
Columns are read and numbered when the corpus is indexed. Not handled: several labels per text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.formats.helpers.columns import refuse_unknown
from plimsoll.data.text.corpus import Corpus
from plimsoll.errors import DataError


def labels_of(corpus: Corpus, names: Sequence[str] | None = None) -> tuple[tuple[str, ...], NDArray[Any]]:
    """Return the names of the classes and the class index of every text, from the label column or the folders.

    Args:
        corpus: the texts.
        names: the classes in the order of their indices, such as the classes of the training texts. ``None``: the
            classes of ``corpus``, sorted.

    Returns:
        the names, and the class indices (number of texts,).

    Raises:
        DataError: if there are fewer than 2 classes, or a class is not in ``names``; see also `labels_from_folders`.
    """
    return labels_from_folders(corpus, names) if corpus.labels is None else labels_from_column(corpus, names)


def names_of_checkpoint(folder: Path) -> tuple[str, ...] | None:
    """Return the class names of the model in a folder, in the order of its outputs, or ``None`` if it has no names.

    Names that transformers generates (LABEL_0, ...) do not count.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        named = config.get("label_names") or [
            config["id2label"][str(number)] for number in range(len(config["id2label"]))
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    names = tuple(map(str, named))
    is_default = all(name == f"LABEL_{number}" for number, name in enumerate(names))
    return None if is_default or len(set(names)) < len(names) else names


def names_to_number_by(corpus: Corpus, model: str | dict[str, Any]) -> tuple[str, ...] | None:
    """Return the classes of the checkpoint from which a job starts.

    Return ``None`` if there is no checkpoint with at least two class names, or if it lacks a class of the texts.
    Numbering by these names keeps the meaning of the outputs of a trained classifier.
    """
    own = names_of_checkpoint(Path(model)) if isinstance(model, str) else None
    found = corpus.label_names if corpus.labels is not None else {path.parent.name for path in corpus.paths}
    return own if own is not None and len(own) > 1 and set(found) <= set(own) else None


def labels_from_column(corpus: Corpus, names: Sequence[str] | None = None) -> tuple[tuple[str, ...], NDArray[Any]]:
    """Return the sorted names in the label column (integers by value), and the class index of every text.

    Args:
        corpus: texts that were opened with ``Reading(label=...)``.
        names: the classes in the order of their indices; ``None``: the classes of ``corpus``, sorted.

    Returns:
        the names, and the class indices (number of texts,).

    Raises:
        DataError: if there are fewer than 2 classes, or a class is not in ``names``.
    """
    assert corpus.labels is not None
    known = corpus.label_names if names is None else tuple(names)
    if len(known) < 2:
        raise DataError(
            f"classification needs at least 2 classes, but the label of all {len(corpus)} texts is {known[0]!r}: give "
            "the column with the classes, or texts of other classes"
        )
    if names is None:
        return known, corpus.labels
    refuse_unknown(corpus.label_names, known, "the validation data has the classes", "the training data")
    numbers = np.array([known.index(name) for name in corpus.label_names], np.min_scalar_type(len(known) - 1))
    return known, numbers[corpus.labels]


def labels_from_folders(corpus: Corpus, names: Sequence[str] | None = None) -> tuple[tuple[str, ...], NDArray[Any]]:
    """Return the names of the folders in alphabetical order, and the class index of every text.

    Args:
        corpus: the texts.
        names: the classes in the order of their indices, such as the classes of the training texts. ``None``: the
            names of the folders, sorted.

    Returns:
        the names, and the class indices (number of texts,).

    Raises:
        DataError: if there are fewer than 2 classes, or a class has no text or is not in ``names``.
    """
    folders = [path.parent.name for path in corpus.paths]
    known = tuple(sorted(set(folders)) if names is None else names)
    if len(known) < 2:
        which = "the only file is" if len(folders) == 1 else f"all {len(folders)} files are"
        raise DataError(
            f"classification needs at least 2 classes, but {which} in folder {known[0]!r}: put the files of each class "
            f"into a folder of its own, data/<label>/*.txt, and give the folder data; or name the column with the "
            f"classes, if there is one, with data.label"
        )
    if names is None and (without_text := sorted({path.parent.name for path in corpus.left_out} - set(known))):
        raise DataError(
            f"the classes {', '.join(without_text)} have no text (their files are empty or not UTF-8), but the model "
            f"would have to distinguish them from {', '.join(known)}: put text into these folders, or remove them"
        )
    if unknown := sorted(set(folders) - set(known)):
        raise DataError(
            f"the validation data has the classes {', '.join(unknown)}, but the training data only "
            f"{', '.join(known)}: name its folders like the folders of the training data"
        )
    numbers = {name: number for number, name in enumerate(known)}
    of_files = np.array([numbers[folder] for folder in folders], np.min_scalar_type(len(known) - 1))
    return known, np.repeat(of_files, corpus.num_texts_of_paths)
