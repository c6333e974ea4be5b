"""What every format offers: a module of this folder is one, and a file is of one format only."""

import importlib
import inspect
import pkgutil
from pathlib import Path

import numpy as np
import pytest

import plimsoll.embeddings.formats as package
from plimsoll.embeddings.formats import Block, Fault, Format, Rows, Vectors
from plimsoll.embeddings.formats._sources import Source
from vector_files import RECORDED

NAMES = [module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")]
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
