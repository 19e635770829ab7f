"""Run the whole suite with each pair of Python and PyTorch, and write docs/reference/compatibility.md: `make matrix`.

Each pair gets a fresh environment (`make test PYTHON=... TORCH=...`), which is removed when its tests are over, unless
`--keep` says otherwise. The page is written after each pair; rows of pairs that this run does not try stay as they are.
It tests the files of the checkout; the row names the commit, with a "+" where files differ from it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "compatibility.md"

# Every supported Python with at least one PyTorch, every supported PyTorch with at least one Python.
PAIRS = (
    "python3.11=2.13.0",
    "/usr/bin/python3.11=2.13.0",
    "python3.10=2.14.1",
    "python3.12=2.15.0",
    "python3.13=2.15.0",
    "python3.14=2.13.0",
    "python3.15=2.15.0",
)

_COLUMNS = ("Python", "PyTorch", "System", "As", "Programs", "Passed", "Failed", "Skipped", "Minutes", "Commit", "Day")
_HEAD = """# Tested versions of Python and PyTorch

The pairs of Python and PyTorch on which all tests ran, and the results.

`make matrix` writes this page. For each pair it makes a fresh environment, runs the small programs of
`tests/programs` and then the whole suite, and records the results. `make test-all TORCH=2.15.0
PYTHON=python3.13` runs one pair and writes nothing. Newer versions of PyTorch are untested. With such a
PyTorch, Phalanx warns once, in the log and in `phalanx doctor`, and continues.

The column "Programs" counts the tests of `tests/programs` that ended with the right numbers. The column "As" is the
user of the tests: root, or a user without privileges. A skipped test names its reason: there is no GPU, or a
privilege, a package or a feature of this PyTorch is missing. A row without counts is a run of `tests/programs` alone.

`tests/compatibility/sid FOLDER` runs `make demo test`, or another command, in Debian sid, with Python 3.14 or 3.15.

"""

_END = """
## Next steps

- [Versions and support](versions.md)
- [Conformance](../explanation/conformance.md)
"""


@dataclass(frozen=True)
class Row:
    """The result of one pair."""

    python: str
    torch: str
    system: str
    user: str
    programs: str = "-"
    passed: str = "-"
    failed: str = "-"
    skipped: str = "-"
    minutes: str = "-"
    commit: str = "-"
    day: str = "-"
    failures: tuple[str, ...] = field(default=(), compare=False)

    @property
    def pair(self) -> tuple[str, str]:
        return self.python, self.torch

    def cells(self) -> tuple[str, ...]:
        return (
            self.python, self.torch, self.system, self.user, self.programs, self.passed, self.failed, self.skipped,
            self.minutes, self.commit, self.day,
        )  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run the pairs that are asked for; 1 if a test failed or a pair could not be tried."""
    options = _parse(arguments)
    ended_well = True
    for pair in options.pairs:
        python, _, torch = pair.partition("=")
        if not (interpreter := shutil.which(python)):
            print(f"make matrix: there is no {python} here; {pair} is left out.", file=sys.stderr)
            ended_well = False
            continue
        row = try_pair(interpreter, torch, options)
        print(" | ".join(row.cells()), flush=True)
        ended_well = ended_well and row.failed == "0"
        PAGE.write_text(render(merge(read(PAGE.read_text() if PAGE.exists() else ""), row)))
    return 0 if ended_well else 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make matrix", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "pairs", nargs="*", default=list(PAIRS), help="as python3.12=2.15.0; by default all of the page"
    )
    parser.add_argument("--make", default="make", help="the make program")
    parser.add_argument(
        "--keep", action="store_true", help="use the environments that were kept, and keep them (up to 6 GB each)"
    )
    parser.add_argument(
        "--tests", default="", help="hand these words to pytest, to try a part; the page has the counts"
    )
    return parser.parse_args(arguments)


