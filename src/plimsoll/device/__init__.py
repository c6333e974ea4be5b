"""What each kind of device has, how its memory is counted and limited, and which errors mean that it ran out.

One file per backend (`cpu`, `cuda`) behind the contract of `base`; `probe` describes the whole machine. `oom_errors`,
`cgroup` and `process` need neither torch nor a device, so a supervisor can watch a worker with them.
"""
