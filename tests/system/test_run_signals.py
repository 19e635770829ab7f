"""A signal may reach the command alone, or every process of a job, in any order: each rank receives it once."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.system.host_commands import commands, numbered
from tests.system.phalanx_command import Running, start, write_script

from phalanx.testing.namespaces import hosts, why_no_hosts

# Each rank counts the signals that reach it until a last SIGUSR2: whatever was under way before that has come by then.
_COUNTS = """
import os, pathlib, signal, sys, time
out, rank, wanted = pathlib.Path(sys.argv[1]), os.environ["RANK"], int(sys.argv[2])
received = []
def receive(number, frame):
    received.append(int(number))
    (out / f"has-{number}-{rank}").touch()

for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, receive)

def is_over():
    return signal.SIGUSR2 in received and (not wanted or wanted in received)

def tell():
    (out / f"ready-{rank}.new").write_text(f"{os.getpid()} {os.getppid()}")
    (out / f"ready-{rank}.new").rename(out / f"ready-{rank}")
"""

_PLAIN = """
tell()
while not is_over():
    time.sleep(0.01)
print("received", *received, flush=True)
"""

_ELASTIC = """
import torch, torch.distributed as dist, phalanx
phalanx.init()
state = phalanx.elastic.State(model=torch.nn.Linear(2, 2))

@phalanx.elastic.run(state)
def train(state):
    while True:
        are_over = torch.tensor(int(is_over()))
        dist.all_reduce(are_over, dist.ReduceOp.MIN)
        state.commit()
        if state.step == 1:
            tell()
        if are_over:
            return

train(state)
print("received", *received, flush=True)
"""


def wait_for_ranks(folder: Path, num_ranks: int) -> list[tuple[int, int]]:
    """The process and the zygote of each rank, once all are ready."""
    while len(list(folder.glob("ready-?"))) < num_ranks:
        time.sleep(0.01)
    found = [(folder / f"ready-{rank}").read_text().split() for rank in range(num_ranks)]
    return [(int(pid), int(zygote)) for pid, zygote in found]


def wait_until_received(folder: Path, number: int, num_ranks: int) -> None:
    while not all((folder / f"has-{int(number)}-{rank}").exists() for rank in range(num_ranks)):
        time.sleep(0.01)


def received(out: str, num_ranks: int) -> list[str]:
    """What the ranks have received, by rank."""
    said: dict[int, str] = {}
    for line in out.splitlines():
        label, _, text = line.partition("] received ")
        if text:
            span = label.partition("[")[2].split(" ")[0]
            first, _, last = span.partition("-")
            said |= dict.fromkeys(range(int(first), int(last or first) + 1), text.partition("   ")[0])
    return [said.get(rank, "") for rank in range(num_ranks)]


def end_well(running: Running, number: int) -> tuple[int, str, str]:
    running.process.send_signal(signal.SIGUSR2)
    ended = running.finish()
    return ended.code, ended.out, ended.err


@pytest.mark.slow(but=("0-False",))
@pytest.mark.parametrize("is_elastic", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_signal_to_every_process_reaches_each_rank_once_in_every_order(
    tmp_path: Path, seed: int, is_elastic: bool
) -> None:
    """The zygote died of it, and its end killed the ranks while they saved."""
    rng = random.Random(seed)
    number = [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP][seed % 3]
    script = write_script(tmp_path, _COUNTS + (_ELASTIC if is_elastic else _PLAIN))
    with start(
        "run", "--shutdown-timeout", "100", "--nproc-per-node", "2", script, str(tmp_path), str(int(number))
    ) as running:
        (first, zygote), (second, _) = wait_for_ranks(tmp_path, 2)
        order = [running.process.pid, zygote, first, second]
        rng.shuffle(order)
        for pid in order:
            os.kill(pid, number)
        code, out, err = end_well(running, number)
    assert received(out, 2) == [f"{int(number)} {int(signal.SIGUSR2)}"] * 2, err
    assert (code, "zygote" in err, "killing" in err) == (0, False, False), err


@pytest.mark.slow(but=("command",))
@pytest.mark.parametrize("who", ["command", "again", "zygote", "rank", "ranks and zygote"])
def test_a_signal_to_some_processes_reaches_the_ranks_as_far_as_it_was_meant_for_them(tmp_path: Path, who: str) -> None:
    number = signal.SIGHUP
    script = write_script(tmp_path, _COUNTS + _PLAIN)
    with start(
        "run", "--shutdown-timeout", "100", "--no-preload", "--nproc-per-node", "2", script, str(tmp_path), "0"
    ) as running:
        (first, zygote), (second, _) = wait_for_ranks(tmp_path, 2)
        command = running.process.pid
        sent = {
            "command": [command], "again": [command, command], "zygote": [zygote], "rank": [second],
            "ranks and zygote": [second, zygote, first],
        }[who]  # fmt: skip
        for pid in sent:
            os.kill(pid, number)
        if command in sent:
            wait_until_received(tmp_path, number, 2)
        code, out, err = end_well(running, number)
    both, last = f"{int(number)} {int(signal.SIGUSR2)}", f"{int(signal.SIGUSR2)}"
    expected = {"zygote": [last, last], "rank": [last, both]}.get(who, [both, both])
    assert received(out, 2) == expected, err
    assert (code, "killing" in err) == (0, False), err


def test_a_job_whose_processes_are_all_signalled_while_torch_is_imported_was_stopped(tmp_path: Path) -> None:
    """The zygote died of it first, and memory was suspected."""
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "import os, signal, time\nos.write(2, f'importing {os.getpid()}\\n'.encode())\nwhile True: time.sleep(0.02)\n"
    )
    with start("run", write_script(tmp_path, "import torch\n"), env={"PYTHONPATH": str(tmp_path)}) as running:
        assert running.process.stderr is not None
        zygote = int(running.process.stderr.readline().split()[1])
        os.kill(zygote, signal.SIGTERM)
        running.process.send_signal(signal.SIGTERM)
        ended = running.finish()
    assert ended.code == 143
    assert "stopped by SIGTERM" in ended.err
    assert "zygote" not in ended.err


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_signal_to_every_process_of_two_hosts_reaches_each_rank_once(tmp_path: Path, seed: int) -> None:
    """It kills no zygote, and that of the first host is not passed on to ranks which receive their own."""
    rng = random.Random(seed)
    number = [signal.SIGTERM, signal.SIGUSR1][seed % 2]
    script = write_script(tmp_path, _COUNTS + _PLAIN)
    with hosts(2) as machines:
        words = (script, str(tmp_path), str(int(number)))
        lines = numbered(machines, "--no-preload", "--shutdown-timeout", "100", script=words, nproc="1")
        with commands(machines, *lines) as jobs:
            found = wait_for_ranks(tmp_path, 2)
            order = [pid for pair, job in zip(found, jobs, strict=True) for pid in (*pair, job.process.pid)]
            rng.shuffle(order)
            for pid in order:
                os.kill(pid, number)
            for job in jobs:
                job.process.send_signal(signal.SIGUSR2)
            ends = [job.finish() for job in jobs]
    assert received(ends[0].out, 2) == [f"{int(number)} {int(signal.SIGUSR2)}"] * 2, ends[0].out
    assert [end.code for end in ends] == [0, 0], ends[0].out


_TRAINER = """
import os, pathlib, sys, time, torch, phalanx
from torch.utils.data import DataLoader, TensorDataset
out = pathlib.Path(sys.argv[1])

