"""How many routed experts a model has, by the config.json beside its weights."""

from __future__ import annotations

import json
from pathlib import Path

#: what model configurations call it
KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
_MOST_BYTES = 1 << 24  # real ones have some thousands


def expert_count(folder: Path) -> tuple[str, int] | None:
    """The key in config.json of a folder that counts the experts, and its value.

    `text_config`, which models of text and images have, goes before the rest. None where there is
    no such file or key, or where keys contradict each other.
    """
    file = folder / "config.json"
    try:
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            return None
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    for part in (config.get("text_config"), config):
        if isinstance(part, dict):
            found = {key: part[key] for key in KEYS if _is_count(part.get(key))}
            if found:
                agreed = len(set(found.values())) == 1
                return next(iter(found.items())) if agreed else None
    return None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
