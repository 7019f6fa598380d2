import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_module_describes_itself() -> None:
    module_sentences = runpy.run_path(str(ROOT / "scripts" / "tree"))["module_sentences"]
    directories = {path.parent for path in (ROOT / "nemo_rl").rglob("*.py")}
    found = [(directory, name, sentence) for directory in directories for name, sentence in module_sentences(directory)]
    assert len(found) > 100
    assert [f"{directory}/{name}" for directory, name, sentence in found if not sentence] == []
