"""The kernel's freezer: processes in a control group that stop where they are, and that nobody is told about.

Unlike SIGSTOP it leaves no trace: a parent hears nothing from `waitpid`, and no signal is delivered. Both versions of
control groups have one:

             the group says stop       it has stopped
    v1       freezer.state = FROZEN    freezer.state is FROZEN     (FREEZING until then)
    v2       cgroup.freeze = 1         cgroup.events: frozen 1
"""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "phalanx-freeze-"  # of the groups that we make, with the id of the process that made them
_PATIENCE = 500  # looks at a group whose processes are ending


class NoFreezerError(Exception):
    """This machine does not let us freeze processes; the text says why."""


@dataclass(frozen=True)
class Hierarchy:
    """Where groups can be made whose processes the kernel freezes."""

    version: int
    folder: Path  # of the group that this process is in

    def freeze(self, group: Path) -> None:
        """Let the processes of `group` stop, each as soon as it leaves the system call that it is in."""
        self._write(group, True)

    def thaw(self, group: Path) -> None:
        """Let them go on."""
        self._write(group, False)

    def is_frozen(self, group: Path) -> bool:
        """Whether all of them have stopped."""
        if self.version == 1:
            return (group / "freezer.state").read_text().strip() == "FROZEN"
        return "frozen 1" in (group / "cgroup.events").read_text().splitlines()

    def _write(self, group: Path, freezes: bool) -> None:
        if self.version == 1:
            (group / "freezer.state").write_text("FROZEN" if freezes else "THAWED")
        else:
            (group / "cgroup.freeze").write_text("1" if freezes else "0")


def processes_in(group: Path) -> list[int]:
    """The ids of the processes in a group, and of none in the groups below it."""
    return [int(line) for line in (group / "cgroup.procs").read_text().split()]


def move(process: int, group: Path) -> bool:
    """Whether the process could be put into the group: it may have ended."""
    try:
        (group / "cgroup.procs").write_text(str(process))
    except OSError:
        return False
    return True


def find_hierarchy(version: int | None = None) -> Hierarchy:
    """The freezer of this machine; version 1 if it has both, and no other is asked for.

    Raises:
        NoFreezerError: there is none, or this user may not make groups in it.
    """
    found = [one for one in _mounted() if version in (None, one.version)]
    if not found:
        asked = "" if version is None else f" of version {version}"
        raise NoFreezerError(
            f"no freezer{asked} among this machine's control groups (/proc/self/mountinfo names none; Linux has one)"
        )
    if any(_PREFIX in str(one.folder) for one in _mounted()):
        raise NoFreezerError("this process runs in a command whose processes are being frozen, and would move them")
    problems = []
    for one in found:
        try:
            with _locked(one.folder):
                group = one.folder / f"{_PREFIX}{os.getpid()}-tried"
                group.mkdir()
                group.rmdir()
        except OSError as error:
            problems.append(f"version {one.version}: {error}")
        else:
            return one
    raise NoFreezerError(
        "this user may not make control groups (" + "; ".join(problems) + "): run as root, in a container with "
        "/sys/fs/cgroup mounted for writing (docker run --privileged)"
    )


def _mounted() -> list[Hierarchy]:
    """The group that this process is in, in each hierarchy that can freeze; version 1 first."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except FileNotFoundError:  # not Linux
        return []
    v1 = [path for _, controllers, path in own if "freezer" in controllers.split(",")]
    v2 = [path for _, controllers, path in own if controllers == ""]
    found = []
    for mount in mounts:
        root, point, (kind, _, options) = mount[3], Path(mount[4]), mount[mount.index("-") + 1 :]
        if kind == "cgroup" and "freezer" in options.split(",") and v1:
            found.append(Hierarchy(1, _below(point, root, v1[0])))
        elif kind == "cgroup2" and v2:
            found.append(Hierarchy(2, _below(point, root, v2[0])))
    return sorted(found, key=lambda one: one.version)


def _below(point: Path, root: str, path: str) -> Path:
    """Where the group `path` is seen, if the hierarchy is mounted at `point` from its group `root` on."""
    inside = os.path.relpath(path, root)
    return point if inside.startswith("..") else point / inside


@contextmanager
def groups(hierarchy: Hierarchy) -> Iterator[Path]:
    """A new group, to make others in; at the end, however it comes, what is in them is thawed and they are gone.

    It is locked as long as it is in use, so that who comes next can tell it from what a killed process has left.
    """
    with _locked(hierarchy.folder):
        free_left_over(hierarchy)
        top = hierarchy.folder / f"{_PREFIX}{os.getpid()}"
        top.mkdir()
        lock = _lock(top, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield top
    finally:
        remove(hierarchy, top)
        os.close(lock)


def free_left_over(hierarchy: Hierarchy) -> None:
    """Thaw what is in groups whose maker was killed, and remove them."""
    for top in hierarchy.folder.glob(f"{_PREFIX}*"):
        try:
            lock = _lock(top, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:  # it has just gone
            continue
        except BlockingIOError:  # it is in use
            continue
        try:
            remove(hierarchy, top)
        finally:
            os.close(lock)


def remove(hierarchy: Hierarchy, top: Path) -> None:
    """Thaw all that is in a group and those below it, move it out, and remove them."""
    for below in [one for one in top.iterdir() if one.is_dir()]:
        remove(hierarchy, below)
    hierarchy.thaw(top)
    for patience in itertools.count():
        empty(top, hierarchy.folder)
        try:
            top.rmdir()
            return
        except OSError:  # a process of it is about to end
            if patience == _PATIENCE:
                raise
            time.sleep(0.01)


def empty(group: Path, into: Path) -> list[int]:
    """Move all processes of `group` to another one, and return their ids."""
    moved: list[int] = []
    while there := processes_in(group):  # what forks meanwhile leaves its child here: look again
        moved += [process for process in there if move(process, into)]
    return moved


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = _lock(folder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


def _lock(folder: Path, how: int) -> int:
    """The kernel lets go of it when this process ends, whatever ends it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
