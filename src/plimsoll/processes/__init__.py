"""The processes of a command: forked or started, told of signals, timed, and ended with their parent."""
