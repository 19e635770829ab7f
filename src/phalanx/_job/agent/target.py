"""Check the ranks' target (a script, a module or a program) before any process is started."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import stat
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["script", "module", "program"]
Form = Literal["source", "bytecode", "folder", "archive"]

MAGIC_NUMBER = importlib.util.MAGIC_NUMBER
BYTECODE_HEADER = 16  # bytes before the code object: magic number, flags, date and size or hash of the source
_READ_ONCE = (
    "Every rank reads the script, and standard input or a pipe can be read only once. Write the script to a file: "
    "cat > /tmp/script.py; phalanx run /tmp/script.py"
)

_ELASTIC = re.compile(rb"phalanx\.(elastic|Trainer)\b|from phalanx import [^#\n]*\b(elastic|Trainer)\b")
_NEAR = 0.75  # minimum difflib ratio for a suggestion: two swapped letters in a four-letter name


@dataclass(frozen=True)
class JobTarget:
    """A `JobTarget` is a script's path, a module's name or a program, with its arguments."""

    kind: Kind
    name: str
    arguments: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """Return the command that would start the target without Phalanx."""
        if self.kind == "program":
            return (self.name, *self.arguments)
        return (sys.executable, *(("-m",) if self.kind == "module" else ()), self.name, *self.arguments)


@dataclass(frozen=True)
class RankSetup:
    """A `RankSetup` has the settings that a rank applies before it runs the target; the agent sends them."""

    rank: int
    environment: dict[str, str]
    cpus: tuple[int, ...]  # the cores to which the process is pinned; empty for all


def find_local_rank_flag(target: JobTarget) -> str:
    """Return the option by which `target` reads its local rank: --local_rank if the script has only that spelling."""
    source = read_source(target)
    only_underscore = b"--local_rank" in source and b"--local-rank" not in source
    return "--local_rank" if only_underscore else "--local-rank"


def may_train(target: JobTarget) -> bool:
    """Return whether the zygote should import the dependencies of torch's optimizers before it forks the ranks.

    That import takes nearly as long as torch itself, and each rank that trains needs it. The answer is whether the
    script mentions an optimizer, DistributedDataParallel, a Trainer or `phalanx.elastic`; other files of the program
    are not read. It is False if the script mentions an environment variable that the import reads: the script may set
    it first.
    """
    source = read_source(target)
    trains = any(word in source for word in (b"optim", b"DistributedDataParallel", b"Trainer", b"elastic"))
    return trains and not any(word in source for word in (b"TORCHDYNAMO", b"TORCHINDUCTOR", b"TORCH_"))


def is_elastic(target: JobTarget) -> bool:
    """Return whether the script mentions `phalanx.elastic`, or the Trainer, which uses it."""
    return _ELASTIC.search(read_source(target)) is not None


def read_source(target: JobTarget) -> bytes:
    """Return the source of a script, or of a module below the working directory; empty for any other target."""
    paths = [target.name, os.path.join(target.name, "__main__.py")] if target.kind == "script" else []
    if target.kind == "module":
        path = os.path.join(*target.name.split("."))
        paths = [f"{path}.py", os.path.join(path, "__main__.py")]
    for path in paths:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            return file.read()
    return b""


def find_problem(target: JobTarget, environment: Mapping[str, str]) -> str | None:
    """Return why `target` cannot run in `environment`, as text for the user; None if no problem is found.

    Runs no code of `target`.
    """
    if target.kind == "script":
        return _find_script_problem(target.name)
    if target.kind == "program":
        if _which(target.name, environment.get("PATH")) is None:
            return f"program {target.name!r}: not found, or not executable. Give its path, or check PATH."
        return None
    return _find_module_problem(target.name, environment.get("PYTHONPATH", ""))


def find_form(path: str) -> Form:
    """Return how `python PATH` would run the file or folder at `path`.

    Raises:
        OSError: the file cannot be read.
    """
    if os.path.isdir(path):
        return "folder"
    with open(path, "rb") as file:
        start = file.read(len(MAGIC_NUMBER))
        if path.endswith(".pyc") or start == MAGIC_NUMBER:
            return "bytecode"
        is_text = b"\0" not in start + file.read()
    if is_text:
        return "source"
    import zipimport  # here, because most scripts are text

    try:
        zipimport.zipimporter(path)
    except zipimport.ZipImportError:
        return "source"
    return "archive"


def _find_script_problem(path: str) -> str | None:
    if path == "-":
        return f"script '-': {_READ_ONCE}"
    try:
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return f"script {path!r}: is not a regular file. {_READ_ONCE}"
        form = find_form(path)
        if form == "folder":
            main = os.path.join(path, "__main__.py")
            if os.path.exists(main):
                return _find_source_problem(main)
            if os.path.exists(f"{main}c"):
                return None
            return f"script {path!r}: is a directory without __main__.py. Name the file in it; a package runs with -m."
        if form == "archive":
            import zipimport

            if zipimport.zipimporter(path).find_spec("__main__") is None:
                return (
                    f"script {path!r}: is a ZIP archive without __main__.py. Build it from its folder: `python -m "
                    "zipapp FOLDER -m MODULE:FUNCTION`."
                )
            return None
        if form == "bytecode":
            with open(path, "rb") as file:
                if file.read(len(MAGIC_NUMBER)) != MAGIC_NUMBER:
                    version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
                    return f"script {path!r}: is not bytecode of {version}, which runs it here. Name its source file."
            return None
    except FileNotFoundError:
        program = _which(path)
        if program and os.path.basename(path).startswith("python"):
            advice = f" Leave out {path!r}: {sys.executable} runs the script anyway."
        else:
            advice = f" To run the program {program}, use --no-python." if program else _suggest_neighbour(path)
        return f"script {path!r}: no such file in {os.getcwd()}.{advice}"
    except OSError as error:
        return f"script {path!r}: cannot be read: {error.strerror}. Check its permissions: ls -l {path}"
    return _find_source_problem(path)


def _find_source_problem(path: str) -> str | None:
    with open(path, "rb") as file:
        source = file.read()
    hint = "" if path.endswith(".py") else " To run a program, use --no-python."
    if b"\0" in source:  # Python versions report null bytes differently
        return f"script {path!r}: not Python source: it contains null bytes.{hint}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks show them when they compile the script
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        text = (error.text or "").rstrip()
        caret = f"\n    {' ' * (max(1, error.offset or 1) - 1)}^" if text else ""
        shown = f"\n    {text}{caret}" if text else ""
        line = f", line {error.lineno}" if error.lineno else ""
        return f"script {path!r}{line}: {type(error).__name__}: {error.msg}{shown}{hint and chr(10) + hint[1:]}"
    except ValueError as error:
        return f"script {path!r}: not Python source: {error}.{hint}"
    return None


def _which(name: str, path: str | None = None) -> str | None:
    import shutil  # here, because it loads three compression libraries, and a script needs none of it

    return shutil.which(name, path=path)


def _find_module_problem(name: str, python_path: str) -> str | None:
    """Return why a module cannot be found; check only its top-level package, since more would import that package."""
    if name == "__main__" or not all(part.isidentifier() for part in name.split(".")):
        return f"module {name!r}: not a module name (no .py, no slash). To run a file, leave out -m."
    if name.endswith(".py") and os.path.isfile(name):  # may also name module py of package train
        return f"module {name!r}: is a file. Leave out -m, or name the module: -m {name.removesuffix('.py')}"
    import importlib.machinery

    top = name.partition(".")[0]
    folders = [os.getcwd(), *filter(None, python_path.split(os.pathsep))]
    here = importlib.machinery.PathFinder.find_spec(top, folders)
    if here is None and importlib.util.find_spec(top) is None:
        return f"module {name!r}: no module or package {top!r} in {os.getcwd()} or among the installed ones."
    return None


def _suggest_neighbour(path: str) -> str:
    """Return a hint with the script in the same folder whose name is most similar, apart from the suffix."""
    import difflib

    folder = os.path.dirname(path) or "."
    try:
        names = os.listdir(folder)
    except OSError:  # the folder does not exist, or cannot be read
        return ""
    stems = [name.removesuffix(".py") for name in names if name.endswith(".py")]
    near = difflib.get_close_matches(os.path.basename(path).removesuffix(".py"), stems, n=1, cutoff=_NEAR)
    return f" Did you mean {os.path.join(os.path.dirname(path), f'{near[0]}.py')!r}?" if near else ""
