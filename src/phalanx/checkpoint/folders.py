"""Make the folders into which training will write, before it begins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from phalanx._base.storage import RemoteFolder, is_address
from phalanx.checkpoint.peers import Peers
from phalanx.checkpoint.remote_history import RETRY_S
from phalanx.checkpoint.write_problems import may_write

_TRIAL = ".phalanx-trial"


def make_folders(peers: Peers, folders: Mapping[str, str | os.PathLike[str] | None], *, only_try: bool = False) -> None:
    """Make each folder on rank 0, or try to write at its address; the keys are the arguments that name them, and None
    is skipped. All ranks call it. With `only_try` nothing is made.

    Raises:
        ValueError: a folder cannot be made, or not written into; on every rank, with all of them.
    """
    problems = []
    for argument, folder in folders.items() if peers.is_first else ():
        if folder is None:
            continue
        problem = _try_address(str(folder)) if is_address(folder) else _try_folder(Path(folder), only_try=only_try)
        if problem:
            problems.append(f"{argument}={os.fspath(folder)!r} {problem}")
    if problems := peers.broadcast(problems):
        raise ValueError(f"{peers.what}: {' '.join(problems)}")


def _try_folder(folder: Path, *, only_try: bool) -> str:
    """Return why nothing can be written into the folder, which is made unless it would be `only_try`."""
    try:
        if only_try:
            folder = next(one for one in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(one))
        os.makedirs(folder, exist_ok=True)
    except FileExistsError:
        return "is a file. Give a folder."
    except OSError as error:
        return f"can't be made: {error.strerror or error}. Give a folder that this user can make."
    return "" if may_write(folder) else "can't be written into. Give a folder that this user may write to."


def _try_address(address: str) -> str:
    """Return why no object can be put at the address; one is put there, and removed."""
    try:
        remote = RemoteFolder(address, RETRY_S)
        remote.put_bytes(b"", _TRIAL)
        remote.remove([_TRIAL])
    except ModuleNotFoundError:
        raise
    except Exception as error:
        return f"can't be written to: {type(error).__name__}: {error}. Make the bucket, or look at its permissions."
    return ""
