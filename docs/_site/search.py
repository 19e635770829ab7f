"""A hook of mkdocs: the search also finds a page by words that it does not contain, those of aliases.yml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

ALIASES = Path(__file__).with_name("aliases.yml")
# Signatures repeat every word many times; who wants them searches for a name.
_LESS = {"reference/python/": 0.4, "reference/glossary/": 0.4, "explanation/architecture/": 0.4}


def on_post_build(*, config: Any, **_: Any) -> None:
    """Add to the first entry of each page its aliases, and to every entry its weight."""
    aliases = yaml.safe_load(ALIASES.read_text(encoding="utf-8"))
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    for entry in index["docs"]:
        if words := aliases.pop(entry["location"], None):
            entry["aliases"] = words
        for prefix, weight in _LESS.items():
            if entry["location"].startswith(prefix):
                entry["boost"] = weight
    if aliases:
        raise ValueError(f"{ALIASES} names pages that are not there: {', '.join(aliases)}")
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")
