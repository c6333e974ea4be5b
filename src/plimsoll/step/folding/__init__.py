"""Parts of a dry run (passes, blocks, updates) that do not run, because the events of an equal part are copied."""
