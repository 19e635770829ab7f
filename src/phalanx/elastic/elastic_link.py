"""Let a rank of an elastic job outlive the process that forked it, and still die with its agent.

A rank is killed by the kernel when its parent, the zygote, dies: nothing shall be left behind. A rank that can go on
without the zygote asks for another death: the agent gives it the reading end of a pipe in which nothing is ever
written, and of which only the agent holds the other end. When the agent ends, however it does, the kernel closes that
end and sends whoever has asked for it a signal, here SIGKILL: no code of the rank need run, whatever it hangs in.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
_F_SETSIG = 10  # fcntl.F_SETSIG exists from Python 3.13 on


def outlive_zygote(pipe: int) -> bool:
    """Have this process end with whoever holds the writing end of `pipe`, and no longer with its parent.

    `pipe` becomes ours and stays open as long as the process. False, and nothing is changed, where the system has no
    such thing, or outside of the main thread: only that thread's wish for a death signal counts.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return False
    try:
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        return False
    # now both deaths are asked for; one of an agent that has died meanwhile shows as the end of the pipe
    os.set_blocking(pipe, False)
    try:
        if os.read(pipe, 1) == b"":
            os.kill(os.getpid(), signal.SIGKILL)
    except BlockingIOError:
        pass
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0) == 0)
