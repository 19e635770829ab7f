"""Expand the prefix of a rank's lines, from torchrun's --log-line-prefix-template."""

from __future__ import annotations

from collections.abc import Mapping
from string import Template

VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


def find_template(given: str, environ: Mapping[str, str]) -> str:
    """Return the template of the command line, or of the environment; empty if neither has one."""
    return given or environ.get(VARIABLE, "")


def fill(template: str, *, rank: int, local_rank: int, role: str, host: str) -> str:
    """Return the template with its variables replaced; other text is unchanged, as in torchrun."""
    return Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank, hostname=host)
