"""Child processes of a command: starting, forking, signals, timing, and ending together with the parent."""
