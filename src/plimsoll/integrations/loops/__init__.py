"""The training step inside a loop that is not ours, shared by all adapters."""
