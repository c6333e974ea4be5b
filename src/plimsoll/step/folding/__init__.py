"""Passes, blocks and updates of a dry run whose events are repeated from an earlier run."""
