"""`phalanx docs` prints the address of the documentation."""

from __future__ import annotations

import click

# The pages that messages and docstrings mention, and the pages that users need most.
TOPICS = {
    "articles": "how-to/articles/",
    "checkpoints": "how-to/checkpoints/",
    "command-line": "reference/command-line/",
    "data-parallel": "explanation/data-parallel/",
    "elastic": "how-to/elastic/",
    "errors": "reference/errors/",
    "first-script": "tutorials/first-script/",
    "glossary": "reference/glossary/",
    "hosts": "how-to/hosts/",
    "kubernetes": "how-to/kubernetes/",
    "launching": "reference/launching/",
    "loggers": "how-to/loggers/",
    "mistakes": "how-to/mistakes/",
    "out-of-memory": "how-to/out-of-memory/",
    "pipeline": "how-to/pipeline/",
    "report": "how-to/report/",
    "security": "explanation/security/",
    "slurm": "how-to/slurm/",
    "strategies": "how-to/strategies/",
    "trainer": "how-to/trainer/",
    "variables": "reference/variables/",
    "versions": "reference/versions/",
    "when-it-hangs": "how-to/when-it-hangs/",
    "when-it-is-slow": "how-to/when-it-is-slow/",
}


@click.command("docs", short_help="Print the address of the documentation, or of a page.")
@click.argument("topic", required=False, type=click.Choice(sorted(TOPICS)), metavar="[TOPIC]")
def command(topic: str | None) -> None:
    """Print the address of the documentation. With TOPIC, print the address of its page.

    Error messages name topics: `phalanx docs security` prints the address of the page on security.
    """
    address = read_address()
    click.echo(f"{address}{TOPICS[topic]}" if topic else address)
    if not topic:
        click.echo(f"Topics: {', '.join(sorted(TOPICS))}.", err=True)


def read_address() -> str:
    """Return the address of the documentation from the installed package's metadata, with a slash at the end."""
    from importlib.metadata import metadata

    for entry in metadata("phalanx").get_all("Project-URL") or []:
        label, _, address = entry.partition(", ")
        if label == "Documentation":
            return str(address).rstrip("/") + "/"
    raise click.ClickException(
        "the metadata of this Phalanx installation does not contain the documentation's address."
    )
