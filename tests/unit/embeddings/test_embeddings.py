"""The names of the package, which are imported on first use."""

import json
import subprocess
import sys

import pytest

from plimsoll import embeddings
from plimsoll.embeddings.inspect import look_at
from plimsoll.embeddings.subsets import take_subset
from processes import environment

NAMES = [
    *("FactorizedEmbedding", "HostEmbedding", "ProductQuantizedEmbedding", "Subset", "convert", "info", "load"),
    *("low_rank", "optimizer_of", "product_quantized", "subset", "tied_output"),
]


def test_these_are_the_public_names():
    assert sorted(embeddings.__all__) == sorted(dir(embeddings)) == NAMES
    assert all(getattr(embeddings, name) is not None for name in NAMES)


def test_a_name_is_what_its_module_defines():
    assert embeddings.subset is take_subset
    assert embeddings.info is look_at


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'plimsoll.embeddings' has no attribute 'take'"):
        embeddings.take


def test_a_subset_is_taken_without_torch(tmp_path):
    (tmp_path / "x").write_bytes(b"the 1 2\nof 3 4\n")
    code = (
        "import json, sys; from plimsoll import embeddings;"
        "found = embeddings.subset(sys.argv[1], ['of', 'the']); embeddings.info(sys.argv[1]);"
        "print(json.dumps([found.rows.tolist(), sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules))]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x")], env=environment(), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [[[3, 4], [1, 2]], []]
