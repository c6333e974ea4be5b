"""Training of a job in a run directory: preparation, supervision, the training loop, checkpoints and resuming."""
