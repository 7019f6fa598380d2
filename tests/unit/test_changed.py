from pathlib import Path

from tests.support.changed import choose_tests


def write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_chosen_are_changed_tests_mirrors_and_direct_importers(tmp_path: Path) -> None:
    for path in ("nemo_rl/a/b.py", "nemo_rl/a/c.py", "tests/unit/a/test_b.py", "tests/contracts/test_d.py"):
        write(tmp_path, path)
    write(tmp_path, "tests/unit/test_by_name.py", "from nemo_rl.a.b import thing\n")
    write(tmp_path, "tests/unit/test_by_module.py", "def test():\n    from nemo_rl.a import b\n")
    write(tmp_path, "tests/unit/test_other.py", "import nemo_rl.a.c\n")
    changed = ["nemo_rl/a/b.py", "tests/contracts/test_d.py", "README.md", "nemo_rl/a/deleted.py"]
    assert choose_tests(changed, tmp_path) == [
        "tests/contracts/test_d.py",
        "tests/unit/a/test_b.py",
        "tests/unit/test_by_module.py",
        "tests/unit/test_by_name.py",
    ]


def test_without_python_nothing_is_chosen(tmp_path: Path) -> None:
    write(tmp_path, "tests/unit/test_other.py", "import nemo_rl\n")
    assert choose_tests(["README.md"], tmp_path) == []
