"""From a job to a run directory: supervise, train, checkpoint, resume."""
