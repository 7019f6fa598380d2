"""The container files copy what exists and install as docs/install.md does; hadolint has no objection."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.unit.docs.pages import ROOT, text_of

FILES = sorted((ROOT / "containers").glob("*.Containerfile"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_installs_as_the_page_does(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("\\\n", "")
    sources = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()]
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert (ROOT / "nemo_rl" / "constraints.txt").is_file()
    (extra,) = re.findall(r"'/source\[(\w+)\]' -c /source/nemo_rl/constraints.txt", text)
    assert extra in EXTRAS
    assert f"pip install '.[{extra}]'" in text_of("install.md")
    engines = re.findall(r"nemo-rl constraints --engine (\w+)", text)
    assert engines == (["cpu"] if extra == "cpu" else [])


def test_hadolint_has_no_objection() -> None:
    hadolint = shutil.which("hadolint") or pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, *FILES], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout
