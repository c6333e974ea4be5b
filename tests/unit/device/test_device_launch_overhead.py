"""The cost of op calls is measured on a real model. On the CPU, backward calls its ops in this thread."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.device import launch_overhead
from plimsoll.device.launch_overhead import measure_launches


def test_a_call_from_python_costs_no_less_than_one_by_autograd():
    found = measure_launches("cpu")
    assert found.module_op_seconds >= found.backward_op_seconds > 0


def test_random_numbers_and_the_gradient_mode_are_as_before():
    state = torch.get_rng_state()
    with torch.no_grad():
        measure_launches("cpu")
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)


class _Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func)
        return func(*args, **(kwargs or {}))


def test_casts_are_counted_apart_and_views_in_part():
    model = launch_overhead._tiny_model("cpu")
    with _Names() as seen:
        launch_overhead._forward(model)
    num_casts = seen.names.count(torch.ops.aten._to_copy.default)
    num_views = sum(name.is_view for name in seen.names)
    called, cast, by_autograd = launch_overhead._count_ops(model)
    assert cast == num_casts > 0
    assert abs(called - (len(seen.names) - num_casts - num_views + launch_overhead.VIEW_SHARE * num_views)) < 1e-6
    assert by_autograd > called  # two gradients for each product
