import importlib.util

import pytest

from nemo_rl.cli import VERBS, run


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in VERBS)


def test_no_command_and_an_unknown_one_are_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert run(["colect"]) == 2
    assert "collect" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in VERBS if importlib.util.find_spec(VERBS[name].module)])
def test_every_command_explains_itself(name: str) -> None:
    with pytest.raises(SystemExit) as end:
        run([name, "--help"])
    assert end.value.code == 0
