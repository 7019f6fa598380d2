"""NeMo-RL's keys in `nemo-rl config explain` and the reference pages: other names, and what becomes of them."""

from nemo_rl.compat.tables import Rule, load_rules, load_table
from nemo_rl.config.reference import format_value, matches

ACTIONS = {
    "drop": "accepted without effect",
    "note": "accepted with a note",
    "refuse": "refused",
    "default": "accepted",
}


def describe_spellings(key: str) -> list[str]:
    """Return a line on the other names that recipes of NeMo-RL have for a key; most keys have the same name there."""
    spellings = find_spellings(key)
    return [f"NeMo-RL: {', '.join(spellings)}"] if spellings else []


def find_spellings(key: str) -> list[str]:
    """Return the other names that recipes of NeMo-RL have for a key."""
    tables = load_table("releases")
    algorithm, _, name = key.partition(".")
    names = {key, f"{{algorithm}}.{name}"} if algorithm in ("grpo", "distillation") else {key}
    return [old for table in ("moved", "renamed") for old, new in tables[table].items() if new in names]


def explain_key(key: str) -> str:
    """Format what becomes of a key that only recipes of NeMo-RL have; empty for any other."""
    tables = load_table("releases")
    for table in ("moved", "renamed"):
        if key in tables[table]:
            return f"{key}\n  a name of NeMo-RL for {tables[table][key]}\n"
    if (rule := find_rule(key)) is None:
        return ""
    cause = "" if rule.cause is None else f": {rule.cause.text}"
    kept = "" if not rule.inert else f"; allowed: {', '.join(map(format_value, rule.inert))}"
    return f"{key}\n  a key of NeMo-RL, {ACTIONS[rule.action]}{cause}{kept}\n"


def find_rule(key: str) -> Rule | None:
    """Return the table's row for a key."""
    parts = key.split(".")
    return next((rule for rule in load_rules() if matches(rule.key.replace("*", "<name>").split("."), parts)), None)
