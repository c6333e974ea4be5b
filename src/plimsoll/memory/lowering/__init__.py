"""What a device runs in place of a traced op, and what that takes beside the tensors."""
