"""Repeated passes, blocks and updates of a dry run, recorded from one that ran."""
