"""Files: caches, atomic stores, remote files, checksums and temporary files."""
