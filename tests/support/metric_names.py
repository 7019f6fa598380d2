"""Names of metrics against the table of all names."""

import re
from collections.abc import Iterable

from nemo_rl.metric_names import METRIC_GROUPS


def find_undocumented(names: Iterable[str]) -> list[str]:
    """Return those of `names` that no row of the table describes."""
    patterns = [_pattern(name) for group in METRIC_GROUPS for name in group.meanings]
    return [name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)]


def _pattern(name: str) -> re.Pattern[str]:
    """Return the pattern of a name, in which a part in angle brackets matches one word without a slash."""
    return re.compile(
        "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in re.split("(<[a-z]+>)", name))
    )
