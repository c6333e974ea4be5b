"""Text larger than memory: files -> index -> tokens -> windows -> shuffled batches, all in memory-mapped files.

The functions in the order of use: `prepare.prepare` runs the stages of `pipeline` once and fills a cache folder.
`datasets.open_datasets` opens the result (a few MiB). `batches.loader.Loader` makes batches, with a cursor that moves
only on request.
"""
