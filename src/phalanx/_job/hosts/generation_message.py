"""Encode a generation of an elastic job as plain data, as the first host sends it to the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from phalanx._job.agent.elastic_actions import BeginGeneration, LostRank
from phalanx._job.agent.environment import Place
from phalanx._job.agent.generation import Generation, HostPart


def generation_to_json(begun: BeginGeneration) -> dict[str, Any]:
    """Return a generation as plain data."""
    return asdict(begun)


def generation_from_json(fields: Mapping[str, Any]) -> BeginGeneration:
    """Read a generation from a message of the first host.

    Raises:
        KeyError, TypeError, ValueError: the message has no generation.
    """
    parts = tuple(
        HostPart(
            int(part["member"]),
            tuple(int(slot) for slot in part["slots"]),
            tuple(int(slot) for slot in part["forked"]),
            Place(**part["place"]),
        )
        for part in fields["generation"]["parts"]
    )
    generation = Generation(int(fields["generation"]["number"]), parts)
    return BeginGeneration(
        generation, tuple(int(slot) for slot in fields["holders"]), tuple(LostRank(**lost) for lost in fields["lost"])
    )