def try_pair(python: str, torch: str, options: argparse.Namespace) -> Row:
    """Make the environment, run the programs and the suite, and remove the environment."""
    version = subprocess.run(
        [python, "-c", "import platform; print(platform.python_version())"], check=True, capture_output=True, text=True
    ).stdout.strip()
    row = Row(version, torch, _system(), "root" if os.geteuid() == 0 else "user", commit=_commit(), day=_today())
    make = [options.make, "-C", str(ROOT), f"PYTHON={python}", f"TORCH={torch}"]
    environment = ROOT / ".venvs" / f"python{version}-torch{torch}"
    if not options.keep:
        shutil.rmtree(environment, ignore_errors=True)
    try:
        print(f"== Python {version}, PyTorch {torch}: set-up", flush=True)
        if subprocess.run([*make, "setup"]).returncode:
            return replace(row, failed="set-up", failures=("make setup",))
        print(f"== Python {version}, PyTorch {torch}: programs, then all tests", flush=True)
        programs = counts(_output_of([*make, "test", "ARGS=tests/programs"]))
        begin = time.monotonic()
        output = _output_of([*make, "test-all", f"ARGS={options.tests}"])
        minutes = (time.monotonic() - begin) / 60
    finally:
        if not options.keep:
            shutil.rmtree(environment, ignore_errors=True)
    tests = counts(output)
    return replace(
        row,
        programs=f"{programs['passed']} of {sum(programs.values())}",
        passed=str(tests["passed"]),
        failed=str(tests["failed"] + tests["error"]) if sum(tests.values()) else "no test ran",
        skipped=str(tests["skipped"]),
        minutes=f"{minutes:.0f}",
        failures=failures(output),
    )


def _output_of(command: Sequence[str]) -> str:
    """Run the command, show what it prints as it comes, and return it."""
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            said.append(line)
    return "".join(said)


def counts(output: str) -> dict[str, int]:
    """The numbers of pytest's closing line, zero where it names none."""
    closing = re.findall(r"^[^\n]*\b\d+ (?:passed|failed|skipped|errors?)\b[^\n]* in [\d.]+s[^\n]*$", output, re.M)
    found = {
        kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", closing[-1] if closing else "")
    }
    return {kind: found.get(kind, 0) for kind in ("passed", "failed", "skipped", "error")}


def failures(output: str) -> tuple[str, ...]:
    """The tests that pytest's summary names as failed."""
    names = re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\](?= - |$))?)", output, re.M)
    return tuple(sorted(set(names)))


def read(page: str) -> list[Row]:
    """The rows of a page that this command has written, with the failures listed below the table."""
    rows = []
    failed = {
        (python, torch): tuple(re.findall(r"^- `(.*)`$", names, re.M))
        for python, torch, names in re.findall(r"^Python (\S+), PyTorch (\S+):\n\n((?:- `.*`\n)+)", page, re.M)
    }
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(_COLUMNS) and cells[0][:1].isdigit():
            row = Row(*cells)
            rows.append(replace(row, failures=failed.get(row.pair, ())))
    return rows


def merge(rows: Sequence[Row], new: Row) -> list[Row]:
    """The rows with `new` in the place of the one of its pair, in the order of the versions."""
    kept = [row for row in rows if row.pair != new.pair]
    return sorted([*kept, new], key=lambda row: [tuple(map(int, re.findall(r"\d+", version))) for version in row.pair])


def render(rows: Sequence[Row]) -> str:
    """The page."""
    lines = [
        "| " + " | ".join(cells) + " |" for cells in (_COLUMNS, ("---",) * len(_COLUMNS), *(r.cells() for r in rows))
    ]
    failed = "".join(
        f"\nPython {row.python}, PyTorch {row.torch}:\n\n" + "".join(f"- `{name}`\n" for name in row.failures)
        for row in rows
        if row.failures
    )
    return _HEAD + "\n".join(lines) + "\n" + ("\n## Tests that failed\n" + failed if failed else "") + _END


def _system() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return f"{name}, {platform.machine()}"


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--", ".", f":!{PAGE.relative_to(ROOT)}")
    return (commit or "none") + ("+" if changed else "")


def _today() -> str:
    return datetime.date.today().isoformat()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
