"""Print the tests of what a branch and its working tree change: `scripts/test --changed`.

Chosen are test files that changed, those of tests/unit that mirror a changed module (tests/unit/a/test_b.py for
nemo_rl/a/b.py), and those of tests/unit that import one. Importers of importers are not followed.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNIT = Path("tests/unit")


def main() -> None:
    """Print one path per line; nothing if no test is concerned."""
    base = _git("merge-base", "HEAD", sys.argv[1] if len(sys.argv) > 1 else "main")[0]
    files = {*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")}
    sys.stdout.write("".join(f"{path}\n" for path in choose_tests(files)))


def choose_tests(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the paths of the test files that `changed` paths concern, in order; both relative to `root`."""
    paths = [Path(path) for path in changed if path.endswith(".py") and (root / path).is_file()]
    sources = [path for path in paths if path.parts[0] == "nemo_rl"]
    chosen = {path for path in paths if path.name.startswith("test_")}
    chosen |= {mirror for path in sources if (root / (mirror := _mirror_of(path))).is_file()}
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in sources}
    for test in (root / UNIT).rglob("test_*.py") if modules else ():
        if not modules.isdisjoint(_imported_by(test)):
            chosen.add(test.relative_to(root))
    return sorted(path.as_posix() for path in chosen)


def _mirror_of(source: Path) -> Path:
    inside = source.relative_to("nemo_rl")
    return UNIT / inside.with_name(f"test_{inside.name}")


def _imported_by(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports: of `from a import b` both a and a.b, since b may be a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


if __name__ == "__main__":
    main()
