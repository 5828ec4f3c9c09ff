"""Runs a module as ``python -m`` does, and ends with whoever holds the other end of its stdin.

A process that outlives a killed ``chaz up`` would look for a database and a broker that are gone, for ever.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

PATIENCE = 30.0


def main() -> None:
    """Run ``sys.argv[1]`` with the arguments after it."""
    threading.Thread(target=_end_with_stdin, name="chaz-leash", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
