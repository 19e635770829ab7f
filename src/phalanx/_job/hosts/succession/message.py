"""Encode and decode the messages between agents that elect a leader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx._job.hosts.succession.config import Config, Electorate, Term
from phalanx._job.hosts.succession.voter import ConfigAccepted, Reply, TermPromised, TermRefused


def config_to_json(config: Config) -> dict[str, Any]:
    """Return a config as plain data."""
    return {
        "term": list(config.term),
        "version": config.version,
        "primary": config.primary,
        "standbys": list(config.standbys),
        "electorates": [[sorted(each.voters), each.casting] for each in config.electorates],
        "addresses": [list(each) for each in config.addresses],
    }


def config_from_json(fields: Mapping[str, Any]) -> Config:
    """Decode the result of `config_to_json`.

    Raises:
        KeyError, TypeError, ValueError: the data is invalid.
    """
    electorates = [Electorate(frozenset(map(int, voters)), int(casting)) for voters, casting in fields["electorates"]]
    if not electorates:
        raise ValueError("a config without an electorate")
    return Config(
        term_from_json(fields["term"]),
        int(fields["version"]),
        int(fields["primary"]),
        tuple(map(int, fields["standbys"])),
        tuple(electorates),
        tuple((int(member), str(address)) for member, address in fields["addresses"]),
    )


def term_from_json(fields: Any) -> Term:
    """Decode a term.

    Raises:
        TypeError, ValueError: the data is invalid.
    """
    count, member = fields
    return int(count), int(member)


def reply_to_json(reply: Reply) -> dict[str, Any]:
    """Return a reply as plain data."""
    body: dict[str, Any] = {"voter": reply.voter, "term": list(reply.term)}
    if isinstance(reply, ConfigAccepted):
        return {**body, "reply": "accepted", "version": reply.version}
    if isinstance(reply, TermPromised):
        newest = None if reply.newest is None else config_to_json(reply.newest)
        return {**body, "reply": "promised", "newest": newest}
    return {**body, "reply": "refused"}


def reply_from_json(fields: Mapping[str, Any]) -> Reply:
    """Decode the result of `reply_to_json`.

    Raises:
        KeyError, TypeError, ValueError: the data is invalid.
    """
    voter, term = int(fields["voter"]), term_from_json(fields["term"])
    if fields["reply"] == "accepted":
        return ConfigAccepted(voter, term, int(fields["version"]))
    if fields["reply"] == "promised":
        return TermPromised(voter, term, None if fields["newest"] is None else config_from_json(fields["newest"]))
    if fields["reply"] == "refused":
        return TermRefused(voter, term)
    raise ValueError("no reply of a voter")
