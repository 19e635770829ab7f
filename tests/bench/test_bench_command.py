"""`phalanx bench` on the command line."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner

from phalanx.cli.bench import command


def bench(*args):
    return CliRunner().invoke(command, list(args), prog_name="phalanx bench")


def test_without_an_argument_it_lists_what_there_is():
    result = bench()
    assert result.exit_code == 0
    assert "dp-vs-ddp    DataParallel against DistributedDataParallel and one process." in result.output


@pytest.mark.slow
def test_a_comparison_is_printed_as_json_and_drawn(tmp_path):
    file = tmp_path / "bars.svg"
    result = bench("dp-vs-ddp", "--rounds=1", "--steps=1", "--workload=many-small", "--json", "--svg", str(file))
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [one["workload"]["name"] for one in told["comparisons"]] == ["many-small"]
    assert all(one["explanation"] for one in told["comparisons"])
    assert ET.fromstring(file.read_text(encoding="utf-8")).tag.endswith("svg")
    assert f"Drawn into {file}." in result.stderr
    # The seconds before the result were silent where stderr is no terminal.
    assert "round 1 of 1: many-small, DataParallel" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["dp-vs-dpp"],
            "nothing called 'dp-vs-dpp' to measure. Did you mean 'dp-vs-ddp'? There are: collectives, dp-vs-ddp, link.",
        ),
        (["dp-vs-ddp", "--world-size", "1"], "1 is not in the range 2<=x<=64"),
        (["dp-vs-ddp", "--rounds", "0"], "0 is not in the range"),
        (["dp-vs-ddp", "--steps", "few"], "'few' is not a valid integer range"),
        (["dp-vs-ddp", "--workload", "huge"], "'huge' is not one of 'many-small', 'few-large'"),
        (["dp-vs-ddp", "--svg", "no/such/folder/x.svg"], "cannot write no/such/folder/x.svg: there is no folder"),
    ],
)
def test_bad_input_is_one_clear_line_before_anything_is_measured(args, message):
    result = bench(*args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_an_interrupt_ends_it_and_every_process_that_it_started():
    # As Ctrl-C does, in the middle of a round; the police fixture looks for what is left.
    code = (
        "import signal, sys\n"
        "from phalanx.bench import contestants\n"
        "from phalanx.testing import ranks\n"
        "from phalanx.cli.__main__ import main\n"
        "await_all = ranks._await\n"
        "def interrupted(processes, deadline, **options):\n"
        "    assert all(process.is_alive() for process in processes)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    await_all(processes, deadline, **options)\n"
        "ranks._await = interrupted\n"
        "sys.argv = ['phalanx', 'bench', 'dp-vs-ddp', '--steps', '10000']\n"
        "main()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert run.returncode == 1
    assert run.stderr.endswith("Aborted!\n")
    assert run.stdout == ""


def test_the_help_does_not_import_torch():
    code = (
        "import sys; from click.testing import CliRunner; from phalanx.cli.bench import command; "
        "result = CliRunner().invoke(command, ['dp-vs-ddp', '--help']); "
        "sys.exit(result.exit_code or ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_collectives_are_measured_and_a_device_that_is_not_there_is_refused_by_name(monkeypatch):
    from phalanx.bench import collectives

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
