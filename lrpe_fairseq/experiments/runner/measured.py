"""Run a command and report its peak memory: ``python -IS measured.py FD COMMAND...``.

A program that is started by a large process counts that process's memory as its own: Linux keeps
the peak of what was there before ``exec``. Between the runner and a training stands this small
process, so that the peak is that of the training and of the processes that it waited for.

FD: where the peak resident set in KiB is written. The exit status is that of the command, 128 + n
after signal n. SIGUSR1 and SIGTERM, sent to the whole group, are the command's to act on.
"""

import contextlib
import os
import signal
import sys

NOT_STARTED = 127  # as shells have it


def main() -> int:
    """Run the command of the command line to its end."""
    report, command = int(sys.argv[1]), sys.argv[2:]
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, not inherited by the command
    os.set_inheritable(report, False)
    try:
        child = os.posix_spawnp(command[0], command, os.environ)
    except OSError as error:
        print(error)
        return NOT_STARTED
    _, status, usage = os.wait4(child, 0)
    with contextlib.suppress(OSError):  # the runner may have been killed
        os.write(report, str(usage.ru_maxrss).encode())
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
