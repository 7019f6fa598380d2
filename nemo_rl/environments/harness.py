"""A harness as it comes: a program whose arguments, variables and files are templates of the configuration.

The templates are the operator's, what fills them is data: a prompt is one argument, a file, or a string of a JSON file,
and passes through no shell. experience/command_agent.py runs a harness on this machine, ecosystem/harbor.py in a
container with a task's files.
"""

import difflib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field

from nemo_rl.config.environment import AgentRunnerConfig
from nemo_rl.config.kinds import Section
from nemo_rl.environments.code_arguments import find_code
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import Prompt

PROMPT, PROMPT_FILE, WORKDIR, HOME = "prompt", "prompt_file", "workdir", "home"
TASK = {PROMPT, PROMPT_FILE}  # placeholders that give a program its task
OF_A_HARNESS = {*TASK, WORKDIR, HOME}
PLACEHOLDERS = (*sorted(OF_A_HARNESS), "base_url", "api_key")
PLACEHOLDER = re.compile(r"(?<![{$])\{([a-z_]+)\}(?!\})")  # neither Jinja's {{task}} nor a shell's ${name}
PROMPT_FILE_NAME = "prompt.txt"  # in the home
OWN_VARIABLES = {"OPENAI_BASE_URL": "{base_url}", "OPENAI_API_KEY": "{api_key}"}
HARNESS_FAILED, HARNESS_TIMEOUT = "harness_failed", "harness_timeout"  # response faults of one that did not end well
MAX_ARGUMENT_BYTES = 128 * 1024 - 1  # per argument or variable; Linux's MAX_ARG_STRLEN without the closing zero
IN_WORKDIR = "{workdir}/"  # begins the path of a file outside of the home


class HarnessError(Exception):
    """A prompt that a harness cannot be given, or a file that cannot be written."""


class HarnessFile(Section):
    """A file that is written before each run."""

    path: str  # below the home of the run; with {workdir}/ in front, below its working directory
    content: str | dict[str, Any]  # text, or a mapping to be written as JSON; placeholders are filled in


class HarnessConfig(AgentRunnerConfig):
    """Keys of entries that run a program."""

    # a program and its arguments; {prompt} or {prompt_file} stands for the task, {workdir}, {home}, {base_url} and
    # {api_key} for themselves
    command: list[str] | None = None
    # command: environment variables, with placeholders
    variables: dict[str, str] = Field(default_factory=dict)
    # command: environment variables that it inherits, besides PATH, HOME, LANG and TMPDIR
    inherited_variables: list[str] = Field(default_factory=list)
    files: list[HarnessFile] = Field(default_factory=list)  # command with {prompt} or {prompt_file}: its configuration

    @property
    def is_harness(self) -> bool:
        """Return whether the command gets its task by templates, in a home and a working directory of its own."""
        return any(TASK & set(find_placeholders(text)) for text in self.command or ())


def find_placeholders(text: str) -> list[str]:
    """Return the names in single braces.

    Example: "--model={model} {{task}} ${x}" has "model" alone.
    """
    return PLACEHOLDER.findall(text)


def check_harness(key: str, section: HarnessConfig) -> None:
    """Raise ConfigError for templates that cannot be filled in, and for those by which a prompt would be executed."""
    templates = [(f"{key}.command", text) for text in section.command or ()]
    templates += [(f"{key}.variables.{name}", text) for name, text in section.variables.items()]
    contents = [(f"{key}.files.{i}.content", str(file.content)) for i, file in enumerate(section.files)]
    for where, text in (*templates, *contents):
        for name in find_placeholders(text):
            if name not in PLACEHOLDERS and (near := difflib.get_close_matches(name, PLACEHOLDERS, n=1)):
                raise ConfigError(where, f"{{{name}}}", f"no placeholder has this name; did you mean {{{near[0]}}}?")
    for name in section.variables:
        if not name or "=" in name or "\0" in name:
            raise ConfigError(f"{key}.variables", name, "not a name of an environment variable")
    for i, file in enumerate(section.files):
        _check_file(f"{key}.files.{i}", file)
    if section.is_harness:
        _check_code(f"{key}.command", section.command or ())
    else:
        _check_has_no_task(key, section, templates)


