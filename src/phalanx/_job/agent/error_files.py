"""Manage the files to which ranks write their errors, in the format of `torch.distributed.elastic`'s `record`.

A script whose `main` is decorated with `record` writes its exception to the file that TORCHELASTIC_ERROR_FILE names.
The path, as under torchrun, is FOLDER/attempt_0/LOCAL_RANK/error.json; the file contains:

    {"message": {"message": "ValueError: no data", "extraInfo": {"py_callstack": "Traceback …", "timestamp": "17…"}}}

Folders that stay empty are removed at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import time

from phalanx._job.agent.failure import ExceptionReport

VARIABLE = "TORCHELASTIC_ERROR_FILE"
_ATTEMPT = "attempt_"
_MAX_BYTES = 1 << 24  # limits what is read, because a script may write anything


class ErrorFiles:
    """`ErrorFiles` manages the error files of this host's ranks below `folder`; without a folder there are none."""

    def __init__(self, folder: str = "") -> None:
        self._folder = folder
        self._attempt = ""

    def begin(self, attempt: int, num_ranks: int) -> None:
        """Create the folders for the ranks of an attempt; if that fails, the ranks write no error files."""
        self._attempt = os.path.join(self._folder, f"{_ATTEMPT}{attempt}") if self._folder else ""
        try:
            for local_rank in range(num_ranks if self._attempt else 0):
                os.makedirs(os.path.join(self._attempt, str(local_rank)), exist_ok=True)
        except OSError:
            self._attempt = ""

    def path_of(self, local_rank: int) -> str:
        """Return the path of the rank's error file; empty, as under torchrun, if it has none."""
        return os.path.join(self._attempt, str(local_rank), "error.json") if self._attempt else ""

    def remove(self, local_rank: int) -> None:
        """Remove the error file of a rank's previous process; the file was already read."""
        with contextlib.suppress(OSError):
            os.unlink(self.path_of(local_rank))

    def find(self, local_rank: int) -> str:
        """Return the path of the rank's error file if the file exists, otherwise an empty string."""
        path = self.path_of(local_rank)
        return path if os.path.isfile(path) else ""

    def close(self) -> None:
        """Remove empty folders."""
        if self._folder:
            remove_empty(self._folder)


def remove_empty(folder: str) -> None:
    """Remove the empty folders of attempts and ranks, and `folder` itself if it is then empty."""
    with contextlib.suppress(OSError):
        attempts = [os.path.join(folder, name) for name in os.listdir(folder) if is_attempt(name)]
        for attempt in attempts:
            for name in os.listdir(attempt):
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.join(attempt, name))
            with contextlib.suppress(OSError):
                os.rmdir(attempt)
        os.rmdir(folder)


def is_attempt(name: str) -> bool:
    """Return whether this is the name of an attempt's folder."""
    return name.startswith(_ATTEMPT)


def read_report(path: str, rank: int, pid: int, ended_at: float) -> ExceptionReport | None:
    """Return the error in the file `path` of a process that exited at `ended_at`; None if the file is unreadable.

    The time of the failure is the file's modification time, because the timestamp in the file is in whole seconds.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            message = json.loads(file.read(_MAX_BYTES))["message"]
            written = time.monotonic() - (time.time() - os.fstat(file.fileno()).st_mtime)
        text, extra = (message, {}) if isinstance(message, str) else (message["message"], message.get("extraInfo", {}))
        traceback = str(extra.get("py_callstack", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    kind, colon, _ = str(text).partition(":")
    types = (kind.rpartition(".")[2],) if colon and kind.isidentifier() else ()
    summary = next(iter(str(text).splitlines()), "")
    return ExceptionReport(rank, pid, min(written, ended_at), types, summary, "", traceback, path)


def copy_error_file(path: str, own: str, exit_code: int) -> None:
    """Copy the error file `path` to `own`, the error file that this command's parent has named; never raise.

    As under torchrun, the field `errorCode` is the process's exit code, or minus the signal that killed it.
    """
    with contextlib.suppress(OSError, ValueError):
        with open(path, encoding="utf-8") as file:
            error = json.load(file)
        if exit_code and isinstance(error, dict) and isinstance(error.get("message"), dict):
            error["message"]["errorCode"] = exit_code
        with open(own, "w", encoding="utf-8") as file:
            json.dump(error, file)
