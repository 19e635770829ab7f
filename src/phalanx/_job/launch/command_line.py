"""Parse the command line of `phalanx run` into settings, or report all its problems at once.

The functions are pure: they do not inspect the machine, so that tests can cover every rule.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phalanx._job.agent.settings import Settings, refuse
from phalanx._job.agent.target import JobTarget, Kind
from phalanx._job.launch.options import OPTIONS, REFUSED, Option, explain_unknown, find_names

if TYPE_CHECKING:
    from phalanx._job.schedulers.allocation import Allocation

SSH_OPTIONS = ("hosts", "hostfile", "ssh", "remote-dir", "remote-python", "detach")  # `phalanx._job.ssh` reads them
_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torchrun reads it without --shutdown-timeout


def parse(
    words: Sequence[str], environ: Mapping[str, str] | None = None, *, old_launcher: bool = False
) -> Settings | None:
    """Return the settings like `read_settings`, or refuse the command line.

    Raises:
        LaunchError: lists all problems of the command line, one per line; its exit code is 2.
    """
    problems: list[str] = []
    settings = read_settings(words, environ or {}, problems, old_launcher=old_launcher)
    refuse(problems)
    return settings


def read_settings(
    words: Sequence[str],
    environ: Mapping[str, str],
    problems: list[str],
    *,
    old_launcher: bool = False,
    found: Allocation | None = None,
) -> Settings | None:
    """Return the settings of the words after `phalanx run`, which override the PET_ variables in `environ`.

    Return None if the words ask for help. All words after the script belong to the script. Append each problem to
    `problems`, and leave the default in its field; the name of the target is empty if it is unknown.

    `old_launcher`: the words are for torch.distributed.launch, which by default starts one rank, and passes the local
    rank as an argument. `found`: the scheduler's allocation, which rendezvous options override.
    """
    given: dict[str, Any] = {}
    rest = _read_words(words, given, problems)
    if rest is None:
        return None
    _read_environment(environ, given, problems)
    kinds: list[Kind] = ["module"] if "module" in given else []
    if "no-python" in given:
        kinds.append("program")
    if "run-path" in given:
        kinds = ["script"]  # overrides the others, as in torchrun
    problems += [
        f"--{name}: only the command `phalanx run` starts a job over ssh" for name in SSH_OPTIONS if name in given
    ]
    if len(kinds) > 1:
        problems.append("-m and --no-python: a job is a module or a program, not both")
    if not (rest or problems):
        problems.append("no script. Name one: phalanx run train.py")
    fields: dict[str, Any] = {
        option.field.removeprefix("not:"): not option.field.startswith("not:")
        if not option.value
        else given[option.name]
        for option in OPTIONS
        if option.field and not option.field.startswith("kind:") and option.name in given
    }
    if old_launcher:
        fields = {"nproc_per_node": "1", "local_rank_argument": True, **fields}
        if kinds == ["program"] and fields["local_rank_argument"]:
            problems.append("--no-python: a program gets no --local-rank. Add --use-env, or use `phalanx run`")
    rendezvous = None
    if found is not None or given.keys() & {"nnodes", "rdzv-backend", "node-rank", "witness"}:
        from phalanx._job.launch.rendezvous_options import (
            decide_rendezvous,  # here, because a job on one host does not need it
        )

        rendezvous = decide_rendezvous(given, problems, found)
    name, *arguments = rest or [""]
    target = JobTarget(kinds[0] if kinds else "script", name, tuple(arguments))
    return Settings(target, rendezvous=rendezvous, **fields)


def split_options(words: Sequence[str], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of the options `names` before the target, and all other words.

    The value of a flag is "". Unknown options, and options whose value is missing, stay in the words, so that `parse`
    reports them.
    """
    options = {option.name: option for option in OPTIONS}
    options.update({option.short: option for option in OPTIONS if option.short})
    rest, kept, values = list(words), [], {}
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        flag, separator, value = word.partition("=")
        name = flag.lstrip("-").replace("_", "-")
        if name not in options and len(full := find_names(name)) == 1:
            name = full[0]
        option = options.get(name)
        has_value = option is not None and bool(option.value)
        if option is not None and option.name in names and (separator or rest or not has_value):
            values[option.name] = rest.pop(0) if has_value and not separator else value
            continue
        kept.append(word)
        if has_value and not separator and rest:
            kept.append(rest.pop(0))
    return values, [*kept, *rest]


def _read_words(words: Sequence[str], given: dict[str, Any], problems: list[str]) -> list[str] | None:
    """Parse the options at the front of `words`; return the rest, beginning with the script, or None for help."""
    options = {option.name: option for option in OPTIONS}
    options.update({option.short: option for option in OPTIONS if option.short})
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if word in ("-h", "--help"):
            return None
        flag, separator, attached = word.partition("=")
        if not word.startswith("--") and not separator and word[1:2] in "rt" and word[2:3].isdecimal():
            flag, separator, attached = word[:2], "=", word[2:]  # -r3
        name = flag.lstrip("-").replace("_", "-")
        option = options.get(name)
        if option is None and flag.startswith("--") and len(names := find_names(name)) == 1:
            option = options.get(names[0])
        if option is None or flag.startswith("--") == (name == option.short):
            # The value of an unknown flag can't be distinguished from the script: stop at the first unknown flag.
            problems.append(explain_unknown(flag, name))
            return []
        if not option.value:
            if separator:
                problems.append(f"{flag}: takes no value, got {attached!r}")
            given[option.name] = True
            continue
        if not separator:
            if not rest:
                problems.append(f"{flag}: needs a value: {flag} {option.value}")
                return []
            attached = rest.pop(0)
        _read_value(option, flag, attached, given, problems)
    return rest


def _read_value(option: Option, name: str, text: str, given: dict[str, Any], problems: list[str]) -> None:
    try:
        value = option.read(text)
        given[option.name] = {**given.get(option.name, {}), **value} if option.name == "env" else value
    except ValueError as error:
        problems.append(f"{name}: {error}")
        given.pop(option.name, None)


_OF_OTHER_NODES = ("nnodes", "node-rank", "rdzv-backend", "rdzv-endpoint", "master-addr", "master-port")


def _read_environment(environ: Mapping[str, str], given: dict[str, Any], problems: list[str]) -> None:
    """Read the options that torchrun reads from variables such as PET_NNODES, unless the command line has them.

    --standalone overrides all variables that name other nodes.
    """
    overridden = {*given, *(_OF_OTHER_NODES if "standalone" in given else ())}
    for option in OPTIONS:
        name = f"PET_{option.name.replace('-', '_').upper()}"
        text = environ.get(name, "")
        if not option.torchruns or not text or option.name in overridden:
            continue
        if option.value:
            _read_value(option, f"{name} in the environment", text, given, problems)
        elif text.isdecimal():
            if int(text):
                given[option.name] = True
        else:
            problems.append(f"{name} in the environment: must be 0 or 1, got {text!r}")
    for refused, (advice, nothing) in REFUSED.items():
        name = f"PET_{refused.replace('-', '_').upper()}"
        if environ.get(name, "") not in ("", nothing):
            problems.append(f"{name} in the environment: not in this version: {advice}")
    if "shutdown-timeout" not in given and (text := environ.get(_SHUTDOWN_TIMEOUT, "")):
        option = next(option for option in OPTIONS if option.name == "shutdown-timeout")
        _read_value(option, f"{_SHUTDOWN_TIMEOUT} in the environment", text, given, problems)
