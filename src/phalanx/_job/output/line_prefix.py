"""Fill in the text before a rank's lines that the user chooses by torchrun's --log-line-prefix-template."""

from __future__ import annotations

from collections.abc import Mapping
from string import Template

VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


def find_template(given: str, environ: Mapping[str, str]) -> str:
    """Return the template of the command line, or else of the environment; empty if there is none."""
    return given or environ.get(VARIABLE, "")


def fill(template: str, *, rank: int, local_rank: int, role: str, host: str) -> str:
    """Return the template with its macros replaced; other text is unchanged, as in torchrun."""
    return Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank, hostname=host)
