"""Running: the step that is a transaction, the recovery, checkpoints, the loop and its supervisor."""
