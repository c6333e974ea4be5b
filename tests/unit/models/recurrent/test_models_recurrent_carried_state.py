"""The carried state: a cut stream equals the whole one, a window can be read again, evaluation has its own state."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from plimsoll.errors import InputError
from plimsoll.models.names import RECURRENT
from plimsoll.models.recurrent.carried_state import CarriedState, run_with_resets
from plimsoll.models.recurrent.model import RecurrentLanguageModel, build_recurrent, load_recurrent, save_recurrent

NUM_SLOTS, NUM_TOKENS, VOCABULARY = 3, 13, 11
CUTS = (0, 4, 8, 12)  # windows share their edges; 12 tokens are read


def build(architecture: str = "lstm", **fields: object) -> RecurrentLanguageModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "embedding_size": 4, "hidden_size": 5, "num_layers": 2}
    model = build_recurrent({"architecture": architecture, **sizes, **fields})
    assert isinstance(model, RecurrentLanguageModel)
    model.carry(NUM_SLOTS)
    return model


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (NUM_SLOTS, NUM_TOKENS), generator=torch.Generator().manual_seed(1))


def window(tokens: torch.Tensor, number: int, slots: slice = slice(None)) -> dict[str, torch.Tensor]:
    begin, end = list(pairwise(CUTS))[number]
    ids = tokens[slots, begin : end + 1]
    return {
        "input_ids": ids,
        "labels": ids,
        "slots": torch.arange(NUM_SLOTS)[slots],
        "windows": torch.full((len(ids),), number),
    }


def through(model: RecurrentLanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(**window(tokens, number)).logits for number in range(3)], dim=1)


@pytest.mark.parametrize("architecture", RECURRENT)
def test_windows_one_after_the_other_are_the_whole_stream(architecture, tokens):
    model = build(architecture)
    whole = model(input_ids=tokens).logits[:, :-1]
    torch.testing.assert_close(through(model, tokens), whole, rtol=0, atol=1e-6)
    again = through(model, tokens)  # a new epoch begins from zeros
    torch.testing.assert_close(again, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", RECURRENT)
def test_the_state_is_detached_and_its_loss_is_that_of_what_follows(architecture, tokens):
    model = build(architecture)
    model(**window(tokens, 0))
    output = model(**window(tokens, 1))
    by_hand = nn.functional.cross_entropy(output.logits.flatten(0, 1), tokens[:, 5:9].flatten())
    assert torch.equal(output.loss, by_hand)
    model.embedding.weight.grad = None
    output.loss.backward()
    read = set(tokens[:, 4:8].flatten().tolist())
    assert set(model.embedding.weight.grad.abs().sum(1).nonzero().flatten().tolist()) <= read
    assert not any(buffer.requires_grad for buffer in model.buffers())


@pytest.mark.parametrize("architecture", RECURRENT)
def test_a_window_can_be_read_again_whole_or_in_pieces(architecture, tokens):
    """A step that is undone needs this, although no state is restored."""
    model = build(architecture)
    model(**window(tokens, 0))
    first = model(**window(tokens, 1)).logits
    assert torch.equal(model(**window(tokens, 1)).logits, first)
    pieces = [model(**window(tokens, 1, slice(begin, begin + 2))).logits for begin in (0, 2)]
    torch.testing.assert_close(torch.cat(pieces), first, rtol=0, atol=1e-6)
    after_pieces = model(**window(tokens, 2)).logits
    torch.testing.assert_close(after_pieces, model(input_ids=tokens).logits[:, 8:12], rtol=0, atol=1e-6)


def test_an_evaluation_begins_from_zeros_and_leaves_the_state_of_training(tokens):
    model = build()
    model(**window(tokens, 0))
    expected = model(**window(tokens, 1)).logits
    model(**window(tokens, 0))
    before = model.carried.training_state.clone()
    model.eval()
    with torch.no_grad():
        evaluated = through(model, tokens.flip(1))
    torch.testing.assert_close(evaluated, model(input_ids=tokens.flip(1)).logits[:, :-1], rtol=0, atol=1e-6)
    model.train()
    assert torch.equal(model.carried.training_state, before)
    assert torch.equal(model(**window(tokens, 1)).logits, expected)


def test_checkpoints_hold_the_state_of_training_and_saved_models_none(tokens, tmp_path):
    model = build()
    model(**window(tokens, 0))
    expected = model(**window(tokens, 1)).logits
    model(**window(tokens, 0))
    other = build()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(**window(tokens, 1)).logits, expected)
    assert {name for name in model.state_dict() if "carried" in name} == {"carried.training_state"}
    save_recurrent(model, tmp_path)
    assert torch.equal(load_recurrent(tmp_path)(input_ids=tokens).logits, model(input_ids=tokens).logits)
    assert model.carried is not None


@pytest.mark.parametrize("architecture", RECURRENT)
def test_after_a_reset_nothing_before_it_is_known_and_no_gradient_goes_there(architecture, tokens):
    model = build(architecture)
    resets = torch.zeros(NUM_SLOTS, 5, dtype=torch.bool)
    resets[0, 2] = resets[1, 0] = resets[1, 3] = resets[2, 4] = True  # the last token is not read
    model(**window(tokens, 0))
    model.carried.training_state[1, 1] = float("nan")  # a state that is reset may have any value
    output = model(**window(tokens, 1), resets=resets)
    for slot, begins in ((0, [2]), (1, [0, 3])):
        for begin, end in pairwise([*begins, 4]):
            alone = model(input_ids=tokens[slot : slot + 1, 4 + begin : 4 + end]).logits
            torch.testing.assert_close(output.logits[slot : slot + 1, begin:end], alone, rtol=0, atol=1e-6)
    whole = model(input_ids=tokens).logits
    torch.testing.assert_close(output.logits[2], whole[2, 4:8], rtol=0, atol=1e-6)
    torch.testing.assert_close(output.logits[0, :2], whole[0, 4:6], rtol=0, atol=1e-6)
    model.embedding.weight.grad = None
    embedded = model.embedding(tokens[:, 4:8]).detach().requires_grad_()
    state = model.carried.state(torch.arange(NUM_SLOTS), torch.zeros(NUM_SLOTS, dtype=torch.long))
    hidden, _ = run_with_resets(model.recurrent, embedded, state, resets[:, :-1])
    hidden[0, 2:].sum().backward()
    assert not embedded.grad[0, :2].any()
    assert embedded.grad[0, 2:].any()


def test_without_resets_nothing_is_cut():
    model = build("gru")
    embedded = torch.randn(NUM_SLOTS, 6, 4)
    state = torch.zeros(2, NUM_SLOTS, 5)
    none = torch.zeros(NUM_SLOTS, 6, dtype=torch.bool)
    for resets in (None, none):
        hidden, last = run_with_resets(model.recurrent, embedded, state, resets)
        assert torch.equal(hidden, model.recurrent(embedded, state)[0])
        assert torch.equal(last, model.recurrent(embedded, state)[1])


def test_a_state_is_of_the_dtype_of_its_layers_and_takes_others():
    carried = CarriedState(nn.GRU(3, 4).double(), 2)
    slots, windows = torch.arange(2), torch.zeros(2, dtype=torch.long)
    carried.put(slots, windows, torch.ones(1, 2, 4, dtype=torch.bfloat16))
    assert torch.equal(carried.state(slots, windows + 1), torch.ones(1, 2, 4, dtype=torch.float64))


def test_a_model_that_keeps_no_state_refuses_windows_of_streams(tokens):
    model = build()
    model.carried = None
    with pytest.raises(
        InputError, match=r"continues 3 streams of text, but the model keeps no state.*: call model\.carry"
    ):
        model(**window(tokens, 0))


@pytest.mark.parametrize("num_slots", [0, -3])
def test_zero_stream_slots_are_refused(num_slots):
    with pytest.raises(
        InputError, match=f"the state of {num_slots} stream slots: give the samples of a batch, at least 1"
    ):
        build().carry(num_slots)


def test_a_batch_of_more_stream_slots_than_are_carried_is_refused(tokens):
    model = build()
    model.carry(2)
    with pytest.raises(InputError, match=r"has 3 samples, .* state of 2 stream slots: call `model\.carry\(3\)`"):
        model(**window(tokens, 0))
