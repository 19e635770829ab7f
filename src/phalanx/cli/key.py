"""`phalanx key` makes the secret by which the hosts of a job know each other."""

from __future__ import annotations

import os

import click


@click.command("key", short_help="Make the key by which the hosts of a job know each other.")
@click.argument("file", required=False, type=click.Path(dir_okay=False))
@click.option("--print", "shows_key", is_flag=True, help="Print the key itself, to be typed or pasted elsewhere.")
@click.option("--path", "shows_path", is_flag=True, help="Print only where the key lies.")
@click.option("--fingerprint", "shows_fingerprint", is_flag=True, help="Print eight characters by which keys differ.")
@click.pass_context
def command(ctx: click.Context, file: str | None, shows_key: bool, shows_path: bool, shows_fingerprint: bool) -> None:
    """Make a key, once, in FILE or in your configuration folder; an existing one is left as it is.

    Every host of a job needs the same key: copy the file (scp), or have it in a home that the hosts share. It is looked
    for in --key-file, PHALANX_KEY_FILE, PHALANX_KEY, and then your configuration folder.
    """
    from phalanx._comm.control.key_file import default_path, make_key
    from phalanx.errors import AuthenticationError

    path = file or str(default_path(os.environ))
    try:
        key, is_new = make_key(path)
    except AuthenticationError as error:
        click.echo(error, err=True)
        ctx.exit(1)
    if shows_key:
        click.echo(str(key))
    elif shows_path:
        click.echo(path)
    elif shows_fingerprint:
        click.echo(key.fingerprint)
    else:
        click.echo(f"{'A new key is' if is_new else 'The key is'} in {path} (fingerprint {key.fingerprint}).")
        click.echo(f"The other hosts need the same one: scp -p {path} HOST:{path}")
