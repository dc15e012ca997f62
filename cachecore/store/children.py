"""Processes that do not outlive the one that started them."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def dies_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """What a child calls before it becomes its command, so that the kernel sends it the signal when this process (to
    be exact: the thread that starts the child) ends. None where the system has no such thing; Linux has."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)

    return arrange
