"""A child process's side of not being left behind, and how old a process is.

The parent holds the other end of the child's standard input and writes nothing to it once the child is at work. End of
file means that it is gone, even by SIGKILL, and the child ends too. On Linux the kernel is also asked to kill the child
then, for one that is too busy, or stopped, to read.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

EXIT_ORPHANED = 71
_PR_SET_PDEATHSIG = 1
_waited_s = 0.0


def die_with_parent() -> None:
    """Call first thing in a child process whose standard input is a pipe from its parent."""
    end_with_parent()
    threading.Thread(target=_wait_for_end_of_input, name="lifeline", daemon=True).start()


def end_with_parent() -> None:
    """The kernel's part of it, for a child that still reads its input."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(EXIT_ORPHANED)


def _wait_for_end_of_input() -> None:
    while os.read(0, 1024):
        pass
    os._exit(EXIT_ORPHANED)


def count_wait(seconds: float) -> None:
    """This process had nothing to do for so long, because it did not know its command line yet."""
    global _waited_s
    _waited_s += seconds


def waited_s() -> float:
    """How long that was."""
    return _waited_s


def age_s() -> float:
    """Seconds since this process was made, to a hundredth; 0 where the system does not tell."""
    try:
        with open("/proc/self/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        begun = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - begun, 0.0)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
