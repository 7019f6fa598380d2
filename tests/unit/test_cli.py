import importlib.util
import subprocess
import sys

import pytest

from nemo_rl.cli import OTHER_WORDS, VERBS, run


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


def test_help_of_a_training_command_shows_keys_with_the_schemas_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["grpo", "--help"])
    assert "  grpo.num_prompts_per_step         int, default 32\n" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["grpo", "--help"], ["grpo", "grpo.num_prompt_per_step=4"]])
def test_help_and_a_mistyped_key_import_no_heavy_library(arguments: list[str]) -> None:
    names = ("torch", "vllm", "ray", "transformers", "datasets", "numpy", "aiohttp", "asyncio", "omegaconf")
    code = f"import sys; from nemo_rl.cli import run\ntry: run({arguments})\nfinally: " + (
        f"print([name for name in {names} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    ("word", "verb"), [("train", "grpo"), ("evaluate", "eval"), ("grop", "grpo"), ("veiw", "view")]
)
def test_unknown_command_suggests_what_may_be_meant(word: str, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([word]) == 2
    assert f"no such command: {word!r}; did you mean {verb}?" in capsys.readouterr().err


def test_words_of_others_suggest_commands_that_exist() -> None:
    assert set(OTHER_WORDS.values()) <= VERBS.keys()
    assert not OTHER_WORDS.keys() & VERBS.keys()
