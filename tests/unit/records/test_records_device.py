"""A budget is a number of bytes for any notation; unknown facts about a GPU are None."""

import pytest
from pydantic import ValidationError

from plimsoll.records.device import Budget, DeviceSpec, Flops


def test_a_budget_may_be_written_as_text():
    budget = Budget.model_validate({"device_bytes": "2GiB", "host_bytes": 4096})
    assert (budget.device_bytes, budget.host_bytes) == (2 * 1024**3, 4096)


def test_a_budget_that_is_not_given_is_what_the_machine_has():
    assert Budget() == Budget(device_bytes=None, host_bytes=None)


@pytest.mark.parametrize("size", [0, -1, "2 apples"])
def test_a_budget_of_no_bytes_is_refused(size: int | str):
    with pytest.raises(ValidationError, match="for example 2GiB"):
        Budget.model_validate({"device_bytes": size})


def test_what_is_not_known_is_none():
    gpu = DeviceSpec(name="x", architecture=None, capacity_bytes=1, capacity_high_bytes=2, capacity_source="a label")
    assert gpu.flops == Flops()
    assert gpu.flops.fp8 is gpu.context_low_bytes is gpu.cublas_workspace_bytes is None
    assert gpu.kind == "cuda"


def test_an_unknown_field_is_refused():
    with pytest.raises(ValidationError):
        Flops(fp64=1.0)
