"""Make the folders into which training will write, before it begins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from phalanx.checkpoint.peers import Peers
from phalanx.checkpoint.write_problems import may_write
from phalanx.storage import is_address


def make_folders(peers: Peers, folders: Mapping[str, str | os.PathLike[str] | None]) -> None:
    """Make each folder on rank 0; the keys are the arguments that name them, and None is skipped. All ranks call it.

    Raises:
        ValueError: a folder cannot be made, or not written into; on every rank, with all of them.
    """
    problems = []
    for argument, folder in folders.items() if peers.is_first else ():
        if folder is None or is_address(folder):  # at an address only objects are made
            continue
        try:
            os.makedirs(folder, exist_ok=True)
            problem = ""
        except FileExistsError:
            problem = "is a file. Give a folder."
        except OSError as error:
            problem = f"can't be made: {error.strerror or error}. Give a folder that this user can make."
        if not problem and not may_write(Path(folder)):
            problem = "can't be written into. Give a folder that this user may write to."
        if problem:
            problems.append(f"{argument}={os.fspath(folder)!r} {problem}")
    if problems := peers.broadcast(problems):
        raise ValueError(f"{peers.what}: {' '.join(problems)}")
