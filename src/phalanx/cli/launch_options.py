"""Convert the launcher's options to click's, for shell completion and the documentation.

`phalanx run` and `phalanx join` parse their words themselves, because importing click would delay a job.
"""

from __future__ import annotations

from typing import Any

import click

from phalanx._job.launch.options import Option


class WordsCommand(click.Command):
    """A command that passes all its words, unparsed, to its function; its options serve only completion and help."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= {
            "add_help_option": False,
            "context_settings": {"ignore_unknown_options": True, "allow_interspersed_args": False},
        }
        super().__init__(*args, **kwargs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words; parse options only for completion."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        ctx.params = {"words": tuple(args)}
        return []


class _OneOf(click.types.StringParamType):
    """A free-text value for which a shell completes some words, as for `N|auto|cpu|gpu`."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        return [click.shell_completion.CompletionItem(word) for word in self.words if word.startswith(incomplete)]


def as_click_option(option: Option) -> click.Option:
    """Return the option with the same names, help and value."""
    flags = [f"--{option.name}", *([f"-{option.short}"] if option.short else [])]
    if not option.value:
        return click.Option(flags, is_flag=True, expose_value=False, help=option.help)
    return click.Option(
        flags, metavar=option.value, expose_value=False, help=option.help, type=_type_of(option.value),
        multiple=option.name == "env",
    )  # fmt: skip


def _type_of(value: str) -> click.ParamType[Any]:
    if value == "DIR":
        return click.Path(file_okay=False)
    if value == "FILE":
        return click.Path()
    return _OneOf([word for word in value.split("|") if word.islower() or (word.isalnum() and not word.isupper())])
