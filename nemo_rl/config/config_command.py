"""`nemo-rl config`: packaged recipes, resolved configurations, the schema's keys, translations of NeMo-RL's recipes."""

import argparse
import re
import sys
from pathlib import Path

from nemo_rl.command_line import Command, ExitCode, path_argument
from nemo_rl.errors import ConfigError, suggest_name
from nemo_rl.recipes import find_recipe, recipe_names

DESCRIPTION = """Look into configurations without running them.

nemo-rl config list                       the packaged recipes, and the command that runs each
nemo-rl config show RECIPE [key=value]    a recipe as the command would read it, with every default
nemo-rl config schema [COMMAND]           all keys of a command with types and defaults
nemo-rl config explain KEY                what a key means; finds it by a name of TRL, verl, W&B
nemo-rl config translate FILE             a recipe of NeMo-RL in this project's terms; comments say what was refused
"""
ALLOW_UNSUPPORTED_HELP = "leave out what is not supported and only concerns layout, scale or speed (NeMo-RL's recipes)"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=list(ACTIONS))
    parser.add_argument("name", nargs="?", help="a recipe, a command or a key, by the action")
    parser.add_argument("-o", "--output", type=path_argument, help="the file to write; default: standard output")
    parser.add_argument(
        "--allow-unsupported",
        action="store_true",
        help=ALLOW_UNSUPPORTED_HELP,
    )
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument(
        "--minimal",
        dest="form",
        action="store_const",
        const="minimal",
        default="translation",
        help="translate: only what differs from the recipe that `defaults:` names, or else from the defaults",
    )
    forms.add_argument(
        "--diff",
        dest="form",
        action="store_const",
        const="changes",
        help="translate: a table of the keys that change, with NeMo-RL's value, the one here, and why",
    )
    parser.add_argument("overrides", nargs="*", help="key=value, ++key=value, ~key (Hydra's grammar)")


def _run(parsed: argparse.Namespace) -> ExitCode:
    if parsed.name is None and parsed.action not in ("list", "schema"):
        raise ConfigError("config", parsed.action, f"needs a name: see {CONFIG.program} --help")
    text = ACTIONS[parsed.action](parsed)
    if parsed.output is None:
        sys.stdout.write(text)
    else:
        parsed.output.write_text(text, encoding="utf-8")
    return ExitCode.DONE


def _list(parsed: argparse.Namespace) -> str:
    rows = [(name, verb_of(find_recipe(name)), _summary(find_recipe(name))) for name in recipe_names()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "".join(f"{name:<{widths[0]}}  {verb:<{widths[1]}}  {summary}\n" for name, verb, summary in rows)


def _show(parsed: argparse.Namespace) -> str:
    from nemo_rl.config import loading

    path = find_recipe(parsed.name)
    load = loading.LOADERS[verb_of(path)]
    return loading.resolved_yaml(load(path, parsed.overrides, allow_unsupported=parsed.allow_unsupported))


def _schema(parsed: argparse.Namespace) -> str:
    from nemo_rl.config import reference

    commands = list(reference.SCHEMAS) if parsed.name is None else [parsed.name]
    if unknown := set(commands) - set(reference.SCHEMAS):
        raise ConfigError("command", unknown.pop(), "reads no configuration", known=reference.SCHEMAS)
    return "\n".join(
        f"# {command}\n{reference.format_keys(reference.walk_keys(reference.find_schema(command)))}"
        for command in commands
    )


def _explain(parsed: argparse.Namespace) -> str:
    from nemo_rl.config import key_search, reference

    by_command = {name: reference.find_key(reference.find_schema(name), parsed.name) for name in reference.SCHEMAS}
    if not any(by_command.values()):
        if text := reference.explain_foreign_key(parsed.name):
            return text
        if found := key_search.search_keys(parsed.name):
            return key_search.format_found(parsed.name, found)
        known = {key.key for name in reference.SCHEMAS for key in reference.walk_keys(reference.find_schema(name))}
        hint = suggest_name(parsed.name.rpartition(".")[2], {key.rpartition(".")[2] for key in known})
        raise ConfigError("key", parsed.name, f"no command has such a key{hint}")
    return reference.format_explanation(by_command)


def _translate(parsed: argparse.Namespace) -> str:
    from nemo_rl.config.kinds import load_optional
    from nemo_rl.config.registries import RECIPE_WRITERS

    for writer in load_optional(RECIPE_WRITERS):
        write = getattr(writer, f"format_{parsed.form}")
        return write(Path(parsed.name), parsed.overrides, allow_unsupported=parsed.allow_unsupported)
    raise ConfigError("config", parsed.action, "no translator is installed")


ACTIONS = {"list": _list, "show": _show, "schema": _schema, "explain": _explain, "translate": _translate}


def verb_of(path: Path) -> str:
    """Return the command that runs a recipe: by its sections and those of the recipes below it."""
    from nemo_rl.config import recipe_files  # imports yaml: here, since every command imports this module

    for _, sections in recipe_files.walk_layers(path):
        if family := recipe_files.find_family(sections):
            return recipe_files.COMMANDS[family]
    raise ConfigError("config", str(path), f"has none of the sections {', '.join(recipe_files.COMMANDS)}")


def _summary(path: Path) -> str:
    """Return the first sentence of the comment at a recipe's head."""
    head = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))
    text = " ".join(line.strip("# ") for line in (head[0] if head else "").splitlines())
    return re.split(r"(?<!al)(?<!Dr)[.:](?:\s|$)", text, maxsplit=1)[0]


CONFIG = Command(DESCRIPTION, _add_arguments, _run, program="nemo-rl config", reported_errors=(OSError,))
