"""Text larger than memory: files -> index -> tokens -> windows -> shuffled batches, every step through memory maps.

The verbs, in the order of use: `prepare.prepare` (once: runs the stages of `pipeline`, all in a cache folder),
`datasets.open_datasets` (maps the result, a few MiB), `loader.Loader` (batches, and a cursor that waits to be moved).
"""
