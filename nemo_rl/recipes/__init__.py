"""Packaged recipes and prompts: found by name from any working directory.

They are the files of examples/configs/ and examples/prompts/, which a wheel holds beside this module.
"""

from pathlib import Path

from nemo_rl.errors import ConfigError

_PACKAGE = Path(__file__).parent
_IN_WHEEL = (_PACKAGE / "configs").is_dir()
RECIPES, PROMPTS = (
    (_PACKAGE if _IN_WHEEL else _PACKAGE.parents[1] / "examples") / name for name in ("configs", "prompts")
)


def recipe_names() -> list[str]:
    """Return the names of the packaged recipes, without the suffix: `dapo`, `evals/eval`."""
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))


def find_recipe(name: str | Path) -> Path:
    """Return the file of a recipe: a path, or else the name of a packaged recipe, with or without its suffix.

    Raises ConfigError for any other path.

    Example: `find_recipe("dapo")`
    """
    path = Path(name)
    if path.is_file():
        return path
    if (packaged := find_packaged(name)) is not None:
        return packaged
    raise missing_recipe("config", str(name), f"no such file (from {Path.cwd()})")


def find_packaged(name: str | Path) -> Path | None:
    """Return the file of a packaged recipe by its name, with or without its suffix; None for any other path."""
    path = Path(name)
    packaged = RECIPES / path.with_name(path.name.removesuffix(".yaml") + ".yaml") if path.name else RECIPES
    is_name = not path.is_absolute() and ".." not in path.parts and path.as_posix() == str(name)
    return packaged if is_name and packaged.is_file() else None


def missing_recipe(key: str, name: str, problem: str) -> ConfigError:
    """Return the error of a recipe that was not found: it names the packaged recipe that may have been meant."""
    if find_packaged(Path(name).name) is not None:
        return ConfigError(key, name, f"{problem}; a packaged recipe is named {Path(name).stem} (nemo-rl config list)")
    return ConfigError(key, name, f"{problem}, and no packaged recipe (nemo-rl config list)", known=recipe_names())


def find_prompt(name: str) -> Path:
    """Return the file of a prompt: a path from the working directory, or else the name of a packaged prompt.

    Example: `find_prompt("prompts/cot.txt")`
    """
    path = Path(name)
    packaged = PROMPTS / path.name
    return packaged if path.parts == ("prompts", path.name) and packaged.is_file() and not path.is_file() else path
