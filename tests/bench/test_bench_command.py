"""`phalanx bench` on the command line."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from phalanx.cli.bench import command


def bench(*args):
    return CliRunner().invoke(command, list(args), prog_name="phalanx bench")


def test_without_an_argument_it_lists_what_there_is():
    result = bench()
    assert result.exit_code == 0
    assert "collectives  Measure collectives between ranks of this host." in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["linc"], "no benchmark 'linc'. Did you mean 'link'? Benchmarks: collectives, link."),
        (["collectives", "--world-size", "0"], "0 is not in the range 1<=x<=64"),
        (["collectives", "--rounds", "few"], "'few' is not a valid integer range"),
        (["collectives", "--device", "tpu"], "'tpu' is not one of 'cpu', 'cuda'"),
    ],
)
def test_bad_input_is_one_clear_line_before_anything_is_measured(args, message):
    result = bench(*args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_the_help_does_not_import_torch():
    code = (
        "import sys; from click.testing import CliRunner; from phalanx.cli.bench import command; "
        "result = CliRunner().invoke(command, ['collectives', '--help']); "
        "sys.exit(result.exit_code or ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_collectives_are_measured_and_a_device_that_is_not_there_is_refused_by_name(monkeypatch):
    from phalanx._tools.bench import collectives

    monkeypatch.setattr(collectives, "SIZES", (4096, 262144))
    result = bench("collectives", "--rounds=1")
    assert result.exit_code == 0, result.output
    assert "2 ranks on the CPU: milliseconds a call" in result.output
    for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"):
        assert name in result.output
    told = collectives.refuse("cuda", False, 0)
    assert "--device cuda: this PyTorch" in told
    assert "sees no CUDA device" in told
    assert collectives.refuse("cuda", True, 1) == collectives.refuse("cpu", False, 0) == ""
