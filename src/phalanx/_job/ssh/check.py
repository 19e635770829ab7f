"""Find all problems of all hosts before anything starts, and choose the rendezvous address. The functions are pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import phalanx
from phalanx._comm.control.address import Address
from phalanx._job.ssh.facts import Facts

# Parts of ssh's messages, their meaning, and advice. HOST and PYTHON stand for the host and its Python.
_SSH_MESSAGES = (
    ("IDENTIFICATION HAS CHANGED", "its host key has changed",
     "If the machine was reinstalled: ssh-keygen -R HOST, then ssh HOST once. If not, another machine answers."),
    ("Host key verification failed", "ssh does not know its host key",
     "Type ssh HOST once, compare the fingerprint, and answer yes."),
    ("Permission denied (", "ssh needs a password",
     "A job cannot type one. Install your key there: ssh-copy-id HOST (ssh-keygen makes a key); or start ssh-agent."),
    ("Could not resolve", "its name does not resolve", "Correct the name, or give it an address in ~/.ssh/config."),
    ("Connection refused", "no sshd answers there", "Start sshd there, or give its port: --ssh 'ssh -p 2222'."),
    ("timed out", "it does not answer", "Is it switched on? Does ssh HOST work?"),
    ("No route to host", "no route to it", "Is it switched on? Does ssh HOST work?"),
    ("Network is unreachable", "no route to it", "Is it switched on? Does ssh HOST work?"),
    ("No module named", "Phalanx is not installed for PYTHON there",
     "Install it there, or use another Python: --remote-python."),
    ("Permission denied", "PYTHON cannot be executed there", "Choose a Python that you may execute: --remote-python."),
    ("not found", "PYTHON is missing there", "Give the Python that has Phalanx there: --remote-python."),
    ("No such file", "PYTHON is missing there", "Give the Python that has Phalanx there: --remote-python."),
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A `Problem` is a reason why a host cannot run the job, with advice."""

    host: str
    what: str
    advice: str = ""


def explain_ssh(host: str, words: str, exit_code: int | None, python: str) -> Problem:
    """Return why a connection failed, from ssh's output and exit code (None: ssh is still running)."""
    for sign, what, advice in _SSH_MESSAGES:
        if sign in words:
            return Problem(host, what.replace("PYTHON", python), advice.replace("HOST", host))
    last = words.splitlines()[-1].strip() if words else ""
    if exit_code is None and not last:
        return Problem(host, "it does not answer", f"Is it switched on? Does ssh {host} work?")
    return Problem(host, last or f"the connection ended, with exit code {exit_code}", f"Does ssh {host} true work?")


def find_problems(facts: Mapping[str, Facts], folder: str) -> list[Problem]:
    """Return the problems of the hosts that have answered; `facts` are by host name, the first host first."""
    problems = []
    names = list(facts)
    machines: dict[str, str] = {}
    # Compare each host with the majority; in a tie, with the first host.
    pythons = [_minor(each.python) for each in facts.values()]
    torches = [each.torch for each in facts.values()]
    scripts = [each.script for each in facts.values() if each.script]
    for name, own in facts.items():
        other = machines.setdefault(own.machine, name)
        if other != name:
            problems.append(Problem(name, f"it is the same machine as {other}", f"List it once: {other}:N"))
        if own.phalanx != phalanx.__version__:
            what = f"it has Phalanx {own.phalanx}, but the version here is {phalanx.__version__}"
            problems.append(Problem(name, what, "Install the same version."))
            continue
        if (python := _most(pythons)) != _minor(own.python):
            what = f"it has Python {own.python}, and other hosts have {python}"
            problems.append(Problem(name, what, "Use the same version."))
        if (torch := _most(torches)) != own.torch:
            what = f"it has torch {own.torch or '-'}, and other hosts have {torch or 'none'}"
            problems.append(Problem(name, what, "Install the same version."))
        if own.problem:
            path = shlex.quote(folder)
            copy = f"Copy it: rsync -a {path}/ {name}:{path}/   Or name another folder: --remote-dir."
            is_missing = not own.has_folder or (not own.script and any(each.script for each in facts.values()))
            problems.append(Problem(name, own.problem, copy if is_missing else ""))
        elif own.script and (script := _most(scripts)) != own.script:
            same = next(each for each in names if facts[each].script == script)
            path = shlex.quote(folder)
            advice = f"Copy one of them: rsync -a {path}/ {name}:{path}/"
            problems.append(Problem(name, f"its script is not the same as on {same}", advice))
    return problems


def _most(values: Sequence[str]) -> str:
    """Return the most frequent value; in a tie, the first one."""
    return Counter(values).most_common(1)[0][0] if values else ""


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def choose_address(
    candidates: Sequence[tuple[str, str, int]], reached: Mapping[str, Mapping[int, str]], first: str, port: int
) -> tuple[int, list[Problem]]:
    """Choose the rendezvous address: the first host's fastest address that all other hosts have reached.

    `reached` maps each host to its error for each candidate's number, "" for success. Return the number of the chosen
    candidate; if there is none, return -1 and the failed attempts as problems.
    """
    good = [n for n in range(len(candidates)) if all(not answers.get(n, "no answer") for answers in reached.values())]
    if good:
        return max(good, key=lambda n: (candidates[n][2], -n)), []
    problems = []
    for host, answers in reached.items():
        if not answers:
            problems.append(Problem(host, f"it did not report whether it reaches {first}", ""))
        tried = [f"{Address(candidates[n][0], port)}: {answer}" for n, answer in answers.items() if answer]
        if tried:
            advice = f"Open this port (firewall), or name an address of {first} that all hosts reach: --master-addr."
            problems.append(Problem(host, f"it does not reach {first}: {'; '.join(tried)}", advice))
    return -1, problems


def format_table(problems: Sequence[Problem], num_hosts: int) -> str:
    """Return the table of all problems, in the order of `problems`."""
    bad = len({problem.host for problem in problems})
    width = max(len(problem.host) for problem in problems) + 4
    lines = [f"phalanx run: nothing was started: {bad} of {num_hosts} host{'s' * (num_hosts != 1)} cannot run this job"]
    for problem in problems:
        first = f"  {problem.host}".ljust(width)
        for text in (*problem.what.splitlines(), *problem.advice.splitlines()):
            lines.append(first + text)
            first = " " * width
    return "\n".join(lines)
