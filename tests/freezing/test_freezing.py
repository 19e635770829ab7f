"""Processes are frozen and thawed, and none stays frozen, whatever ends the program that does it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.freezing import run as program
from tests.freezing.freezer import Hierarchy, NoFreezerError, find_hierarchy, groups, move, processes_in

_ROOT = Path(__file__).parents[2]


def _why_none(version: int) -> str:
    try:
        find_hierarchy(version)
    except NoFreezerError as error:
        return str(error)
    return ""


_VERSIONS = [
    pytest.param(version, marks=pytest.mark.skipif(bool(why), reason=why), id=f"v{version}")
    for version, why in ((1, _why_none(1)), (2, _why_none(2)))
]


@pytest.fixture(params=_VERSIONS)
def hierarchy(request: pytest.FixtureRequest) -> Iterator[Hierarchy]:
    found = find_hierarchy(request.param)
    yield found
    assert not _group_of(found, os.getpid()).exists()


def _group_of(hierarchy: Hierarchy, maker: int) -> Path:
    return hierarchy.folder / f"phalanx-freeze-{maker}"


def _cpu_time(process: int) -> int:
    return sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]))


def test_a_frozen_process_does_nothing_and_goes_on_when_it_is_thawed(hierarchy):
    with groups(hierarchy) as top, subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            assert move(busy.pid, top)
            hierarchy.freeze(top)
            _until(lambda: hierarchy.is_frozen(top))
            before = _cpu_time(busy.pid)
            sum(range(10**7))  # time for the other to use, if it could
            assert _cpu_time(busy.pid) == before
            assert os.waitpid(busy.pid, os.WNOHANG | os.WUNTRACED) == (0, 0)  # and nobody hears of it
            hierarchy.thaw(top)
            _until(lambda: _cpu_time(busy.pid) > before)
        finally:
            hierarchy.thaw(top)
            busy.kill()


# A command that ends well once a child of its own was frozen, and nobody else.
_SEES_ITS_CHILD_FROZEN = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1)
child.stdout.readline()
end = time.monotonic() + 60
while time.monotonic() < end:
    own, its = (pathlib.Path(f"/proc/{who}/cgroup").read_text() for who in ("self", child.pid))
    assert "frozen-" not in own
    if "frozen-" in its:
        break
else:
    sys.exit("nobody was frozen")
child.kill()
child.wait()
"""


def test_a_command_runs_while_its_processes_freeze_and_the_log_names_them(hierarchy, tmp_path):
    command = [sys.executable, "-c", _SEES_ITS_CHILD_FROZEN]
    pauses = program.Pauses(seed=3, at_once=2, every_s=0.01, mean_s=0.05, longest_s=0.1)
    with (tmp_path / "log").open("w+", buffering=1) as log, (tmp_path / "out").open("wb") as output:
        code, count = program.run(command, hierarchy, pauses, log, output)
        log.seek(0)
        lines = log.read().splitlines()
    assert code == 0, (tmp_path / "out").read_text()
    assert len(lines) == count > 0
    assert any(" s, for 0." in line and "print(flush=True); input()" in line for line in lines)


def test_a_run_that_fails_is_told_with_its_seed_and_what_it_left(hierarchy, tmp_path, capfd):
    asked = ["--cgroup-version", str(hierarchy.version), "--logs", str(tmp_path), "--runs", "2", "--seed", "7"]
    assert _main(asked, "import sys; sys.exit('broken')") == 1
    assert _main(asked, "pass") == 0
    said = capfd.readouterr().out.splitlines()
    assert [line.split(":")[1] for line in said] == [" seed 7, 0 times", " seed 8, 0 times"] * 2
    assert f"exit code 1. Output: {tmp_path}/7.out" in said[0]
    assert said[2].endswith("passed")
    assert list(tmp_path.iterdir()) == []  # the passing runs replaced what the failed ones had left


def _main(asked: list[str], code: str) -> int:
    before = {number: signal.getsignal(number) for number in program.INTERRUPTS}
    try:
        return program.main([*asked, "--every", "1000", "--", sys.executable, "-c", code])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _freezing(hierarchy: Hierarchy, logs: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """The program; who it freezes stays so until it ends."""
    words = ["--cgroup-version", str(hierarchy.version), "--logs", str(logs), "--every", "0.001"]
    words += ["--mean", "1e9", "--longest", "1e6", "--at-once", "1", "--", *command]
    with subprocess.Popen([sys.executable, "-m", "tests.freezing.run", *words], cwd=_ROOT) as program:
        try:
            yield program
        finally:
            if program.poll() is None:
                program.send_signal(signal.SIGINT)
    if program.returncode >= 0:
        assert not _group_of(hierarchy, program.pid).exists()


_HAS_A_CHILD = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).wait()
"""
_WITH_CHILD = (sys.executable, "-c", _HAS_A_CHILD)


def _frozen_child(hierarchy: Hierarchy, maker: int) -> int:
    """The process that is frozen, perhaps before it has started its program: then its parent waits for that."""
    group = _group_of(hierarchy, maker) / "frozen-0"
    _until(lambda: group.exists() and processes_in(group) and hierarchy.is_frozen(group))
    return processes_in(group)[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_an_interrupt_thaws_and_ends_all_that_was_started(hierarchy, tmp_path, number):
    with _freezing(hierarchy, tmp_path, *_WITH_CHILD) as freezing:
        child = _frozen_child(hierarchy, freezing.pid)
        freezing.send_signal(number)
        assert freezing.wait(60) == 130
    _until(lambda: not _runs(child))


def test_what_a_killed_run_has_left_frozen_is_thawed_by_the_next_one(hierarchy, tmp_path):
    with _freezing(hierarchy, tmp_path, *_WITH_CHILD) as freezing:
        child = _frozen_child(hierarchy, freezing.pid)
        parent = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
        freezing.kill()
    with _freezing(hierarchy, tmp_path, "true") as following:
        assert following.wait(60) == 0
    _until(lambda: not _group_of(hierarchy, freezing.pid).exists())  # the next one may be another test's
    for process in (parent, child):  # a frozen process does not end by it (v1)
        os.kill(process, signal.SIGKILL)
        _until(lambda process=process: not _runs(process))


def test_what_another_run_uses_is_left_alone(hierarchy, tmp_path):
    with _freezing(hierarchy, tmp_path, *_WITH_CHILD) as freezing:
        child = _frozen_child(hierarchy, freezing.pid)
        with _freezing(hierarchy, tmp_path / "other", "true") as following:
            assert following.wait(60) == 0
        assert _frozen_child(hierarchy, freezing.pid) == child


def test_a_machine_without_a_freezer_is_told_what_it_takes(monkeypatch, capsys, tmp_path):
    for found, message in (
        ([], "freezing: no freezer among this machine's control groups"),
        ([Hierarchy(2, tmp_path / "missing")], "freezing: this user may not make control groups (version 2: "),
    ):
        monkeypatch.setattr("tests.freezing.freezer._mounted", lambda found=found: found)
        assert program.main(["--", "true"]) == 2
        assert capsys.readouterr().err.startswith(message)


def _runs(process: int) -> bool:
    """An orphan's last state may be seen for long, where nobody waits for orphans."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)
