"""Data-parallel ranks: joining them, agreeing on a decision, and summing gradients."""
