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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["rnig"], "no explanation of 'rnig'. Did you mean 'ring'? Explanations: direct, "),
        (["ring", "--world-size", "0"], "world size '0' must be a number of ranks, at least 1"),
        (["ring", "--world-size", "many"], "world size 'many' must be a number of ranks"),
        (["ring", "--world-size", "100"], "at most 64 ranks can be shown step by step, got 100"),
        (["ring", "--world-size", "40", "--svg", "x.svg"], "Use fewer ranks"),
        (["ring", "--svg", "no/such/folder/x.svg"], "cannot write no/such/folder/x.svg: No such file or directory."),
        (["hierarchical", "--world-size", "4", "--hosts", "2,1"], "--hosts has 3 ranks, --world-size says 4"),
        (["hierarchical", "--hosts", "2,0"], "world size '0' must be a number of ranks"),
        (["tree", "--operation", "broadcast", "--root", "9"], "root must be a rank in 0..3, got 9."),
        (["pipeline", "--backward", "nan"], "'nan' must be above 0, and finite"),
        (["tree", "--root", "1"], "all_reduce has no root, got root=1."),
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
