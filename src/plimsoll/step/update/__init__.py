"""`optimizer.step()` as a transaction."""
