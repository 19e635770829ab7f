"""More hosts than a process may have connections to are refused at the start."""

import os
import resource
import subprocess
import sys

import pytest

from phalanx._comm.control.key import Key

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only there is the limit of a process alone lowered")


def test_more_hosts_than_open_files_allow_are_refused_with_what_to_type():
    """A job of 500 hosts began, and the last of them were left waiting at a coordinator that had no room."""
    where = ["--nnodes", "500", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", "29617"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "phalanx",
            "run",
            *where,
            "--no-preload",
            "--no-python",
            "--nproc-per-node",
            "1",
            "true",
        ],
        env={**os.environ, "PHALANX_KEY": str(Key(bytes(range(32))))},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024)),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "500 hosts need 998 connections to this one, and no more than 768 are allowed here" in done.stderr
    assert "Raise the limit to 1332 or more on this host: `ulimit -Hn`" in done.stderr
