"""Device backends: hardware facts, memory accounting and limits, and recognition of out-of-memory errors.

Each backend (`cpu`, `cuda`) implements the interface in `base`, and `probe` describes the whole machine. `oom_errors`,
`process` and the control groups (`cpu.cgroup`) need neither torch nor a device, so a supervisor can use them to watch a
worker.
"""
