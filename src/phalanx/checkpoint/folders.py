"""Create the output folders of a training run before it begins."""

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
    """Create each folder on rank 0, or test writing at its address. All ranks call it.

    The keys are the arguments' names, for errors; None is skipped. `only_try` creates nothing.

    Raises:
        ValueError: folders cannot be created or written to; all of them are listed, on every rank.
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
    """Return why the folder cannot be written to, or ""; create the folder unless `only_try`."""
    try:
        if only_try:
            folder = next(one for one in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(one))
        os.makedirs(folder, exist_ok=True)
    except FileExistsError:
        return "is a file. Pass a folder."
    except OSError as error:
        return f"can't be created: {error.strerror or error}. Pass a folder that this user can create."
    return "" if may_write(folder) else "can't be written to. Pass a folder that this user may write to."


def _try_address(address: str) -> str:
    """Return why no object can be put at the address, or ""; this puts a test object and removes it."""
    try:
        remote = RemoteFolder(address, RETRY_S)
        remote.put_bytes(b"", _TRIAL)
        remote.remove([_TRIAL])
    except ModuleNotFoundError:
        raise
    except Exception as error:
        return f"can't be written to: {type(error).__name__}: {error}. Create the bucket, or check its permissions."
    return ""
