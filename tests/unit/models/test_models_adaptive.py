"""An adaptive softmax: equal to torch's for every cut, and a prediction that holds for every text."""

import pytest
import torch
from torch.nn import functional

from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.models import adaptive
from plimsoll.models.adaptive import adaptive_head, adaptive_loss, cutoffs_fault, default_cutoffs, log_probabilities
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.models.workload import model_loss
from plimsoll.planning.dry_run.step import dry_run_step
from plimsoll.records.plan import micro_batch_choice
from workloads import largest_relative_difference

HIDDEN, WORDS, CUTOFFS = 16, 300, (20, 100)


def made():
    torch.manual_seed(0)
    head = adaptive_head(HIDDEN, WORDS, CUTOFFS, 4.0)
    hidden_BTH = torch.randn(4, 9, HIDDEN, requires_grad=True)
    labels_BT = torch.randint(0, WORDS, (4, 9))
    labels_BT[1, 3:] = -100
    return head, hidden_BTH, labels_BT


def gradients(head, hidden_BTH, loss):
    wanted = {"hidden": hidden_BTH, **dict(head.named_parameters())}
    return dict(zip(wanted, torch.autograd.grad(loss, wanted.values()), strict=True))


@pytest.mark.parametrize("most_outputs", [1, 700, 1 << 22], ids=["a row at a time", "some rows", "all rows"])
def test_loss_and_gradients_are_those_of_torchs_own_class(most_outputs, monkeypatch):
    monkeypatch.setattr(adaptive, "MOST_OUTPUTS", most_outputs)
    head, hidden_BTH, labels_BT = made()
    is_label = labels_BT != -100
    torchs = head(hidden_BTH[is_label], labels_BT[is_label]).loss
    loss = adaptive_loss(head, hidden_BTH, labels_BT, "mean")
    total = adaptive_loss(head, hidden_BTH, labels_BT, "sum")
    torch.testing.assert_close(total, is_label.sum() * loss)
    torch.testing.assert_close(loss, torchs)
    expected, found = gradients(head, hidden_BTH, torchs), gradients(head, hidden_BTH, loss)
    assert largest_relative_difference(expected, found) < 1e-5


def test_log_probabilities_are_of_all_words_and_have_the_same_loss():
    head, hidden_BTH, labels_BT = made()
    logits_BTV = log_probabilities(head, hidden_BTH)
    assert logits_BTV.shape == (4, 9, WORDS)
    torch.testing.assert_close(logits_BTV.exp().sum(-1), torch.ones(4, 9))
    by_hand = functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())
    torch.testing.assert_close(adaptive_loss(head, hidden_BTH, labels_BT, "mean"), by_hand)


def test_a_batch_of_frequent_words_has_gradients_of_zeros_for_the_others():
    head, hidden_BTH, labels_BT = made()
    found = gradients(head, hidden_BTH, adaptive_loss(head, hidden_BTH, labels_BT.clamp(max=CUTOFFS[0] - 1), "mean"))
    assert all(found[f"tail.{cluster}.{layer}.weight"].eq(0).all() for cluster in (0, 1) for layer in (0, 1))
    assert found["head.weight"].ne(0).any()


def test_a_batch_without_labels_has_no_mean():
    head, hidden_BTH, labels_BT = made()
    assert adaptive_loss(head, hidden_BTH, torch.full_like(labels_BT, -100), "mean").isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_losses_are_added_up_in_fp32_or_better(dtype):
    head, hidden_BTH, labels_BT = made()
    expected = adaptive_loss(head, hidden_BTH, labels_BT, "mean")
    if dtype == torch.float64:
        loss = adaptive_loss(head.double(), hidden_BTH.double(), labels_BT, "mean")
    else:
        with torch.autocast("cpu", dtype=dtype):
            loss = adaptive_loss(head, hidden_BTH, labels_BT, "mean")
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3 if dtype == torch.bfloat16 else 1e-6)


def test_a_word_beyond_the_vocabulary_is_refused():
    head, hidden_BTH, labels_BT = made()
    with pytest.raises(IndexError):
        adaptive_loss(head, hidden_BTH, labels_BT + WORDS, "mean")


@pytest.mark.parametrize(
    ("cutoffs", "fault"),
    [
        ((20, 100), None),
        ((299,), None),
        ((), "cutoffs are none: give one or more"),
        ((100, 20), "cutoffs are 100, 20: give one or more"),
        ((20, 20), "cutoffs are 20, 20: give one or more"),
        ((0, 20), "cutoffs are 0, 20: give one or more"),
        ((20, 300), "cutoffs are 20, 300, but the vocabulary has 300 words: give smaller ones"),
        ((1, 2, 3), "3 clusters with 4 times fewer features each leave no feature of 16 for the last"),
    ],
)
def test_clusters_that_are_none_are_named(cutoffs, fault):
    found = cutoffs_fault(cutoffs, WORDS, HIDDEN, 4.0)
    assert found is None if fault is None else found.startswith(fault)


@pytest.mark.parametrize("vocab_size", [8, 1024, 50_257])
def test_clusters_by_default_are_some(vocab_size):
    assert cutoffs_fault(default_cutoffs(vocab_size), vocab_size, 64, 4.0) is None


# -- what is predicted -------------------------------------------------------------------------------------------------


def peaks(labels_BT):
    """Return the predicted trace and the measured peak of live tensors in the second step."""
    torch.manual_seed(0)
    fields = {"architecture": "lstm", "vocab_size": 3000, "embedding_size": 8, "hidden_size": 64}
    model = build_recurrent(fields | {"adaptive_cutoffs": [100, 500]})
    batch = {"input_ids": labels_BT.clamp(min=0), "labels": labels_BT}

    def optimizer():
        return torch.optim.SGD(model.parameters(), lr=0.1)

    shape = {"units": "next-tokens", "choices": (micro_batch_choice(len(labels_BT)),), "clip_norm": None}
    trace = dry_run_step(model, optimizer(), batch, model_loss, CpuLowering(), precision="fp32", **shape)
    recorder = Recorder()
    with recorder:
        recorder.know_model(model)
        recorder.know(batch.items(), "inputs")
        for _ in range(2):
            model_loss(model, batch).backward()
            model.zero_grad()
    return trace, live_bytes(recorder.trace("measured", "cpu")).peak_bytes


@pytest.mark.parametrize("first", [0, 100, 500], ids=["frequent", "rare", "rarest"])
def test_a_prediction_holds_for_texts_of_any_words(first, monkeypatch):
    """The batch of the prediction may have other words than later batches: the prediction is equal for all."""
    monkeypatch.setattr(adaptive, "MOST_OUTPUTS", 200 * 2500)
    end = {0: 100, 100: 500, 500: 3000}[first]
    generator = torch.Generator().manual_seed(0)
    trace, measured_bytes = peaks(torch.randint(first, end, (8, 64), generator=generator))
    frequent, _ = peaks(torch.zeros(8, 64, dtype=torch.long))
    predicted_bytes = live_bytes(trace).peak_bytes
    assert predicted_bytes == live_bytes(frequent).peak_bytes
    assert measured_bytes <= predicted_bytes
    # 512 rows of 3000 words at once, as plain logits are, would be 5.9 MiB, and twice that with log-probabilities.
    assert predicted_bytes < measured_bytes + 3 * 4 * 200 * 2500
    assert any("nonzero" in one.text for one in trace.assumptions)
