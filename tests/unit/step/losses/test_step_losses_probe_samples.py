import pytest
import torch

from plimsoll.step.losses.probe_samples import (
    MOST_FILLERS,
    MOST_VALUES,
    Kinds,
    first_rows,
    joined_samples,
    telling_rows,
)


def seen_of(batch):
    kinds = Kinds()
    kinds.note(kinds.new_in(batch))
    return kinds


def test_of_a_small_batch_all_samples_are_taken():
    assert telling_rows({"x": torch.zeros(5, 2)}, 8) == [0, 1, 2, 3, 4]


def test_a_rare_label_is_among_them_and_each_label_twice():
    labels = torch.zeros(64, dtype=torch.long)
    labels[[17, 40]] = 1
    rows = telling_rows({"ids": torch.randint(9, (64, 5)), "labels": labels}, 8)
    assert len(set(rows)) == 8
    assert labels[rows].tolist().count(1) == 2


def test_of_more_labels_than_half_of_the_samples_two_of_one_label_are_taken():
    labels = torch.cat([torch.arange(20), torch.arange(12)])
    ids = torch.randint(9, (32, 5), generator=torch.Generator().manual_seed(0))
    rows = telling_rows({"ids": ids, "labels": labels}, 8)
    assert len(set(labels[rows].tolist())) < 8


def test_samples_of_all_lengths_are_among_them():
    lengths = torch.tensor([8] * 30 + [1, 5])
    mask = (torch.arange(8) < lengths[:, None]).long()
    rows = telling_rows({"attention_mask": mask, "labels": torch.full((32, 8), 3).masked_fill(mask == 0, -100)}, 8)
    assert {30, 31} <= set(rows)


def test_another_kind_of_batch_has_other_fields_labels_or_padding():
    plain = {"ids": torch.ones(4, 3, dtype=torch.long), "label": torch.tensor([0, 1, 1, 0])}
    kinds = seen_of(plain)
    assert not kinds.new_in({name: value.flip(0) for name, value in plain.items()})
    padded = plain["ids"].clone()
    padded[0, 2] = 0
    ignored = plain["ids"].clone()
    ignored[0, 2] = -100
    others = (
        plain | {"label": torch.tensor([0, 2, 1, 0])}, plain | {"ids": padded}, plain | {"ids": ignored},
        plain | {"weight": torch.ones(4)}, plain | {"ids": plain["ids"].float()},
    )  # fmt: skip
    assert all(kinds.new_in(other) for other in others)


@pytest.mark.parametrize("padding", [0, 1, 7, -1, 50_256, 0.5])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_another_kind_whatever_it_is_and_even_padding_is_not(padding, side):
    draws = torch.Generator().manual_seed(0)
    whole = torch.randint(100, 40_000, (16, 12), generator=draws)
    whole = whole.float() if isinstance(padding, float) else whole
    columns = torch.arange(12) if side == "left" else torch.arange(12).flip(0)
    uneven, even = whole.clone(), whole.clone()
    uneven[3, columns < 4] = padding
    uneven[5, columns < 2] = padding
    even[:, columns < 3] = padding
    kinds = seen_of({"ids": whole})
    assert kinds.new_in({"ids": uneven}) == {("ids", "uneven", padding)}
    assert not kinds.new_in({"ids": even})
    kinds.note(kinds.new_in({"ids": uneven}))
    assert not kinds.new_in({"ids": uneven.flip(0)})


def test_labels_of_any_number_of_dimensions_are_kinds_until_they_are_a_vocabulary():
    draws = torch.Generator().manual_seed(0)
    tags = torch.randint(5, (16, 4, 3), generator=draws)
    kinds = seen_of({"tags": tags})
    assert kinds.new_in({"tags": tags.index_fill(2, torch.tensor([1]), 9)}) >= {("tags", 9)}
    every = Kinds()
    for _ in range(200):
        batch = {"ids": torch.randint(300, (4, 4), generator=draws)}
        every.note(every.new_in(batch))
    assert len(every._seen) <= MOST_VALUES + 2 * MOST_FILLERS


def test_a_label_is_new_until_a_sample_of_it_was_compared():
    batch = {"tags": torch.tensor([[0, 0], [0, 1], [2, 0]])}
    kinds = Kinds()
    new = kinds.new_in(batch)
    assert [first_rows(batch, new, most) for most in (1, 3)] == [[1], [1, 2]]
    kinds.note(new, {"tags": batch["tags"][:2]})
    assert kinds.new_in(batch) == {("tags", 2)}
    kinds.note(kinds.new_in(batch), {"tags": batch["tags"][:1]}, is_own=False)  # of another rank
    assert kinds.new_in(batch) == {("tags", 2)}
    kinds.note(kinds.new_in(batch), {"tags": batch["tags"][:1]})  # it has nothing to learn, for example
    assert not kinds.new_in(batch)


def test_samples_of_several_batches_are_one_batch_where_their_fields_are_alike():
    one, other = {"x": torch.ones(1, 3), "labels": torch.zeros(1)}, {"x": torch.zeros(1, 3), "labels": torch.ones(1)}
    joined = joined_samples([one, other])
    assert joined["x"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert joined["labels"].tolist() == [0, 1]
    longer = {"x": torch.zeros(1, 4), "labels": torch.ones(1)}
    assert [joined_samples([one, bad]) for bad in (longer, {"x": one["x"]}, one | {"labels": ["a"]})] == [None] * 3


@pytest.mark.parametrize("number", range(5))
def test_a_sample_of_a_rare_label_is_among_them_however_it_is_written(number):
    labels = torch.randint(0, 3, (32,), generator=torch.Generator().manual_seed(0)) * 2
    labels[27] = 3  # between the others
    column = labels[:, None]
    several = (column == torch.arange(5)).float()
    fields = [labels, column, several, labels.tolist(), [f"of {label}" for label in labels.tolist()]]
    x = torch.randn(32, 12, generator=torch.Generator().manual_seed(1))
    assert 27 in telling_rows({"x": x, "of": fields[number]}, 8)


def test_names_are_labels_and_numbers_that_no_tensor_has_are_none():
    assert seen_of({"of": ["a", "b", "a"]}).new_in({"of": ["a", "c", "a"]}) == {("of", "c")}
    assert telling_rows({"of": [1 << 80] * 12}, 8)
