"""The functions that every format has, the choice of one format per file, and numbers that do not fit."""

import importlib
import inspect
import pkgutil
from pathlib import Path

import numpy as np
import pytest

import plimsoll.embeddings.formats as package
from plimsoll.embeddings.formats import Block, Fault, Format, Rows, Vectors, in_precision, rows_of
from plimsoll.embeddings.formats.helpers.sources import Source
from vector_files import RECORDED

NAMES = [module.name for module in pkgutil.iter_modules(package.__path__) if not module.ispkg]
FORMATS = {name: importlib.import_module(f"{package.__name__}.{name}") for name in NAMES}
FILES = [path for path in sorted(RECORDED.iterdir()) if path.suffix in (".bin", ".kv", ".model", ".npy")]


@pytest.mark.parametrize("name", NAMES)
def test_a_module_has_the_functions_of_a_format(name: str):
    assert isinstance(FORMATS[name].TITLE, str)
    for function in ("recognises", "open_vectors"):
        parameters = list(inspect.signature(getattr(Format, function)).parameters)[1:]
        assert list(inspect.signature(getattr(FORMATS[name], function)).parameters) == parameters


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_of_one_format(path: Path):
    source = Source(path)
    recognised = [name for name, module in FORMATS.items() if module.recognises(source.head, source)]
    assert len(recognised) == 1
    if path.suffix != ".npy":
        vectors = FORMATS[recognised[0]].open_vectors(source)
        missing = [name for name in vars(Vectors) if not name.startswith("_") and not hasattr(vectors, name)]
        assert not missing


def test_a_block_and_rows_have_no_faults_unless_said():
    rows = Rows(np.ones((1, 2), np.float32))
    block = Block([b"a"], np.array([0]), 1, lambda indexes: rows)
    assert (rows.faults, block.faults) == ((), ())
    assert block.rows(np.array([0])) is rows
    assert Fault("finite", 3, "nan") == ("finite", 3, "nan")


def test_doubles_are_rounded_to_single_precision():
    rows = rows_of(np.array([[0.1, 1 + 2**-24 + 2**-40], [16777217.0, -0.0]]))
    assert rows.matrix.dtype == np.float32
    assert rows.matrix.tolist() == [[float(np.float32(0.1)), 1 + 2**-23], [16777216.0, 0.0]]
    assert np.signbit(rows.matrix[1, 1])
    assert rows.faults == ()


def test_what_is_not_finite_in_single_precision_is_a_fault_behind_those_given():
    given = Fault("number", 0, "'x' is not a number")
    rows = rows_of(np.array([[0, 0], [1, np.nan], [1, 2], [-1e39, 0]]), (given,))
    assert rows.faults == (
        given,
        Fault("finite", 1, "number 2 of 2 is nan"),
        Fault("finite", 3, "number 1 of 2 is -inf"),
    )


def test_single_precision_is_kept_as_it_is():
    rows = rows_of(np.array([[1e5, np.nan]]))
    assert in_precision(rows, "float32") is rows


def test_what_is_too_large_for_half_precision_is_a_fault_once():
    rows = in_precision(rows_of(np.array([[65504.0], [65520.0], [np.inf]])), "float16")
    assert rows.faults == (
        Fault("finite", 2, "number 1 of 1 is inf"),
        Fault("finite", 1, "number 1 of 1 is inf in float16"),
    )
    assert rows.matrix.dtype == np.float32
    assert in_precision(Rows(np.ones((1, 1), np.float32)), "float16").faults == ()
