"""Templates of harnesses, filled with what a hostile prompt may say."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.environments.harness import Harness, HarnessConfig, HarnessError, Launch, Places, check_harness
from nemo_rl.errors import ConfigError
from nemo_rl.types import Message, Prompt
from tests.unit.experience.rollout_setup import prompt

URL, KEY = "http://127.0.0.1:1/sessions/s/v1", "s"
HOSTILE = 'it\'s $(touch x) "}, {"a": `id`\n{api_key} {workdir} 東京'


def asked(*texts: str) -> Prompt:
    return replace(prompt(0), messages=tuple(Message("user", text) for text in texts))


def prepared(directory: Path, text: str, **keys: Any) -> Launch:
    places = Places(directory / "home", directory / "work")
    for each in (places.home, places.workdir):
        each.mkdir(exist_ok=True)
    return Harness(HarnessConfig(**keys)).prepare(asked(text), URL, KEY, places)


def test_a_prompt_is_one_argument_whatever_it_says(tmp_path: Path) -> None:
    launch = prepared(tmp_path, HOSTILE, command=["h", "--url={base_url}", "--prompt={prompt}", "{workdir}"])
    assert launch.argv == ("h", f"--url={URL}", f"--prompt={HOSTILE}", str(tmp_path / "work"))


def test_braces_of_others_stay_as_they_are(tmp_path: Path) -> None:
    text = "{{task}} ${home} {print} {HOME} {} {a: 1}"
    launch = prepared(tmp_path, "p", command=["h", "{prompt}", text], files=[{"path": "f", "content": text}])
    assert launch.argv == ("h", "p", text)
    assert (tmp_path / "home" / "f").read_text() == text


def test_a_prompt_in_a_mapping_is_a_string_of_its_json(tmp_path: Path) -> None:
    content = {"task": "{prompt}", "{workdir}": [{"url": "{base_url}"}, 7, None]}
    prepared(tmp_path, HOSTILE, command=["h", "{prompt_file}"], files=[{"path": "a/b.json", "content": content}])
    written = json.loads((tmp_path / "home" / "a" / "b.json").read_text())
    assert written == {"task": HOSTILE, str(tmp_path / "work"): [{"url": URL}, 7, None]}


def test_a_prompt_file_has_the_text_of_all_messages(tmp_path: Path) -> None:
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    harness = Harness(HarnessConfig(command=["h", "{prompt_file}"]))
    launch = harness.prepare(asked("one\n", HOSTILE), URL, KEY, Places(tmp_path / "home", tmp_path / "work"))
    assert Path(launch.argv[1]).read_text() == f"one\n\n\n{HOSTILE}"


def test_files_go_to_the_home_or_to_the_working_directory_in_place_of_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "f").symlink_to(outside)
    files = [{"path": "{workdir}/f", "content": "{api_key}"}, {"path": ".h/f", "content": "{home}"}]
    launch = prepared(tmp_path, "p", command=["h", "{prompt}"], files=files)
    assert [outside.read_text(), (tmp_path / "work" / "f").read_text()] == ["kept", KEY]
    assert (tmp_path / "home" / ".h" / "f").read_text() == launch.environment["HOME"] == str(tmp_path / "home")


def test_a_link_out_of_the_working_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "d").symlink_to(tmp_path)
    with pytest.raises(HarnessError, match="leads out of the directory"):
        prepared(tmp_path, "p", command=["h", "{prompt}"], files=[{"path": "{workdir}/d/f", "content": "x"}])
    assert not (tmp_path / "f").exists()


def test_variables_are_templates_and_others_are_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMED", "shown")
    keys = {"variables": {"ANTHROPIC_BASE_URL": "{base_url}"}, "inherited_variables": ["NAMED", "UNSET"]}
    launch = prepared(tmp_path, "p", command=["h", "{prompt}"], **keys)
    home = str(tmp_path / "home")
    expected = {
        "OPENAI_BASE_URL": URL,
        "OPENAI_API_KEY": KEY,
        "ANTHROPIC_BASE_URL": URL,
        "NAMED": "shown",
        "HOME": home,
    }
    assert launch.environment == expected


@pytest.mark.parametrize(
    ("text", "command", "cause"),
    [
        ("a" * 131_072, ["h", "{prompt}"], r"131072 bytes, of at most 131071; use \{prompt_file\}"),
        ("東" * 43_691, ["h", "{prompt}"], "131073 bytes"),
        ("a\0b", ["h", "{prompt}"], "no argument can have"),
        ("a\ud800b", ["h", "{prompt}"], "no argument can have"),
        ("--yolo", ["h", "-p", "{prompt}"], "begins with '-'"),
        ("-x", ["h", "{prompt} please"], "begins with '-'"),
    ],
)
def test_a_prompt_that_cannot_be_an_argument_is_refused(
    text: str, command: list[str], cause: str, tmp_path: Path
) -> None:
    with pytest.raises(HarnessError, match=cause):
        prepared(tmp_path, text, command=command)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("a" * 131_071, ["/bin/true", "{prompt}"]),
        ("a" * 200_000, ["h", "{prompt_file}"]),
        ("a\0b", ["h", "{prompt_file}"]),
        ("--yolo", ["h", "--prompt={prompt}"]),
        ("--yolo", ["h", "--", "{prompt}"]),
    ],
)
def test_other_prompts_are_not(text: str, command: list[str], tmp_path: Path) -> None:
    prepared(tmp_path, text, command=command)


P = ["h", "{prompt}"]


@pytest.mark.parametrize(
    ("keys", "key", "problem"),
    [
        ({"command": ["h", "{promt}"]}, "env.h.command", r"did you mean \{prompt\}\?"),
        ({"command": P, "variables": {"A": "{base_ur}"}}, "env.h.variables.A", r"did you mean \{base_url\}\?"),
        ({"command": P, "variables": {"A=B": "x"}}, "env.h.variables", "not a name"),
        ({"command": P, "files": [{"path": "f", "content": {"a": "{work_dir}"}}]}, "env.h.files.0.content", "workdir"),
        ({"command": P, "files": [{"path": "f", "content": "say {prompt}"}]}, "env.h.files.0.content", "prompt_file"),
        ({"command": P, "files": [{"path": "/etc/f", "content": "x"}]}, "env.h.files.0.path", "below the home"),
        ({"command": P, "files": [{"path": "a/../../f", "content": "x"}]}, "env.h.files.0.path", "below the home"),
        ({"command": P, "files": [{"path": "{workdir}/", "content": "x"}]}, "env.h.files.0.path", "below the home"),
        ({"command": P, "files": [{"path": "{home}/f", "content": "x"}]}, "env.h.files.0.path", "below the home"),
        ({"command": ["h"], "files": [{"path": "f", "content": "x"}]}, "env.h.files", "standard input"),
        ({"command": ["h", "{workdir}"]}, "env.h.command", "standard input"),
        ({"command": ["/bin/bash", "-c", "h '{prompt}'"]}, "env.h.command", r"""'program "\$1"', sh, '\{prompt\}'"""),
    ],
)
def test_templates_that_cannot_be_filled_are_refused(keys: dict[str, Any], key: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        check_harness("env.h", HarnessConfig(**keys))
    assert caught.value.key == key


@pytest.mark.parametrize(
    "before",
    [
        "bash -lc",
        "sh -ec",
        "bash -ce",
        "bash -c --",
        "bash -c -o pipefail",
        "bash -o pipefail -c",
        "timeout 600 bash -c",
        "env A=1 /bin/sh -c",
        "xargs sh -c",
        "su agent -c",
        "ssh host",
        "env -S",
        "env -i -u B -vS",
        "env -S bash -c",
        "python -c",
        "timeout 600 /usr/bin/python3.12 -I -W ignore -Bc",
        "env PYTHONPATH=. python -c",
        "bash -c exec python -c",
        "node --eval",
        "perl -ne",
    ],
)
def test_no_program_executes_a_prompt_however_it_is_started(before: str) -> None:
    with pytest.raises(ConfigError, match="what a prompt says would be executed"):
        check_harness("env.h", HarnessConfig(command=[*before.split(), "h '{prompt}'"]))


@pytest.mark.parametrize(
    "command",
    [
        ["env", "--split-string=h {prompt}"],
        ["env", "-S", "python -c", "print('{prompt}')"],
        ["env", "-Spython -Ic", "print('{prompt}')"],
        ["env", "-S", "it's {prompt}"],
        ["python", "-cprint('{prompt}')"],
    ],
)
def test_no_program_executes_a_prompt_that_an_option_or_a_line_holds(command: list[str]) -> None:
    with pytest.raises(ConfigError, match="what a prompt says would be executed"):
        check_harness("env.h", HarnessConfig(command=command))


@pytest.mark.parametrize(
    "keys",
    [
        {"command": ["sh", "-c", 'h "$1"', "sh", "{prompt}"]},
        {"command": ["python", "-I", "-c", "import sys; print(sys.argv[1])", "{prompt}"]},
        {"command": ["python3", "-X", "utf8", "-m", "h", "-c", "{prompt}"]},
        {"command": ["node", "h.js", "-p", "{prompt}"]},
        {"command": ["env", "-S", "A=1 python h.py", "-c", "{prompt}"]},
        {"command": ["env", "A=1", "h", "-S", "{prompt}"]},
        {"command": ["timeout", "9", "bash", "-o", "pipefail", "-ec", 'h "$1" | cat', "bash", "{prompt}"]},
        {"command": ["sh", "run.sh", "{prompt}"]},
        {"command": ["h", "-c", "{prompt}"]},
        {"command": ["awk", "{print}"]},
        {"command": ["h", "--url={base_url}"], "variables": {"A": "{api_key}"}},
        {"command": ["h", "{prompt_file}"], "files": [{"path": ".h/c.toml", "content": "{home} {{task}}"}]},
    ],
)
def test_other_templates_are_not(keys: dict[str, Any]) -> None:
    check_harness("env.h", HarnessConfig(**keys))
