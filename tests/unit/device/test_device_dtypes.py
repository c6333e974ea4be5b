"""Types of weights by their usual names; other names are refused, and never taken for another type."""

import pytest
import torch

from plimsoll.device.dtypes import NAMED, floating_type
from plimsoll.errors import EmbeddingError, InputError


@pytest.mark.parametrize("name", NAMED)
def test_short_names_torchs_names_and_types_are_the_same(name):
    dtype = NAMED[name]
    own = str(dtype)
    assert [floating_type(given) for given in (name, own, own.removeprefix("torch."), dtype)] == [dtype] * 4


@pytest.mark.parametrize("given", ["fp33", "", "int8", "torch", "FP32", "auto", torch.int64, 16, torch.float])
def test_what_is_none_is_refused(given):
    if given is torch.float:
        assert floating_type(given) is torch.float32
        return
    with pytest.raises(EmbeddingError, match="is not a floating-point type: give fp32, bf16"):
        floating_type(given, EmbeddingError)
    assert issubclass(EmbeddingError, InputError)
