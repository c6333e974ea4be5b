"""The ranks that train one model: who they are, how they agree, and how gradients are summed."""
