"""A GPU's record says "not known" with None, and refuses what it has no field for."""

import pytest
from pydantic import ValidationError

from plimsoll.records.device import DeviceSpec, Flops


def test_what_is_not_known_is_none():
    gpu = DeviceSpec(name="x", architecture=None, capacity_bytes=1, capacity_high_bytes=2, capacity_source="a label")
    assert gpu.flops == Flops()
    assert gpu.flops.fp8 is gpu.context_low_bytes is gpu.cublas_workspace_bytes is None
    assert gpu.kind == "cuda"


def test_an_unknown_field_is_refused():
    with pytest.raises(ValidationError):
        Flops(fp64=1.0)
