"""The reference pages are those that scripts/reference writes, and say what `nemo-rl config explain` says."""

import re
import runpy

import pytest

from nemo_rl.config.reference import SCHEMAS, find_key, find_schema, walk_keys
from tests.unit.docs.pages import DOCS, ROOT, text_of

PAGES = runpy.run_path(str(ROOT / "scripts" / "reference"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_as_the_script_writes_it(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run scripts/reference"


@pytest.mark.parametrize("command", ["grpo", "sft"])
def test_the_page_says_what_explain_says(command: str) -> None:
    (found,) = find_key(find_schema(command), "policy.optimizer.kwargs")
    assert f"- `{found.key}`, {found.type}, `{found.default}`: {found.meaning}" in text_of("keys.md")


def test_the_page_has_every_key_or_says_to_which_it_is_equal() -> None:
    text = text_of("keys.md")
    equal = dict(re.findall(r"^- `(\S+)\.\*`: as `(\S+)\.\*`$", text, re.MULTILINE))
    for prefix, names, other in re.findall(r"^- `(\S+)\.\*`: (`.*`) as `(\S+)\.\*`$", text, re.MULTILINE):
        equal |= {f"{prefix}.{name}": f"{other}.{name}" for name in re.findall(r"\w+", names)}
    sections = {part.split("\n", 1)[0]: part for part in text.split("\n## ")[1:]}
    missing = []
    for reference in (found for command in SCHEMAS for found in walk_keys(find_schema(command))):
        key = reference.key
        for _ in range(3):  # a reference may lead to another one
            prefix = max((prefix for prefix in equal if f"{key}.".startswith(f"{prefix}.")), key=len, default="")
            key = equal[prefix] + key.removeprefix(prefix) if prefix else key
        section, _, name = key.partition(".")
        shared = re.search(r"^Equal to those of `\w+`: (.*)\.$", sections[section], re.MULTILINE)
        names = {name, *(f"{name[: match.start()]}.*" for match in re.finditer(r"\.|$", name))}
        if f"- `{key}`" not in sections[section] and not (shared and any(f"`{one}`" in shared[1] for one in names)):
            missing.append(reference.key)
    assert missing == []
