"""Return values of passes, joined as if the whole batch had returned them."""

import pytest
import torch
import torchmetrics

from plimsoll.integrations.loops.lightning_logs import joined_values, mean, remember


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([torch.tensor(1.0), torch.tensor(4.0)], 2.0),
        ([torch.tensor([1, 2]), torch.tensor([3])], [1, 2, 3]),
        ([torch.zeros(5), torch.ones(5)], [1.0] * 5),  # not one row per sample
        ([None, None], None),
        ([1], 1),
    ],
)
def test_what_passes_returned(values, expected):
    found = joined_values(values, [2.0, 1.0], [2, 1])
    assert (found.tolist() if isinstance(found, torch.Tensor) else found) == expected


def test_each_value_of_a_mapping_is_joined():
    found = joined_values([{"a": torch.tensor([1, 2]), "b": "x"}, {"a": torch.tensor([3]), "b": "y"}], [2, 1], [2, 1])
    assert (found["a"].tolist(), found["b"]) == ([1, 2, 3], "y")


def test_a_mean_is_by_shares():
    assert mean([torch.tensor(1.0), torch.tensor(4.0)], [0.5, 0.25]).item() == 2.0


def test_metrics_and_results_are_put_back_as_often_as_asked():
    metric, results = torchmetrics.MeanMetric(), {}
    metric.update(1.0)
    put_back = remember(results, [metric])
    for _ in range(2):
        metric.update(5.0)
        results["new"] = metric
        put_back()
        assert not results
        assert metric.compute() == 1.0
