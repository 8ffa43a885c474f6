"""What the system says of processes, of real ones in each state."""

import os
import signal
import subprocess
import sys

from waiting import until

from megabatch.elastic.processes import all_processes, children, look_at

# A name may hold anything, also what looks like the rest of the line.
SLEEPS = """
import time
with open("/proc/self/comm", "w") as name:
    name.write(") Z 1 (")
print(flush=True)
time.sleep(600)
"""


def test_a_process_lives_is_stopped_ends_and_is_forgotten():
    with subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            lives = look_at(process.pid)
            assert lives.parent == os.getpid() and not lives.ended and not lives.stopped
            assert process.pid in children(os.getpid())
            assert all_processes()[process.pid].began == lives.began >= look_at(os.getpid()).began
            process.send_signal(signal.SIGSTOP)
            until(lambda: look_at(process.pid).stopped, "the stop")
        finally:
            process.kill()
        # Nobody has taken note of its end yet.
        until(lambda: look_at(process.pid).ended, "its end")
        assert process.pid not in children(os.getpid())
        assert process.pid in all_processes()
        process.wait()
        assert look_at(process.pid) is None