def _check_has_no_task(key: str, section: HarnessConfig, templates: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError if a command that reads standard input uses the directories of a harness."""
    problem = "only for a command with {prompt} or {prompt_file}; others read the task from standard input"
    if section.files:
        raise ConfigError(f"{key}.files", section.files[0].path, problem)
    for where, text in templates:
        if OF_A_HARNESS & set(find_placeholders(text)):
            raise ConfigError(where, text, problem)


def _check_code(key: str, command: Sequence[str]) -> None:
    for code, cure in find_code(command):
        if PROMPT in find_placeholders(code):
            raise ConfigError(key, code, f"what a prompt says would be executed; pass it as an argument, {cure}")


def _check_file(key: str, file: HarnessFile) -> None:
    path = PurePosixPath(file.path.removeprefix(IN_WORKDIR))
    if path.is_absolute() or ".." in path.parts or path == PurePosixPath() or find_placeholders(str(path)):
        problem = f"must be a path below the home, or below {IN_WORKDIR}"
        raise ConfigError(f"{key}.path", file.path, problem)
    if isinstance(file.content, str) and PROMPT in find_placeholders(file.content):
        problem = "a prompt could say anything in a text; use {prompt_file}, or a mapping, which is written as JSON"
        raise ConfigError(f"{key}.content", file.content[:80], problem)


def find_program(key: str, command: Sequence[str]) -> str:
    """Return the path of a command's program; raises ConfigError if it is not installed."""
    found = shutil.which(command[0])
    if found is None:
        raise ConfigError(f"{key}.command", command[0], "no such program, neither in PATH nor at this path")
    return os.path.abspath(found)


@dataclass(frozen=True, slots=True)
class Places:
    """The directories of one run, and the names by which the harness knows them."""

    home: Path
    workdir: Path
    home_name: str | None = None  # inside a container; None: the path itself
    workdir_name: str | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """Command to start."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


class Harness:
    """The templates of one entry."""

    def __init__(self, section: HarnessConfig) -> None:
        assert section.command is not None
        program, *arguments = section.command
        self._command = (os.path.abspath(program) if os.sep in program else program, *arguments)
        self._variables = OWN_VARIABLES | section.variables
        self._files = section.files
        self._inherited = tuple(section.inherited_variables)

    def prepare(self, prompt: Prompt, base_url: str, api_key: str, places: Places) -> Launch:
        """Write the files of a run and return what to start; raises HarnessError for a prompt that does not fit."""
        home = places.home_name or str(places.home)
        text = prompt_text(prompt)
        values = {PROMPT: text, PROMPT_FILE: f"{home}/{PROMPT_FILE_NAME}", HOME: home}
        values |= {WORKDIR: places.workdir_name or str(places.workdir), "base_url": base_url, "api_key": api_key}
        _write_below(places.home, PROMPT_FILE_NAME, text)
        for file in self._files:
            root = places.workdir if file.path.startswith(IN_WORKDIR) else places.home
            content = _fill_all(file.content, values)
            content = content if isinstance(content, str) else json.dumps(content, indent=2)
            _write_below(root, file.path.removeprefix(IN_WORKDIR), content)
        variables = {name: os.environ[name] for name in self._inherited if name in os.environ}
        variables |= {"HOME": home} | {name: _argument(value, values) for name, value in self._variables.items()}
        return Launch(tuple(_fill_command(self._command, values)), variables)


def prompt_text(prompt: Prompt) -> str:
    """Return the texts of a prompt's messages, with an empty line between them: a harness takes one text.

    Raises DataError for a prompt with images.
    """
    if count := sum(len(message.images) for message in prompt.messages):
        raise DataError(f"prompt {prompt.prompt_id} has {count} images: a harness takes text")
    return "\n\n".join(message.content for message in prompt.messages)


def fill(template: str, values: Mapping[str, str]) -> str:
    """Return the template with its placeholders replaced, in one pass: what is filled in is not read again."""
    return PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), template)


def _fill_all(value: Any, values: Mapping[str, str]) -> Any:
    """Fill in every text of a JSON value, keys included."""
    if isinstance(value, str):
        return fill(value, values)
    if isinstance(value, Mapping):
        return {fill(str(key), values): _fill_all(each, values) for key, each in value.items()}
    return [_fill_all(each, values) for each in value] if isinstance(value, list) else value


def _fill_command(command: Sequence[str], values: Mapping[str, str]) -> Iterator[str]:
    """Yield the arguments; raises HarnessError for a prompt that the program would read as an option."""
    only_operands = False
    for template in command:
        argument = _argument(template, values)
        is_prompt = PROMPT in find_placeholders(template)
        if is_prompt and argument.startswith("-") and not template.startswith("-") and not only_operands:
            cure = "write --option={prompt}, put -- before it, or use {prompt_file}"
            raise HarnessError(f"the prompt begins with '-', as an option does: {cure}")
        only_operands |= template == "--"
        yield argument


def _argument(template: str, values: Mapping[str, str]) -> str:
    """Return a filled argument or variable; raises HarnessError if the kernel cannot pass it."""
    text = fill(template, values)
    size = len(text.encode(errors="replace"))
    if size > MAX_ARGUMENT_BYTES:
        raise HarnessError(f"{template[:80]!r} has {size} bytes, of at most {MAX_ARGUMENT_BYTES}; use {{prompt_file}}")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise HarnessError(f"{template[:80]!r} has a character that no argument can have; use {{prompt_file}}")
    return text


def _write_below(root: Path, path: str, text: str) -> None:
    """Write a file below `root`, in place of what is there; raises HarnessError if a link leads out of it."""
    target = root / path
    if not target.parent.resolve().is_relative_to(root.resolve()):
        raise HarnessError(f"{path}: a link leads out of the directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    target.write_text(text, encoding="utf-8", errors="replace")
