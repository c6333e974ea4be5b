"""Pooling: each mode by hand and as in sentence-transformers, and the mode of a folder or the reason for a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll.errors import JobError
from plimsoll.models.pooling import Pooling, pool, pooling_of

# Two texts, of three tokens and one. Masked values are large, so that a leak would be noticed.
HIDDEN_BTD = torch.tensor([[[1.0, 2.0], [3.0, -4.0], [5.0, 6.0]], [[7.0, 8.0], [99.0, 99.0], [99.0, 99.0]]])
MASK_BT = torch.tensor([[1, 1, 1], [1, 0, 0]])

BY_HAND = {
    "cls": [[1.0, 2.0], [7.0, 8.0]],
    "max": [[5.0, 6.0], [7.0, 8.0]],
    "mean": [[3.0, 4.0 / 3], [7.0, 8.0]],
    "mean_sqrt_len_tokens": [[9 / 3**0.5, 4 / 3**0.5], [7.0, 8.0]],
    "weightedmean": [[(1 + 6 + 15) / 6, (2 - 8 + 18) / 6], [7.0, 8.0]],
    "lasttoken": [[5.0, 6.0], [7.0, 8.0]],
}


@pytest.mark.parametrize("mode", BY_HAND)
def test_each_mode_by_hand(mode: str) -> None:
    torch.testing.assert_close(pool(HIDDEN_BTD, MASK_BT, Pooling((mode,))), torch.tensor(BY_HAND[mode]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("modes", [*((mode,) for mode in BY_HAND), ("cls", "mean"), ("mean", "mean_sqrt_len_tokens")])
def test_modes_are_those_of_sentence_transformers(modes: tuple[str, ...], dtype: torch.dtype) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    from sentence_transformers.sentence_transformer.modules import Pooling as Theirs

    assert sentence_transformers
    hidden = torch.randn(4, 9, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    mask = (torch.arange(9) < torch.tensor([9, 5, 1, 7])[:, None]).long()
    features = {"token_embeddings": hidden, "attention_mask": mask}
    theirs = Theirs(16, modes)(features)["sentence_embedding"].float()
    # Theirs are rounded to the dtype of the tokens; ours are left in float32.
    rounding = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-9}
    torch.testing.assert_close(pool(hidden, mask, Pooling(modes)), theirs, **rounding)


def test_normalized_vectors_have_length_one() -> None:
    pooled = pool(HIDDEN_BTD, MASK_BT, Pooling(("cls",), is_normalized=True))
    torch.testing.assert_close(pooled, torch.tensor([[1 / 5**0.5, 2 / 5**0.5], [7 / 113**0.5, 8 / 113**0.5]]))


def written(folder: Path, modules: Any, pooling: Any = None) -> Path:
    (folder / "modules.json").write_text(modules if isinstance(modules, str) else json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def modules(*names: str) -> list[dict[str, Any]]:
    return [
        {"idx": number, "path": f"{number}_{name}" if number else "", "type": f"sentence_transformers.models.{name}"}
        for number, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("names", "config", "expected"),
    [
        (("Transformer", "Pooling"), {}, Pooling(("mean",))),
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": True}, Pooling(("cls",))),
        (
            ("Transformer", "Pooling", "Normalize"),
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            Pooling(("cls", "mean"), is_normalized=True),
        ),
        (("Transformer", "Pooling"), {"pooling_mode": "lasttoken"}, Pooling(("lasttoken",))),
        (("Transformer", "Pooling"), {"pooling_mode": ["max", "mean"]}, Pooling(("max", "mean"))),
    ],
)
def test_a_folder_says_how_it_pools(
    tmp_path: Path, names: tuple[str, ...], config: dict[str, Any], expected: Pooling
) -> None:
    assert pooling_of(written(tmp_path, modules(*names), config)) == expected


def test_a_folder_that_does_not_say_pools_by_the_mean(tmp_path: Path) -> None:
    assert pooling_of(tmp_path) == Pooling(("mean",))


@pytest.mark.parametrize(
    ("found", "config", "said"),
    [
        (modules("Transformer", "Pooling", "Dense"), {}, "Transformer, Pooling, Dense"),
        (modules("WordEmbeddings", "Pooling"), {}, "WordEmbeddings, Pooling"),
        ([], None, "lists"),
        ("{", None, "cannot be read"),
        ({"a": 1}, None, "is not a list of modules"),
        (modules("Transformer", "Pooling"), {"pooling_mode": "median"}, "'median'"),
        (modules("Transformer", "Pooling"), [1], "is not a JSON object"),
        (modules("Transformer", "Pooling"), None, "cannot be read"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(tmp_path: Path, found: Any, config: Any, said: str) -> None:
    with pytest.raises(JobError, match=said):
        pooling_of(written(tmp_path, found, config))
