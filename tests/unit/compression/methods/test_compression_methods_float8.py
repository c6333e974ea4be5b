"""The method float8: float8 arithmetic needs a GPU that supports it. The tests of int8 cover the shared behaviour."""

import pytest
import torch

from quantized_models import made


def test_multiplying_in_float8_needs_a_gpu_for_it():
    from plimsoll.compression.methods import SHRINKERS, Bundle
    from quantized_models import choice_of

    bundle, choice = Bundle(made("bert")), choice_of("float8", dynamic=True)
    if torch.cuda.is_available():
        pytest.skip("there may be a GPU for it")
    assert "needs a GPU of compute capability 8.9 or more" in SHRINKERS["float8"].refusal(bundle, choice)
    assert SHRINKERS["float8"].choices(bundle) == SHRINKERS["float8"].refusal(bundle, choice)
