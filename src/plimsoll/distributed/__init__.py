"""The ranks that train one model together: who they are, how they agree, and how gradients are summed."""
