"""`phalanx key` creates the key with which the hosts of a job authenticate each other."""

from __future__ import annotations

import os

import click


@click.command("key", short_help="Create the key that authenticates the hosts of a job.")
@click.argument("file", required=False, type=click.Path(dir_okay=False))
@click.option("--print", "shows_key", is_flag=True, help="Print the key, to paste it elsewhere.")
@click.option("--path", "shows_path", is_flag=True, help="Print only the path of the key.")
@click.option("--fingerprint", "shows_fingerprint", is_flag=True, help="Print eight characters that identify the key.")
@click.pass_context
def command(ctx: click.Context, file: str | None, shows_key: bool, shows_path: bool, shows_fingerprint: bool) -> None:
    """Create a key in FILE or in your configuration folder, unless it exists.

    Every host of a job needs the same key: copy the file (scp), or keep it in a home folder that the hosts share.
    Commands read it from --key-file, PHALANX_KEY_FILE, PHALANX_KEY, or your configuration folder, in this order.
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
