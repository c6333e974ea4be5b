"""Continuations: greedy ones equal transformers', and draws have the right distribution and depend on their row."""

from __future__ import annotations

import pytest
import torch

from plimsoll.models.generation import Continuation, Generation, _continuation, _Draws, _likeliest, generate


def gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()


PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


def padded_left() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[0] * (4 - len(prompt)) + prompt for prompt in PROMPTS])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def one_by_one(model: torch.nn.Module, options: Generation) -> list[Continuation]:
    return [
        generate(
            model,  # type: ignore[arg-type]
            {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)},
            [row],
            options,
            0,
        )[0]
        for row, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("options", [Generation(10), Generation(10, temperature=1.0), Generation(10, 0.7, 0.5, 3)])
def test_prompts_go_on_as_they_do_alone(options: Generation) -> None:
    model = gpt2()
    with torch.inference_mode():
        together = generate(model, padded_left(), [0, 1, 2], options, 0)  # type: ignore[arg-type]
        assert together == one_by_one(model, options)


def test_greedy_is_that_of_transformers() -> None:
    model = gpt2()
    whole = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=10, do_sample=False, pad_token_id=0)  # type: ignore[operator]
    new = whole[0, 3:].tolist()
    assert one_by_one(model, Generation(10))[0].ids == (new[: new.index(2)] if 2 in new else new)


def test_a_continuation_ends_before_its_end_token() -> None:
    assert _continuation([4, 5, 2, 0, 0], {2, 3}) == Continuation([4, 5], True)
    assert _continuation([4, 5], {2, 3}) == Continuation([4, 5], False)
    assert _continuation([4, 2], set()) == Continuation([4, 2], False)


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    """20,000 rows draw one of four tokens: each share is within four standard deviations of its probability."""
    probabilities, num_draws = torch.tensor([0.5, 0.3, 0.15, 0.05]), 20_000
    draws = _Draws(range(num_draws), Generation(1, temperature=1.0, seed=5), num_prompt_tokens=1)
    scores = draws(torch.zeros((num_draws, 1), dtype=torch.long), probabilities.log().expand(num_draws, 4))
    shares = torch.bincount(scores.argmax(dim=-1), minlength=4) / num_draws
    deviations = (probabilities * (1 - probabilities) / num_draws).sqrt()
    assert ((shares - probabilities).abs() < 4 * deviations).all()


def test_the_least_likely_are_left_out() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]]).log()
    kept = _likeliest(scores, 0.75).isfinite()
    # 0.5 is less than 0.75, with 0.3 it is enough; 0.4 and 0.3 are less, with 0.2 they are enough.
    assert kept.tolist() == [[True, True, False, False], [False, True, True, True]]
    assert _likeliest(scores, 0.01).isfinite().sum(dim=-1).tolist() == [1, 1]
    assert torch.equal(_likeliest(scores, 1.0), scores)


def test_another_seed_row_or_place_draws_anew() -> None:
    def drawn(seed: int, row: int, place: int) -> torch.Tensor:
        draws = _Draws([row], Generation(9, temperature=1.0, seed=seed), num_prompt_tokens=2)
        return draws(torch.zeros((1, 2 + place), dtype=torch.long), torch.zeros(1, 8))

    assert torch.equal(drawn(1, 2, 3), drawn(1, 2, 3))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(drawn(1, 2, 3), drawn(*other))
