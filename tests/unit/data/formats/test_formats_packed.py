"""The store of converted texts: reading finds the same texts for any cut."""

import json
from pathlib import Path

import numpy as np
import pytest

from corpora import written
from plimsoll.data.formats import Labels, Layout, Part, packed


@pytest.mark.parametrize("part_bytes", [8, 16, 64])
def test_texts_are_found_in_every_part(tmp_path: Path, part_bytes: int):
    texts = ["one", "and a longer one \u20ac", "x", "y", "the last"]
    raws = [text.encode() for text in texts]
    path = written(tmp_path / packed.TEXTS_FILE, b"".join(raws))
    np.cumsum([len(raw) for raw in raws]).tofile(tmp_path / packed.ENDS_FILE)
    np.array([0, 1, 0, 1, 1], np.uint32).tofile(tmp_path / packed.CODES_FILE)
    (tmp_path / packed.NAMES_FILE).write_text(json.dumps(["no", "yes"]))
    num_bytes = sum(map(len, raws))
    layout = Layout("packed", label="y")
    found = [
        packed.scan(Part(str(path), begin, min(begin + part_bytes, num_bytes), num_bytes, layout, 100))
        for begin in range(0, num_bytes, part_bytes)
    ]
    starts = np.concatenate([part.starts for part in found])
    assert starts.tolist() == np.cumsum([0, *map(len, raws[:-1])]).tolist()
    labels = [part.labels for part in found]
    assert all(isinstance(label, Labels) and label.names == ["no", "yes"] for label in labels)
    assert np.concatenate([label.codes for label in labels]).tolist() == [0, 1, 0, 1, 1]
    borders = np.append(starts, num_bytes)
    assert packed.decode_run(b"".join(raws), borders, layout) == packed.decode(raws, layout) == texts
