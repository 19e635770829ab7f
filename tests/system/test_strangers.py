"""A job on two hosts, and a third host without a key that holds connections and half-sent frames at its port."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from tests.system.host_commands import commands, finish, numbered
from tests.system.phalanx_command import write_script

from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

_MOST_OPEN, _MOST_MIB = 3700, 100
# 800 connections that say a byte, and 134 that begin a frame of 9 MiB before anything is authenticated; whatever is
# closed is opened again. Its parent ends it.
_ATTACK = """
import select, socket, struct, sys, time
place = sys.argv[1], int(sys.argv[2])
greeting = b"\\xff" + bytes(8) + b"\\x7f\\x03\\x01" + b"CURVE".ljust(20, b"\\0") + bytes(32)
half = greeting + b"\\x06" + struct.pack(">Q", 9 << 20) + bytes(1 << 16)
held = {}
while True:
    for number in range(934):
        said = b"\\xff" if number < 800 else half
        try:
            if number not in held:
                held[number] = socket.create_connection(place, 5.0)
            held[number].settimeout(0.0)
            held[number].send(said)
        except BlockingIOError:
            pass
        except OSError:
            if number in held:
                held.pop(number).close()
    print("here", flush=True)
    time.sleep(0.1)
"""
_TRAIN = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("phalanx")
over, steps = torch.zeros(1), 0
while not over:
    over[0] = os.path.exists(sys.argv[1])
    dist.all_reduce(over)
    steps += 1
    if steps == 20:
        print("trains", flush=True)
dist.destroy_process_group()
"""


def mebibytes(pid: int) -> float:
    """The memory that is this process's own part, by the kernel's count (PSS)."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(text.partition("\nPss:")[2].split()[0]) / 1024


@pytest.mark.slow
def test_strangers_who_were_there_first_keep_no_host_out_and_cost_a_bounded_amount(tmp_path: Path) -> None:
    over = tmp_path / "over"
    with hosts(3) as machines, contextlib.ExitStack() as stack:
        first, second = numbered(machines[:2], script=(write_script(tmp_path, _TRAIN), str(over)), nproc="1")
        (here,) = stack.enter_context(commands(machines[:1], first))
        here.read_until("waiting for ")
        before = mebibytes(here.process.pid)
        port = first[first.index("--master-port") + 1]
        line = [*machines[2].command, sys.executable, "-c", _ATTACK, machines[0].address, port]
        strangers = stack.enter_context(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
        stack.callback(strangers.kill)
        assert strangers.stdout is not None
        assert strangers.stdout.readline() == "here\n"
        (there,) = stack.enter_context(commands(machines[1:2], second))
        here.read_until_all("trains", 2)
        assert mebibytes(here.process.pid) - before < _MOST_MIB
        assert len(list(Path(f"/proc/{here.process.pid}/fd").iterdir())) < _MOST_OPEN
        over.touch()
        ends = finish([here, there])
    assert [end.code for end in ends] == [0, 0], ends[0].out
