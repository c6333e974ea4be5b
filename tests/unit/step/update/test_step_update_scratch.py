"""Copies made together: the addresses of tensors, when they are looked up again, and the memory that is kept."""

import torch

from plimsoll.step.update.scratch import Layout, Scratch

KEY = (torch.float32, torch.device("cpu"))


def test_tensors_of_one_kind_are_copied_together_and_the_others_one_by_one():
    one, other, halves, transposed = torch.ones(2), torch.full((3,), 2.0), torch.ones(2).half(), torch.ones(2, 3).t()
    layout = Layout([one, other, halves, transposed])
    assert [tensor.tolist() for tensor in layout.alike[KEY]] == [[1, 1], [2, 2, 2]]
    assert layout.num_elements[KEY] == 5
    assert layout.others[0] is transposed
    assert len(layout.others) == 1


def test_a_layout_is_of_the_same_tensors_at_the_same_place():
    one, other = torch.ones(2), torch.ones(2)
    layout = Layout([one])
    assert layout.is_of([one])
    assert not layout.is_of([other])
    one.data = torch.ones(2)
    assert not layout.is_of([one])


def test_a_layout_is_of_all_its_tensors_and_of_no_others():
    one, other = torch.ones(2), torch.ones(2)
    layout = Layout([one, other])
    assert layout.is_of([one, other])
    assert not any(layout.is_of(tensors) for tensors in ([one], [], [one, other, one], [other, one]))


def test_a_layout_ends_where_memory_is_seen_as_another_shape():
    """Copies are made from one-dimensional views, which belong to the original shape."""
    for seen_as in (torch.t, lambda tensor: tensor[:1]):
        tensor = torch.ones(2, 3)
        layout = Layout([tensor])
        tensor.data = seen_as(tensor.data)
        assert not layout.is_of([tensor])


def test_copies_stay_in_kept_memory_up_to_a_size():
    scratch = Scratch(kept_bytes=12)
    first = scratch.copy_of(KEY, [torch.ones(3)], 3)
    assert scratch.copy_of(KEY, [torch.zeros(2)], 2).data_ptr() == first.data_ptr()
    assert scratch.copy_of(KEY, [torch.zeros(3)], 3).data_ptr() == first.data_ptr()
    large = scratch.copy_of(KEY, [torch.ones(2), torch.zeros(2)], 4)
    assert large.tolist() == [1, 1, 0, 0]
    assert large.data_ptr() != first.data_ptr()
    assert scratch.copy_of(KEY, [torch.ones(1)], 1).data_ptr() == first.data_ptr()
    scratch.clear()
    assert scratch._kept == {}
