"""Rows of arguments and results, however nested."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from plimsoll.techniques.mechanisms.rows import Arguments, row_leaves, single_values, with_rows

IDS = torch.arange(12).view(4, 3)


def test_the_rows_of_a_call_are_those_of_most_tensors():
    assert Arguments((IDS,), {"mask": IDS, "positions": torch.arange(3)[None]}).num_rows == 4
    assert Arguments(({"ids": IDS, "prompt": "query: "},), {}).num_rows == 4
    assert Arguments((["a", "b"],), {"flag": True}).num_rows == 2
    assert Arguments((torch.tensor(3), "a"), {}).num_rows is None


def test_what_cannot_be_cut():
    packed = nn.utils.rnn.pack_sequence([torch.arange(3), torch.arange(2)])
    assert Arguments((packed,), {}).num_rows is None
    assert Arguments((IDS,), {"cache": object()}).num_rows is None
    assert Arguments((IDS.to_sparse(),), {}).num_rows is None


def test_rows_are_picked_and_the_rest_is_for_all():
    encoding = BatchEncoding({"ids": IDS, "table": torch.arange(3)})
    arguments = Arguments((encoding, ["a", "b", "c", "d"]), {"number": np.arange(4), "deep": [(IDS, None)], "k": 2})
    (picked, texts), kwargs = arguments.picked([2, 0])
    assert type(picked) is BatchEncoding
    assert picked["ids"].tolist() == [[6, 7, 8], [0, 1, 2]]
    assert picked["table"].tolist() == [0, 1, 2]
    assert texts == ["c", "a"]
    assert kwargs["number"].tolist() == [2, 0]
    assert kwargs["deep"][0][0].shape == (2, 3)
    assert (kwargs["deep"][0][1], kwargs["k"]) == (None, 2)
    assert encoding["ids"] is IDS, "what was given is as it was"


def test_results_are_rows_or_none():
    output = BaseModelOutput(last_hidden_state=IDS.float(), hidden_states=(IDS.float(), IDS.float()))
    assert [leaf.shape for leaf in row_leaves(output, 4)] == [(4, 3)] * 3
    assert row_leaves(output, 3) is None
    assert row_leaves((IDS, IDS.float().mean()), 4) is None
    assert row_leaves({"rows": IDS, "what": object()}, 4) is None
    assert row_leaves([None, 3], 4) is None
    assert single_values({"rows": IDS, "n": 3, "text": "a"}) == [3, "a"]


def test_results_keep_their_form():
    output = BaseModelOutput(last_hidden_state=IDS[:2], hidden_states=(IDS[:2],))
    whole = with_rows(output, iter([IDS, IDS + 1]))
    assert type(whole) is BaseModelOutput
    assert whole.last_hidden_state is IDS
    assert whole.hidden_states[0].tolist() == (IDS + 1).tolist()
