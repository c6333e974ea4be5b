"""Files and processes: caches, atomic writes, remote files, forking."""
