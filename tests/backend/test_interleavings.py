"""The core's own code, run in every order in which the threads of some ranks can run it: tests/csrc/interleavings.

"The other has gone further" was judged by the syncs that a rank's lane thread had reached, not by what its program had
issued, so an asynchronous all_reduce beside a backward ended in a false mismatch. Tests with real processes hit the
order that shows it once in some seventy steps, and none had such a call. Here no order is left to chance.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKER = ROOT / "tests" / "csrc" / "interleavings"
NAMES = ("futex", "layout", "group", "wait", "sync", "agreement", "move", "early", "all_reduce", "copy", "reducer")


def _compile(source, target):
    points = ["-include", "linux/futex.h", "-include", str(CHECKER / "points.h"), f"-I{ROOT / 'csrc'}"]
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-w", "-ffp-contract=off"]
    subprocess.run([os.environ.get("CC", "cc"), *flags, *points, "-c", str(source), "-o", str(target)], check=True)
    return target


def _link(objects, program):
    subprocess.run([os.environ.get("CC", "cc"), *map(str, objects), "-o", str(program), "-lm"], check=True)
    return program


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """The core and the checker, compiled, by the names of the sources."""
    folder = tmp_path_factory.mktemp("interleavings")
    compiled = {name: _compile(ROOT / "csrc" / f"{name}.c", folder / f"{name}.o") for name in NAMES}
    return {**compiled, "explore": _compile(CHECKER / "explore.c", folder / "explore.o")}


@pytest.fixture(scope="module")
def explore(objects, tmp_path_factory):
    """Runs the checker."""
    program = _link(objects.values(), tmp_path_factory.mktemp("explore") / "explore")

    def run(*arguments):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow(but=("-d -c CC CC",))
@pytest.mark.parametrize("arguments", ["RS SR", "-c RB RB", "-d R R", "-d -c B B", "CR RC", "CCB DDB", "-d -c CC CC"])
def test_every_order_of_two_short_programs(explore, arguments):
    assert "states" in explore(*arguments.split())


@pytest.mark.slow(but=("-p0 ACRA ACRA",))
@pytest.mark.parametrize(
    "arguments",
    [
        "-p1 AR AR",
        "-p0 ARASB ARASB",
        "-p0 -d ARB ARB",
        "-p0 ACRA ACRA",
        pytest.param("-p1 CCC CCC CCC", marks=pytest.mark.slow),
    ],
)
def test_orders_with_few_interruptions_of_longer_programs(explore, arguments):
    assert "states" in explore(*arguments.split())


@pytest.mark.slow
def test_all_pairs_of_programs_of_two_calls(explore):
    assert "in 900 programs" in explore("-p0", "-a2", "-n2")


@pytest.mark.slow(but=("-c -d CDC CDC CDC", "RS RS SR"))
@pytest.mark.parametrize(
    "arguments",
    ["ARARB ARARB ARARB", "-c RASB RASB RASB", "-c -d BB BB BB", "RS RS SR", "CRACB CRACB CRACB", "-c -d CDC CDC CDC"],
)
def test_random_orders_of_three_ranks(explore, arguments):
    assert "1000 random schedules" in explore("-r1000", *arguments.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step", "without", "programs", "found"),
    [
        ("reducer", "if (plx_is_behind(g)) return", "if (0) return", "AR AR", "a false alarm"),
        ("reducer", "if (theirs <= g->step) return PLX_OK;", "return PLX_OK;", "R BR", "all wait for ever"),
        ("reducer", "another = ends_another(b, rank)", "another = 0", "RS SR", "all wait for ever"),
        ("reducer", "if (is_complete(b, rank)) return PLX_OK;", "", "RB RB", "a false alarm"),
        ("reducer", "if (lost) return plx_poison(g, PLX_PEER_LOST, rank);", "", "-d R R", "all wait for ever"),
        ("agreement", "int code = plx_await(g, w, g->open.step);", "int code = PLX_OK;", "CCC CCC", "a false alarm"),
        ("early", "plx_await_rank(g, w, (uint32_t)root, g->step)", "PLX_OK", "C C", "a false alarm"),
        ("early", "code == PLX_OK && !plx_calls_same(g, (uint32_t)root, &call)", "0", "BC CB", "a wrong copy"),
        ("agreement", "if (!plx_calls_same(g, r, &g->open.call))", "if (0)", "CB DB", "different things unheard"),
        ("sync", "    if (all_reached(g, step)) return PLX_OK;", "", "-d -c B B", "all wait for ever"),
    ],
)
def test_without_one_step_it_finds_what_was_seen(objects, tmp_path, name, step, without, programs, found):
    """The first is the rule that there was; the last is a death between arriving and letting all pass."""
    source = (ROOT / "csrc" / f"{name}.c").read_text()
    assert source.count(step) == 1
    (tmp_path / "changed.c").write_text(source.replace(step, without))
    changed = _compile(tmp_path / "changed.c", tmp_path / "changed.o")
    program = _link({**objects, name: changed}.values(), tmp_path / "explore")
    done = subprocess.run([program, "-p1", *programs.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert found in done.stderr
