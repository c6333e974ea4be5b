"""Model weights: files that are read tensor by tensor, and layers that take less memory."""
