"""The diagnosis of a memory snapshot of `torch.cuda.memory._dump_snapshot`. Opening a snapshot runs no code in it."""
