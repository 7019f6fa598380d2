"""The reference pages are those that scripts/reference writes, and say what `nemo-rl config explain` says."""

import runpy

import pytest

from nemo_rl.config.reference import find_key, find_schema
from tests.unit.docs.pages import DOCS, ROOT, text_of

PAGES = runpy.run_path(str(ROOT / "scripts" / "reference"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_as_the_script_writes_it(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run scripts/reference"


@pytest.mark.parametrize("command", ["grpo", "sft"])
def test_the_page_says_what_explain_says(command: str) -> None:
    (found,) = find_key(find_schema(command), "policy.optimizer.kwargs")
    assert f"| `{found.key}` | {found.type} | `{found.default}` | {found.meaning} |" in text_of("keys.md")
