"""Small file trees of every kind of machine, with limits in hand-made numbers, and the real files of this machine."""

import pytest

from plimsoll.device.cpu import cgroup

_V1_NONE = "9223372036854771712"


def _tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _v2(path="/", mounted="/"):
    return {
        "proc/self/cgroup": f"0::{path}\n",
        "proc/self/mountinfo": f"30 23 0:26 {mounted} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw\n",
    }


def _v1(path, mounted="/"):
    return {
        "proc/self/cgroup": f"8:pids:{path}\n4:cpu,memory:{path}\n0::/\n",
        "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
        f"35 31 0:32 {mounted} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    }


def _bytes_of(root):
    return [limit.bytes for limit in cgroup.limits(root)]


def test_v2_reads_every_ancestor_and_the_fewest_free_bytes_count(tmp_path):
    slurm = "sys/fs/cgroup/slurm"
    root = _tree(
        tmp_path,
        _v2("/slurm/job/step")
        | {
            f"{slurm}/memory.max": "1000\n",
            f"{slurm}/memory.current": "950\n",
            f"{slurm}/memory.stat": "anon 100\ninactive_file 30\n",
            f"{slurm}/job/memory.max": "600\n",
            f"{slurm}/job/memory.current": "100\n",
            f"{slurm}/job/step/memory.max": "max\n",
            f"{slurm}/job/step/memory.events": "low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\n",
        },
    )
    assert _bytes_of(root) == [600, 1000]
    assert cgroup.limits(root)[0].source == "cgroup v2 memory.max of /slurm/job"
    assert cgroup.free_bytes(root) == 80  # 1000 - (950 - 30), which is less than 600 - 100
    assert cgroup.oom_kill_count(root) == (2, False)


def test_a_v2_container_sees_its_own_group_as_the_root(tmp_path):
    files = {"sys/fs/cgroup/memory.max": "500\n", "sys/fs/cgroup/memory.current": "700\n"}
    root = _tree(tmp_path, _v2() | files)
    assert _bytes_of(root) == [500]
    assert cgroup.free_bytes(root) == 0


@pytest.mark.parametrize("path", ["/../..", "/elsewhere"])
def test_a_group_outside_the_mount_falls_back_to_the_mount(tmp_path, path):
    root = _tree(tmp_path, _v2(path, mounted="/docker/abc") | {"sys/fs/cgroup/memory.max": "500\n"})
    assert _bytes_of(root) == [500]


def test_v1_beside_v2_reads_the_memory_hierarchy_and_ignores_the_number_that_means_none(tmp_path):
    memory = "sys/fs/cgroup/memory"
    root = _tree(
        tmp_path,
        _v1("/docker/abc")
        | {
            f"{memory}/memory.limit_in_bytes": _V1_NONE,
            f"{memory}/docker/memory.limit_in_bytes": _V1_NONE,
            f"{memory}/docker/abc/memory.limit_in_bytes": "400\n",
            f"{memory}/docker/abc/memory.usage_in_bytes": "300\n",
            f"{memory}/docker/abc/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
            f"{memory}/docker/abc/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
        },
    )
    assert _bytes_of(root) == [400]
    assert cgroup.free_bytes(root) == 150
    assert cgroup.oom_kill_count(root) == (4, False)


def test_v1_in_a_container_is_mounted_at_its_own_group(tmp_path):
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "400\n"}
    root = _tree(tmp_path, _v1("/docker/abc", mounted="/docker/abc") | files)
    assert _bytes_of(root) == [400]


def test_an_older_kernel_does_not_count_kills(tmp_path):
    files = {"sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}
    assert cgroup.oom_kill_count(_tree(tmp_path, _v1("/") | files)) is None


def test_where_no_group_counts_kills_the_machine_does(tmp_path):
    vmstat = {"proc/vmstat": "oom_kill_other 1\nnr_free_pages 8\noom_kill 5\n"}
    assert cgroup.oom_kill_count(_tree(tmp_path / "none", vmstat)) == (5, True)
    events = {"sys/fs/cgroup/memory.events": "oom 3\noom_kill 2\n"}
    assert cgroup.oom_kill_count(_tree(tmp_path / "root", _v2() | vmstat)) == (5, True)  # the root group has no events
    assert cgroup.oom_kill_count(_tree(tmp_path / "v2", _v2() | vmstat | events)) == (2, False)


def test_a_machine_without_groups_has_no_limits(tmp_path):
    assert cgroup.limits(tmp_path) == ()
    assert cgroup.free_bytes(tmp_path) is None
    assert cgroup.oom_kill_count(tmp_path) is None


def test_this_machine_is_read_without_an_error():
    assert all(0 < limit.bytes < 1 << 60 and limit.source for limit in cgroup.limits())
    assert (cgroup.free_bytes() is None) == (cgroup.limits() == ())


def _of_process(pid, path):
    return {f"proc/{pid}/cgroup": f"0::{path}\n"}


def test_the_groups_of_another_process_are_its_own_and_each_ancestor_counts_once(tmp_path):
    root = _tree(
        tmp_path,
        _v2("/watcher")
        | _of_process(7, "/job/a")
        | _of_process(8, "/job/b")
        | {
            "sys/fs/cgroup/watcher/memory.max": "10\n",
            "sys/fs/cgroup/job/memory.max": "1000\n",
            "sys/fs/cgroup/job/memory.current": "700\n",
            "sys/fs/cgroup/job/memory.stat": "inactive_file 100\n",
            "sys/fs/cgroup/job/a/memory.max": "500\n",
            "sys/fs/cgroup/job/a/memory.current": "400\n",
            "sys/fs/cgroup/job/a/memory.events": "oom_kill 3\n",
            "sys/fs/cgroup/job/b/memory.max": "max\n",
        },
    )
    found = {limit.source: (limit.bytes, used) for limit, used in cgroup.uses((7, 8), root)}
    assert found == {
        "cgroup v2 memory.max of /job/a": (500, 400),
        "cgroup v2 memory.max of /job": (1000, 600),
    }
    counter = cgroup.KillCounter(7, root)
    assert counter.read() == (3, False)
    (root / "proc/7/cgroup").unlink()  # the process has ended; its group still exists
    assert counter.read() == (3, False)
    assert cgroup.KillCounter(7, root).read() is None


@pytest.mark.parametrize("path", ["/../other", "/elsewhere"])
def test_another_process_outside_of_what_is_mounted_here_has_no_known_limit(tmp_path, path):
    files = _v2("/docker/abc", mounted="/docker/abc") | _of_process(7, path) | _of_process(8, "/docker/abc/in")
    root = _tree(tmp_path, files | {"sys/fs/cgroup/memory.max": "500\n"})
    assert cgroup.uses((7,), root) == ()
    assert [limit.bytes for limit, _ in cgroup.uses((8,), root)] == [500]


def test_v1_of_another_process_is_found_where_it_is_mounted(tmp_path):
    root = _tree(
        tmp_path,
        _v1("/own")
        | {
            "proc/7/cgroup": "4:cpu,memory:/job\n0::/\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "400\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "300\n",
        },
    )
    assert [(limit.bytes, used) for limit, used in cgroup.uses((7,), root)] == [(400, 300)]


def test_a_process_that_is_gone_has_no_groups(tmp_path):
    root = _tree(tmp_path, _v2("/") | {"sys/fs/cgroup/memory.max": "500\n"})
    assert cgroup.uses((7,), root) == ()
