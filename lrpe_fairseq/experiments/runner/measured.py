"""Run a command and report its peak memory: ``python -IS measured.py FD COMMAND...``.

Linux keeps the peak memory of a process through ``exec``, so a program started by a large process
would report that process's memory. This small process is therefore started in between. The peak is
that of the command and of its child processes.

FD: file descriptor to which the peak resident set in KiB is written. The exit status is that of the
command, or 128 + n after signal n. This process ignores SIGUSR1 and SIGTERM, which are sent to the
whole process group, so that the command handles them. After such a signal it also waits for the
processes of the command: a training on several GPUs ends before those of its GPUs have saved.
"""

import contextlib
import ctypes
import os
import signal
import sys

NOT_STARTED = 127  # as in shells
PR_SET_CHILD_SUBREAPER = 36  # of Linux: orphans of the command become children of this process


def main() -> int:
    """Run the given command and return its exit status."""
    report, command = int(sys.argv[1]), sys.argv[2:]
    signals = []
    for number in (signal.SIGUSR1, signal.SIGTERM):  # a handler, unlike SIG_IGN, is not inherited
        signal.signal(number, lambda number, _: signals.append(number))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.set_inheritable(report, False)
    try:
        child = os.posix_spawnp(command[0], command, os.environ)
    except OSError as error:
        print(error)
        return NOT_STARTED
    _, status, usage = os.wait4(child, 0)
    with contextlib.suppress(ChildProcessError):  # none is left
        while signals:
            os.wait()
    with contextlib.suppress(OSError):  # the runner may have been killed
        os.write(report, str(usage.ru_maxrss).encode())
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
