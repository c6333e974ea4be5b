"""A memory snapshot of `torch.cuda.memory._dump_snapshot` to a diagnosis; opening one runs nothing that is in it."""
