import os
import resource
import subprocess
import sys

from plimsoll.device.watched import family_of, lines_of

MIB = 1 << 20
HOLD = "import sys; held = bytearray(b'x' * (64 << 20)); print('ready', flush=True); sys.stdin.read()"


def _held(code, **options):
    return subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, **options)


def _limit():
    resource.setrlimit(resource.RLIMIT_DATA, (512 * MIB, 512 * MIB))


def test_a_process_shows_what_it_holds_and_its_own_limit():
    with _held(HOLD, preexec_fn=_limit) as process:
        process.stdout.readline()
        (use,) = family_of(process.pid)
        process.stdin.close()
    assert use.parent == os.getpid()
    assert 64 * MIB <= use.private_bytes <= use.data_bytes < 512 * MIB
    assert use.data_limit_bytes == 512 * MIB
    line = lines_of((use,))[-1]
    assert (line.name, line.used_bytes) == (f"RLIMIT_DATA of {process.pid}", use.data_bytes)


def test_children_come_after_their_parent():
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}])"
    with _held(code) as process:
        process.stdout.readline()
        parent, child = family_of(process.pid)
        process.stdin.close()
    assert (parent.pid, child.parent) == (process.pid, process.pid)
    assert child.private_bytes - parent.private_bytes > 50 * MIB


def test_a_process_that_was_killed_is_gone_also_before_its_parent_asked_how():
    with _held(HOLD) as process:
        process.stdout.readline()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert family_of(process.pid) == ()
    assert family_of(process.pid) == ()
