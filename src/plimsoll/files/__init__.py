"""Files: caches, stores that are whole or absent, remote files, identities."""
