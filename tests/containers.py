"""Run a function as the only program of a container: in namespaces of its own, with its own process numbers.

    rank of run_ranks ──fork──▶ process 1 of the new namespaces, which calls the function
                      ◀─result or exception, or the way it ended─

Only namespaces are new: the files are those of the host.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

_CLONE_NEWNS = 0x00020000
_NAMESPACES = {"pid": 0x20000000, "net": 0x40000000, "user": 0x10000000}
_MS_REC_PRIVATE = 0x4000 | 0x40000
_PR_SET_PDEATHSIG = 1


@functools.cache
def why_no_containers() -> str:
    """Return why `contained` cannot work here, or "": for `pytest.mark.skipif`."""
    if sys.platform != "linux":
        return "namespaces are Linux's"
    flags = _CLONE_NEWNS | _NAMESPACES["pid"] | _NAMESPACES["net"]
    probe = (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True); "
        f"raise SystemExit(libc.unshare({flags}) and ctypes.get_errno())"
    )
    code = subprocess.run([sys.executable, "-S", "-c", probe], check=False).returncode
    return f"namespaces are not permitted: {os.strerror(code)}" if code else ""


def contained(
    fn: Callable[..., Any], *args: Any, namespaces: tuple[str, ...] = ("pid",), shm_bytes: int | None = None
) -> Any:
    """Return what `fn(*args)` returns or raises in a child of this process with namespaces of its own: "pid", "net",
    "user".

    With "pid" it is process 1 and sees only itself in /proc; `shm_bytes` is the size of a /dev/shm of its own. If it
    ends without returning, this process ends the same way. Call it once in a process: the second child would find the
    first one's namespace closed.

    Raises:
        OSError: namespaces are not permitted (see `why_no_containers`).
    """
    _unshare(sum(_NAMESPACES[name] for name in namespaces if name != "user"))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _serve(writing, fn, args, namespaces, shm_bytes)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not answer:
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)
    error, result = pickle.loads(answer)
    if error is not None:
        raise error
    return result


def hide_proc() -> None:
    """Take /proc away from this process and its children, as in a chroot where nobody has mounted it.

    Raises:
        OSError: mounts are not permitted (see `why_no_containers`).
    """
    _unshare(_CLONE_NEWNS)
    _check(_libc().mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC_PRIVATE), None))
    _check(_libc().mount(b"none", b"/proc", b"tmpfs", ctypes.c_ulong(0), None))


def _serve(
    writing: int, fn: Callable[..., Any], args: tuple[Any, ...], namespaces: tuple[str, ...], shm_bytes: int | None
) -> None:
    """Call the function in the child, answer, and end."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if "user" in namespaces:
            _become_root_of_a_new_user_namespace()
        if "pid" in namespaces or shm_bytes is not None:
            _unshare(_CLONE_NEWNS)
            _check(_libc().mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC_PRIVATE), None))
        if "pid" in namespaces:
            _check(_libc().mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(0), None))
        if shm_bytes is not None:
            options = f"size={shm_bytes}".encode()
            _check(_libc().mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), options))
        answer = pickle.dumps((None, fn(*args)))
    except BaseException as error:
        answer = pickle.dumps((error, None))
    with open(writing, "wb") as pipe:
        pipe.write(answer)
    sys.stderr.flush()
    os._exit(0)


def _become_root_of_a_new_user_namespace() -> None:
    uid, gid = os.getuid(), os.getgid()
    _unshare(_NAMESPACES["user"])
    for name, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(line)


def _unshare(flags: int) -> None:
    _check(_libc().unshare(flags))


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
