"""`phalanx checkpoint inspect` says what is in a checkpoint, of every form, and what is damaged."""

import contextlib
import json
import os
import pty
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

import phalanx.checkpoint.sharded  # noqa: F401 - imported once, before the test is watched for what it leaves
from phalanx.checkpoint import CheckpointManager, inspect, load_checkpoint, save_checkpoint
from phalanx.cli.commands import group
from phalanx.errors import CheckpointError

STATE = {
    "model": {"weight": torch.ones(300, 20), "scale": torch.tensor(1, dtype=torch.bfloat16)},
    "epoch": 3,
    "betas": (0.9, 0.99),
    "long": "x" * 100,
}


def run(*words):
    return CliRunner().invoke(group, ["checkpoint", "inspect", *map(str, words)])


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_of_a_run_is_shown(tmp_path, sharded):
    manager = CheckpointManager(tmp_path / "run", sharded=sharded)
    manager.save(7, {"old": 1})
    path = manager.save(9, STATE)
    for asked in (path, tmp_path / "run"):
        contents = inspect(asked, verify=True)
        assert (contents.step, contents.world_size, contents.damage) == (9, 1, ())
        assert contents.form == ("sharded" if sharded else "whole")
        told = {item.name: (item.dtype, item.shape, item.nbytes) for item in contents.items if item.dtype}
        assert told == {"model.weight": ("float32", (300, 20), 24000), "model.scale": ("bfloat16", (), 2)}
        values = {item.name: item.value for item in contents.items if not item.dtype}
        assert values == {"epoch": "3", "betas": "(0.9, 0.99)", "long": "'" + "x" * 58 + "…"}
    result = run(tmp_path / "run", "--verify")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert "model.weight\tfloat32\t300 × 20\t24 kB" in lines  # noqa: RUF001
    assert "epoch\t3" in lines
    assert "step 9, saved by 1 rank, " in lines[-1]
    assert lines[-1].endswith("all checksums match, older ones: 00000001-step-7")
    assert json.loads(run(path, "--json").output)["step"] == 9
    loaded = load_checkpoint(tmp_path / "run")
    assert torch.equal(loaded["model"]["weight"], STATE["model"]["weight"])
    assert loaded["betas"] == (0.9, 0.99)
    assert load_checkpoint(manager.checkpoints()[1]) == {"old": 1}


def test_a_file_of_torch_save_is_shown(tmp_path):
    save_checkpoint(tmp_path / "one.pt", STATE)
    contents = inspect(tmp_path / "one.pt", verify=True)
    assert (contents.form, contents.step, contents.damage) == ("torch.save", None, ())
    assert contents.items[0].shape == (300, 20)
    torch.save([torch.ones(2), 5], tmp_path / "two.pt")
    assert [item.name for item in inspect(tmp_path / "two.pt").items] == [".0", ".1"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_tensors_that_are_not_strided_are_shown_in_a_new_process(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # jagged tensors import what sets it
    corner = torch.zeros(500, 500).index_put_((torch.tensor(3), torch.tensor(4)), torch.tensor(1.0))
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    tensors = {
        "quantized": torch.quantize_per_tensor(torch.ones(3, 4), 0.1, 3, torch.qint8),
        "nested": torch.nested.nested_tensor(rows),
        "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "sparse_coo": corner.to_sparse(),
        "sparse_csr": corner.to_sparse_csr(),
        "sparse_bsc": corner.to_sparse_bsc((2, 2)),
    }
    torch.save(tensors, tmp_path / "odd.pt")
    command = [sys.executable, "-m", "phalanx", "checkpoint", "inspect", str(tmp_path / "odd.pt")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    shown = {
        "quantized\tqint8\t3 × 4\t12 B",  # noqa: RUF001
        "nested\tfloat32\t2 × ? × 3\t72 B",  # noqa: RUF001
        "jagged\tfloat32\t2 × ? × 3\t72 B",  # noqa: RUF001
        "sparse_coo\tfloat32\t500 × 500\t20 B",  # noqa: RUF001
        "sparse_csr\tfloat32\t500 × 500\t4.02 kB",  # noqa: RUF001
        "sparse_bsc\tfloat32\t500 × 500\t2.03 kB",  # noqa: RUF001
    }
    assert shown <= set(told.stdout.splitlines()), (told.stdout, told.stderr)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_folder_of_torch_distributed_checkpoint_is_shown(tmp_path):
    dcp.save({"w": torch.ones(2, 3), "n": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    contents = inspect(tmp_path / "dcp")
    assert contents.form == "torch.distributed.checkpoint"
    assert {item.name: item.shape for item in contents.items} == {"w": (2, 3), "n": ()}


@pytest.mark.parametrize("sharded", [False, True])
def test_what_is_damaged_is_named_and_the_exit_code_tells(tmp_path, sharded):
    path = CheckpointManager(tmp_path / "run", sharded=sharded).save(1, STATE)
    file = max(path.iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert run(path).exit_code == 0, "it reads no tensor"
    result = run(path, "--verify")
    assert result.exit_code == 1
    assert f"{file} does not match its checksum" in result.stderr


def test_a_terminal_shows_that_the_checksums_match(tmp_path):
    """It was shown in a pipe only."""
    path = CheckpointManager(tmp_path / "run").save(1, STATE)
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "phalanx", "checkpoint", "inspect", "--verify", str(path)]
    with open(ours, "rb", buffering=0) as terminal:
        subprocess.run(words, stdout=theirs, check=True, timeout=600)
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: all who held the terminal have gone
            while chunk := terminal.read(65536):
                shown += chunk
    assert b"all checksums match" in shown


def test_what_is_no_checkpoint_is_told_in_a_line(tmp_path):
    """A cut file was "Invalid argument", a text file "KeyError: 101"; of a missing state.pt the folder was named."""
    (tmp_path / "notes.txt").write_text("no checkpoint")
    (tmp_path / "empty.pt").touch()
    torch.save(STATE, tmp_path / "cut.pt")
    content = (tmp_path / "cut.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(content[: len(content) // 2])
    path = CheckpointManager(tmp_path / "run").save(1, STATE)
    (path / "state.pt").unlink()
    for name, message in (
        ("none", "none could not be read: No such file"),
        (".", "there is no checkpoint in"),
        ("notes.txt", "notes.txt begins with b'no c', not with the b'PK"),
        ("empty.pt", "empty.pt is empty."),
        ("cut.pt", f"cut.pt is cut off after {len(content) // 2} bytes"),
        ("run", f"{path}/state.pt could not be read: No such file"),
    ):
        for options in ([], ["--verify"]) if name != "run" else ([],):
            result = run(tmp_path / name, *options)
            assert result.exit_code == 1
            assert message in result.stderr
            assert len(result.stderr.splitlines()) == 1
        with pytest.raises(CheckpointError):
            inspect(tmp_path / name)