def loss(result, target):
    if not (out / "go").exists():
        time.sleep(0.01)
    return torch.nn.functional.mse_loss(result, target)

def tell(trainer, loss):
    name = f"ready-{os.environ['RANK']}"
    if not (out / name).exists():
        (out / f"{name}.new").write_text(f"{os.getpid()} {os.getppid()}")
        (out / f"{name}.new").rename(out / name)

torch.manual_seed(0)
x = torch.randn(1200, 4)
model = torch.nn.Linear(4, 1)
trainer = phalanx.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.01), loss, strategy="multi_worker_mirrored", max_epochs=4,
    checkpoint=out / "checkpoint", callbacks=phalanx.trainer.LambdaCallback(on_step_end=tell), show_progress=True,
)
trainer.fit(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 12, shuffle=True))
print(f"finished at step {trainer.step}")
"""


def steps_saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").glob("*-step-*"))


@pytest.mark.slow
@pytest.mark.parametrize("who", ["command", "one rank", *(f"all processes, {seed}" for seed in range(4))])
def test_a_trainer_saves_at_a_sigterm_and_asks_to_be_started_again(tmp_path: Path, who: str) -> None:
    """Nothing was saved, and the job ended with 143."""
    script = write_script(tmp_path, _TRAINER)
    words = ("run", "--shutdown-timeout", "100", "--max-restarts", "2", "--nproc-per-node", "2", script, str(tmp_path))
    with start(*words) as running:
        (first, zygote), (second, _) = wait_for_ranks(tmp_path, 2)
        order = [running.process.pid, zygote, first, second]
        random.Random(who).shuffle(order)
        for pid in {"command": [running.process.pid], "one rank": [second]}.get(who, order):
            os.kill(pid, signal.SIGTERM)
        ended = running.finish()
    assert ended.code == os.EX_TEMPFAIL, ended.err
    assert "ranks 0, 1 exited with code 75" in ended.err or "stopped by SIGTERM" in ended.err
    assert "First failure" not in ended.err
    assert f"saved in {tmp_path}/checkpoint: the same command resumes there; exit code 75" in ended.out
    (saved,) = steps_saved(tmp_path)
    assert f"stopped after step {saved.rpartition('-')[2]}, 0 of 4 epochs: SIGTERM" in ended.out
    (tmp_path / "go").touch()
    with start(*words) as running:
        again = running.finish()
    assert again.code == 0, again.err
    assert f"resumes from {tmp_path}/checkpoint/{saved}" in again.out
    assert "finished at step 400" in again.out


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
@pytest.mark.slow
def test_a_trainer_on_two_hosts_saves_when_one_rank_of_one_host_receives_sigterm(tmp_path: Path) -> None:
    script = write_script(tmp_path, _TRAINER)
    with hosts(2) as machines:
        lines = numbered(machines, "--shutdown-timeout", "100", script=(script, str(tmp_path)), nproc="1")
        with commands(machines, *lines) as jobs:
            os.kill(wait_for_ranks(tmp_path, 2)[1][0], signal.SIGTERM)
            ends = [job.finish() for job in jobs]
    assert [end.code for end in ends] == [os.EX_TEMPFAIL] * 2, ends[0].out
    assert len(steps_saved(tmp_path)) == 1
    assert "exit code 75 (EX_TEMPFAIL)" in ends[0].out


def test_ranks_that_end_with_75_are_no_failure_and_are_not_started_again(tmp_path: Path) -> None:
    script = write_script(
        tmp_path, "import os, sys\nprint('begun')\nsys.exit(75 if os.environ['RANK'] == '1' else 0)\n"
    )
    with start("run", "--no-preload", "--max-restarts", "3", "--nproc-per-node", "2", script) as running:
        ended = running.finish()
    assert ended.code == os.EX_TEMPFAIL
    assert ended.by_rank == [(0, "begun"), (1, "begun")]
    assert ended.err == "phalanx run: rank 1 exited with code 75 (EX_TEMPFAIL): start the job again later\n"
