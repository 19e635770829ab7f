import os
import zipfile
from pathlib import Path

import pytest

from phalanx._job.agent.target import JobTarget, Kind, find_local_rank_flag, find_problem, is_elastic, may_train


def problem(kind: Kind, name: str | Path) -> str:
    found = find_problem(JobTarget(kind, str(name)), os.environ)
    assert found is not None
    return found


def test_a_good_script_module_and_program_have_no_problem(tmp_path: Path) -> None:
    script = tmp_path / "good.py"
    script.write_text("print('it is not run')\nraise SystemExit(1)\n")
    assert find_problem(JobTarget("script", str(script)), os.environ) is None
    assert find_problem(JobTarget("module", "json.tool"), os.environ) is None
    assert find_problem(JobTarget("program", "sh"), os.environ) is None


def test_an_empty_script_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "empty.py").touch()
    assert find_problem(JobTarget("script", str(tmp_path / "empty.py")), os.environ) is None


def test_a_missing_script_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert "no such file" in problem("script", tmp_path / "trian.py")
    assert f"Did you mean '{tmp_path}/train.py'?" in problem("script", tmp_path / "trian.py")


def test_a_name_that_is_not_near_is_not_suggested(tmp_path: Path) -> None:
    for name in ("tensors.py", "rain_data.py", "plan.py"):
        (tmp_path / name).touch()
    assert "Did you mean" not in problem("script", tmp_path / "trian.py")


def test_a_program_given_as_a_script_is_pointed_out() -> None:
    assert "use --no-python" in problem("script", "sh")


def test_a_script_behind_the_word_python_is_told_to_stand_alone() -> None:
    """A fresh reader typed `phalanx run python train.py`, and was told to use --no-python."""
    assert "Leave out 'python3'" in problem("script", "python3")


def test_a_file_given_as_a_module_is_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank started, and failed in the words of runpy."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert problem("module", "train.py") == ("module 'train.py': is a file. Leave out -m, or name the module: -m train")


def test_a_directory_and_an_archive_need_a_main(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    assert "is a directory without __main__.py" in problem("script", tmp_path / "app")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("other.py", "")
    assert "is a ZIP archive without __main__.py" in problem("script", tmp_path / "app.zip")
    (tmp_path / "app" / "__main__.py").write_text("x = (\n")
    assert "__main__.py', line 1: SyntaxError" in problem("script", tmp_path / "app")


def test_bytecode_of_another_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.pyc").write_bytes(b"\x03\xf3\r\n" + bytes(12))
    assert "is not bytecode of Python 3." in problem("script", tmp_path / "old.pyc")


def test_what_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    """A FIFO hung until SIGKILL; of a script in /dev/stdin the command read all, and the ranks ran nothing."""
    os.mkfifo(tmp_path / "fifo")
    read, write = os.pipe()
    for name in (tmp_path / "fifo", "-", f"/dev/fd/{read}"):
        assert "can be read only once. Write the script to a file" in problem("script", name)
    os.close(read)
    os.close(write)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_script_says_so(tmp_path: Path) -> None:
    script = tmp_path / "secret.py"
    script.touch(mode=0)
    assert "cannot be read: Permission denied" in problem("script", script)


def test_a_syntax_error_shows_its_line(tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("x = 1\ny = (x +\n")
    found = problem("script", script)
    assert "line 2: SyntaxError: '(' was never closed" in found
    assert "    y = (x +\n        ^" in found


def test_a_program_that_is_no_python_is_pointed_to_its_option(tmp_path: Path) -> None:
    """`phalanx run /bin/ls` said "line None: SyntaxError", and nothing of --no-python."""
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF\0\0\0")
    assert problem("script", program).endswith(
        "not Python source: it contains null bytes. To run a program, use --no-python."
    )
    program.write_text("#!/bin/sh\nif true; then echo; fi\n")
    assert problem("script", program).endswith("\nTo run a program, use --no-python.")
    script = tmp_path / "train.py"
    script.write_text("if true; then\n")
    assert "--no-python" not in problem("script", script)


def test_a_module_that_is_nowhere_is_found_missing() -> None:
    assert "no module or package 'nosuchpackage'" in problem("module", "nosuchpackage.train")


@pytest.mark.parametrize("name", ["src/train.py", "__main__", "", "a..b"])
def test_what_is_no_modules_name_is_refused(name: str) -> None:
    assert "not a module name" in problem("module", name)


def test_a_missing_program_says_where_to_look() -> None:
    assert "check PATH" in problem("program", "no-such-program")


@pytest.mark.parametrize(
    ("line", "trains"),
    [
        ("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)", True),
        ("model = DistributedDataParallel(model)", True),
        ("phalanx.Trainer(model, loss).fit(data)", True),
        ("@phalanx.elastic.run", True),
        ("dist.all_reduce(torch.ones(2))", False),
        ("os.environ['TORCHDYNAMO_DISABLE'] = '1'\nimport torch.optim", False),
        ("os.environ['TORCH_LOGS'] = 'dynamo'\nimport torch.optim", False),
    ],
)
def test_a_script_or_module_that_may_train_is_known_by_its_words(
    line: str, trains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package" / "inner").mkdir(parents=True)
    for name in ("train.py", "package/inner/train.py", "package/__main__.py"):
        (tmp_path / name).write_text(line)
    assert may_train(JobTarget("script", str(tmp_path / "train.py"))) is trains
    for module in ("train", "package.inner.train", "package"):
        assert may_train(JobTarget("module", module)) is trains
    assert not may_train(JobTarget("module", "json.tool"))
    assert not may_train(JobTarget("program", "train.py"))


def test_a_module_gets_its_local_rank_in_its_own_spelling_as_a_script_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("parser.add_argument('--local_rank')")
    assert find_local_rank_flag(JobTarget("script", "train.py")) == "--local_rank"
    assert find_local_rank_flag(JobTarget("module", "train")) == "--local_rank"
    assert find_local_rank_flag(JobTarget("module", "other")) == "--local-rank"


@pytest.mark.parametrize(
    ("source", "mentions"),
    [
        ("from phalanx import elastic\n", True),
        ("import phalanx\n@phalanx.elastic.run(state)\ndef train(state): ...\n", True),
        ("from phalanx import DistributedSampler, Trainer\n", True),
        ("import phalanx  # not elastic\nfrom lightning import Trainer\n", False),
    ],
)
def test_a_script_is_elastic_that_mentions_it(tmp_path: Path, source: str, mentions: bool) -> None:
    (tmp_path / "train.py").write_text(source)
    assert is_elastic(JobTarget("script", str(tmp_path / "train.py"))) == mentions
