"""Storages resized in place are heard of while the block runs, and torch is afterwards as it was."""

import torch

from plimsoll.memory.resized import noting_resizes


def test_each_resize_is_noted_after_it_happened():
    storage = torch.ones(8).untyped_storage()
    sizes = []
    with noting_resizes(lambda one: sizes.append(one.nbytes())):
        storage.resize_(0)
        storage.resize_(16)
    storage.resize_(4)
    assert sizes == [0, 16]


def test_torch_is_as_it_was_also_after_an_error_and_inside_another():
    before = torch.UntypedStorage.resize_
    first, second = [], []
    with noting_resizes(first.append), noting_resizes(second.append):
        torch.ones(2).untyped_storage().resize_(0)
    assert len(first) == len(second) == 1
    assert torch.UntypedStorage.resize_ is before
    assert "resize_" not in vars(torch.UntypedStorage)
