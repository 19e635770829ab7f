"""What every host is sent, from the command line and the environment of here."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from phalanx._job.ssh.host_list import HostEntry
from phalanx._job.ssh.request import Request, read_request
from phalanx.errors import LaunchError


def read(*words: str, environ: dict[str, str] | None = None) -> Request:
    request = read_request(
        [*words, "--ssh", shlex.quote(sys.executable), "train.py", "--hosts", "mine"], environ or {}, "/home/you"
    )
    assert request is not None
    return request


def refuse(*words: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(LaunchError) as caught:
        read(*words, environ=environ)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_options_of_ssh_stay_here_and_the_others_go_to_every_host() -> None:
    request = read("--hosts", "a,b:3", "--nproc-per-node=2", "--remote-dir", "/data", "--remote-python=python3")
    assert request.hosts == (HostEntry("a"), HostEntry("b", "3"))
    assert request.words == ("--nnodes=2", "--nproc-per-node=2", "train.py", "--hosts", "mine")
    assert (request.folder, request.python, request.ssh) == ("/data", "python3", (sys.executable,))
    assert read("--hosts", "a").folder == "/home/you"
    assert read("--hosts", "a").python == sys.executable


def test_variables_of_here_are_passed_on_but_not_the_key_and_not_what_belongs_to_one_host() -> None:
    environ = {
        "NCCL_DEBUG": "INFO", "GLOO_TIMEOUT": "3", "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0,1",
        "PHALANX_LOG": "debug", "TORCH_SHOW_CPP_STACKTRACES": "1", "PYTHONPATH": "/lib",
    }  # fmt: skip
    others = {
        "PHALANX_KEY": "plx-secret", "PHALANX_KEY_FILE": "/key", "NCCL_SOCKET_IFNAME": "eth7", "RANK": "3",
        "GLOO_SOCKET_IFNAME": "eth7", "HOME": "/home/you", "PATH": "/bin", "SECRET": "x", "PHALANX_STORE": "/s",
    }  # fmt: skip
    assert read("--hosts", "a,b", environ=environ | others).passed == environ


def test_env_names_a_variable_with_its_value_here() -> None:
    request = read("--hosts", "a", "--env", "A", "--env", "B=2", "--env", "C", environ={"A": "1"})
    assert request.env == {"A": "1", "B": "2"}


def test_torchruns_variables_count_here_and_there() -> None:
    request = read("--hosts", "a,b", environ={"PET_MAX_RESTARTS": "3"})
    assert request.settings.max_restarts == 3
    assert request.passed == {"PET_MAX_RESTARTS": "3"}


def test_the_number_of_hosts_is_that_of_the_list_or_may_change() -> None:
    assert not read("--hosts", "a,b").is_elastic
    assert read("--hosts", "a").settings.rendezvous is None
    assert read("--hosts", "a,b,c,d", "--nnodes", "2:4").is_elastic
    assert read("--hosts", "a,b,c,d", "--nnodes", "2:3").is_elastic  # one waits as a spare
    assert "--nnodes 3, but 2 hosts are listed" in refuse("--hosts", "a,b", "--nnodes", "3")
    assert "List at least 3" in refuse("--hosts", "a,b", "--nnodes", "3:4")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--node-rank", "1"), "--hosts and --node-rank: hosts are numbered in the order of the list"),
        (("--rdzv-endpoint", "a:1"), "--master-addr chooses one of its addresses"),
        (("--rdzv-backend=c10d",), "--hosts and --rdzv-backend"),
        (("--standalone",), "a standalone job runs on one host"),
        (("--local-addr", "10.0.0.1"), "--hosts and --local-addr"),
        (("--hostfile", "x"), "--hosts and --hostfile: give one of the two"),
        (("--remote-dir", "data"), "must be an absolute path"),
        (("--remote-python", "~/bin/python"), "must be an absolute path, or a name"),
        (("--max-restarts", "-1"), "--max-restarts: must be a number"),
        (("--detach",), "--detach: name a folder on the hosts for the output: --log-dir DIR"),
        (
            ("--detach", "--log-dir", "logs", "--nnodes", "1:2", "--max-restarts", "3"),
            "--detach and --max-restarts: this command restarts the lost hosts of an elastic job",
        ),
    ],
)
def test_what_contradicts_the_list_is_refused_by_name(words: tuple[str, ...], expected: str) -> None:
    assert expected in refuse("--hosts", "a,b", *words)


def test_a_detached_job_may_restart_its_ranks_and_be_elastic() -> None:
    assert read("--hosts", "a,b", "--detach", "--log-dir", "logs", "--max-restarts", "3").detach
    assert read("--hosts", "a,b", "--detach", "--log-dir", "logs", "--nnodes", "1:2").is_elastic
    assert not read("--hosts", "a,b").detach


def test_a_contradiction_in_the_environment_is_refused_as_well() -> None:
    assert "--hosts and --node-rank" in refuse("--hosts", "a,b", environ={"PET_NODE_RANK": "1"})


def test_a_blank_in_the_list_is_recognized() -> None:
    with pytest.raises(LaunchError, match=r"--hosts a:2 ,b:2: a space ends the list"):
        read_request(["--hosts", "a:2", ",b:2", "train.py"], {}, "/")


def test_all_problems_are_told_at_once() -> None:
    told = refuse("--hosts", "a,a", "--standalone", "--remote-dir", "x", "--nproc-per-node", "no")
    assert len(told.splitlines()) == 4
    assert all(line.startswith("phalanx run: --") for line in told.splitlines())


def test_options_of_ssh_without_hosts_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"--remote-dir: only for a job over ssh"):
        read_request(["--remote-dir", "/x", "train.py"], {}, "/")
    with pytest.raises(LaunchError, match=r"--detach: only for a job over ssh"):
        read_request(["--detach", "train.py"], {}, "/")


def test_a_hostfile_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"none.txt: No such file"):
        read_request(["--hostfile", str(tmp_path / "none.txt"), "train.py"], {}, "/")


def test_the_command_here_must_be_there() -> None:
    with pytest.raises(LaunchError, match=r"--ssh 'no-such-ssh -p 1': no such command here"):
        read_request(["--hosts", "a", "--ssh", "no-such-ssh -p 1", "train.py"], {}, "/")


def test_quotes_of_the_ssh_command_must_be_closed() -> None:
    """It ended with a traceback."""
    with pytest.raises(LaunchError, match=r"--ssh \"ssh -i 'my key\": No closing quotation"):
        read_request(["--hosts", "a", "--ssh", "ssh -i 'my key", "train.py"], {}, "/")
