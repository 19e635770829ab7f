"""`phalanx explain` on the command line: what it prints, draws and refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from phalanx.cli.explain import command


def explain(*args: str) -> Result:
    return CliRunner().invoke(command, list(args), prog_name="phalanx explain")


@pytest.mark.slow
def test_a_long_explanation_is_summarised_unless_it_is_asked_for():
    """`explain ring --world-size 40` printed 6,520 lines."""
    short = explain("ring", "--world-size", "40").output.splitlines()
    assert len(short) < 40
    assert short[0] == "ring all_reduce: 40 ranks, 40 chunks (a-an), 78 steps"
    assert "Step 78 of 78: all-gather 39 of 39, 40 transfers" in short
    assert "  … and 37 more" in short
    assert short[-1] == "--all shows all 78 steps, and what each rank holds: 6,520 lines."
    assert len(explain("ring", "--world-size", "40", "--all").output.splitlines()) == 6520
    for words in (["ring", "--world-size", "8"], ["tree", "--world-size", "12"], ["hierarchical", "--hosts", "3,2"]):
        whole = explain(*words)
        assert "--all tells" not in whole.output
        assert whole.output == explain(*words, "--all").output


def test_a_ring_of_five_is_told_in_eight_steps() -> None:
    result = explain("ring", "--world-size", "5")
    assert result.exit_code == 0
    assert "ring all_reduce: 5 ranks, 5 chunks (a-e), 8 steps" in result.output
    assert "Step 4 of 8: scatter-reduce 4 of 4" in result.output
    assert "Step 5 of 8: all-gather 1 of 4" in result.output
    assert result.output.count("→") == 8 * 5
    assert "\x1b" not in result.output


@pytest.mark.parametrize(
    "algorithm", ["direct", "hierarchical", "halving-doubling", "halving_doubling", "tree", "single"]
)
def test_every_algorithm_is_told(algorithm: str) -> None:
    for world_size in ("1", "2", "3"):
        result = explain(algorithm, "--world-size", world_size)
        assert result.exit_code == 0, result.output
        assert f"all_reduce: {world_size} rank" in result.output


def test_a_drawing_is_written_and_said(tmp_path: Path) -> None:
    file = tmp_path / "ring.svg"
    result = explain("ring", "--world-size", "4", "--svg", str(file))
    assert result.exit_code == 0
    assert file.read_text(encoding="utf-8").startswith("<svg ")
    assert f"Drawn into {file}." in result.stderr


def test_the_hierarchy_takes_hosts_of_unequal_size() -> None:
    result = explain("hierarchical", "--hosts", "2,1")
    assert result.exit_code == 0
    assert "between hosts: scatter-reduce" in result.output


@pytest.mark.slow
def test_the_cost_is_a_table_and_a_plot(tmp_path: Path) -> None:
    file = tmp_path / "cost.svg"
    result = explain("cost", "--world-size", "2..64", "--bytes", "64MiB", "--bandwidth", "1Gbit", "--svg", str(file))
    assert result.exit_code == 0
    assert "30 µs and 1 Gbit/s between hosts" in result.output
    assert "Bytes at the busiest rank" in result.output
    assert "64 ranks" in result.output
    assert "Predicted time" in file.read_text(encoding="utf-8")


def test_a_simulation_says_how_much_was_played_and_whether_it_is_exact() -> None:
    result = explain("simulate", "ring", "--world-size", "1024", "--ranks-per-host", "1", "--bytes", "1MiB")
    assert result.exit_code == 0
    assert "ring all_reduce of 1 MiB over 1024 ranks on 1024 hosts" in result.output
    assert "transfers  2095104, 2048 of them played one by one" in result.output
    assert "exact      yes" in result.output


def test_segments_shorten_what_a_tree_takes() -> None:
    of_two = ("simulate", "tree", "--world-size", "2", "--ranks-per-host", "1", "--bytes", "1MiB", "--latency", "0")
    assert "time       16.9 ms, rank 0 last" in explain(*of_two).output
    in_segments = explain(*of_two, "--segments", "8").output
    assert "tree all_reduce of 1 MiB in 8 segments over 2 ranks on 2 hosts" in in_segments
    assert "time       9.5" in in_segments


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["rnig"], "nothing called 'rnig' to explain. Did you mean 'ring'? There are: cost, direct, "),
        (["ring", "--world-size", "0"], "world size '0' must be a number of ranks, at least 1"),
        (["ring", "--world-size", "many"], "world size 'many' must be a number of ranks"),
        (["ring", "--world-size", "100"], "at most 64 ranks can be shown step by step, got 100"),
        (["ring", "--world-size", "40", "--svg", "x.svg"], "Take fewer ranks"),
        (["ring", "--svg", "no/such/folder/x.svg"], "cannot write no/such/folder/x.svg: No such file or directory."),
        (["hierarchical", "--world-size", "4", "--hosts", "2,1"], "--hosts has 3 ranks, --world-size says 4"),
        (["hierarchical", "--hosts", "2,0"], "world size '0' must be a number of ranks"),
        (["tree", "--operation", "broadcast", "--root", "9"], "root must be a rank in 0..3, got 9."),
        (["tree", "--root", "1"], "all_reduce has no root, got root=1."),
        (["cost", "--bytes", "3 parsecs"], "size '3 parsecs' has the unknown unit 'parsecs'"),
        (["cost", "--latency", "30"], "time '30' needs a unit"),
        (["cost", "--bandwidth", "fast"], "bandwidth 'fast' is not a number with a unit"),
        (["cost", "--world-size", "9..2"], "world sizes '9..2' run backwards; write 2..9."),
        (["cost", "--world-size", "2..99999"], "world size 99999 is too large, at most 65536."),
        (["cost", "--world-size", "7", "--svg", "x.svg"], "a plot needs at least two numbers of ranks above 1"),
        (["simulate", "rong", "--world-size", "4"], "algorithm 'rong' is unknown; did you mean 'ring'?"),
        (["simulate", "ring", "--world-size", "4", "--segments", "0"], "0 is not in the range 1<=x<=1024"),
        (
            ["simulate", "ring", "--world-size", "65536", "--segments", "2"],
            "2 segments over 65536 ranks may be 17179607040 transfers, and all would be played one by one",
        ),
        (["simulate", "ring", "--world-size", "70000"], "can simulate at most 65536 ranks, got 70000"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(args: list[str], message: str) -> None:
    result = explain(*args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_explaining_does_not_import_torch() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from phalanx.cli.explain import command; "
        "result = CliRunner().invoke(command, ['ring']); "
        "sys.exit(result.exit_code or ('torch' in sys.modules) or ('numpy' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
