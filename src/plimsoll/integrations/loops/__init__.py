"""The training step inside the loops of other libraries, shared by all adapters."""
