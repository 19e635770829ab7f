"""Make the scripts by which a shell completes the options of `phalanx run`, from the list of them."""

from __future__ import annotations

from phalanx._job.launch.options import OPTIONS

_BASH = """\
_phalanx() {{
    local word=${{COMP_WORDS[COMP_CWORD]}}
    if [[ ${{COMP_WORDS[1]}} == run && $word == -* ]]; then
        COMPREPLY=($(compgen -W "{flags}" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _phalanx phalanx
"""
_ZSH = """\
#compdef phalanx
autoload -U +X bashcompinit && bashcompinit
"""
_TCSH = """\
complete phalanx 'p/1/(run)/' 'c/--/({names})/' 'p/*/f/'
"""


def make_completion(shell: str) -> str:
    """Return the script for bash, zsh or tcsh."""
    names = [option.name for option in OPTIONS] + ["help"]
    if shell == "tcsh":
        return _TCSH.format(names=" ".join(names))
    bash = _BASH.format(flags=" ".join(f"--{name}" for name in names))
    return _ZSH + bash if shell == "zsh" else bash
