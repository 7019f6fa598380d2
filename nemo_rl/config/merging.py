"""How one layer of a recipe lies over another."""

from typing import Any

REPLACE = "_override_"  # NeMo-RL's marker: this mapping replaces the one below instead of being merged into it


def merge_layers(base: Any, top: Any) -> Any:
    """`top` over `base`: mappings key by key, anything else replaced. Neither is changed."""
    if not isinstance(top, dict):
        return [merge_layers(None, item) for item in top] if isinstance(top, list) else top
    replaces = top.get(REPLACE, False) or not isinstance(base, dict)
    result: dict[Any, Any] = {} if replaces else dict(base)
    for key, value in top.items():
        if key != REPLACE:
            result[key] = merge_layers(result.get(key), value)
    return result
