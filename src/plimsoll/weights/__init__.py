"""Model weights: reading files tensor by tensor, and representations that take less memory."""
