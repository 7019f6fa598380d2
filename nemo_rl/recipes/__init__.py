"""Packaged recipes and prompts: found by name from any working directory."""

from pathlib import Path

from nemo_rl.errors import ConfigError

RECIPES = Path(__file__).parent


def recipe_names() -> list[str]:
    """Return the names of the packaged recipes, without the suffix."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(name: str | Path) -> Path:
    """Return the file of a recipe: a path, or else the name of a packaged recipe, with or without its suffix.

    Raises ConfigError for a name that is neither. Any other path, whether or not it exists, is never taken for a name.

    Example: `find_recipe("dapo")`; NeMo-RL's spelling "examples/configs/dapo.yaml" works too.
    """
    path = Path(name)
    if path.is_file() or not _is_name(path):
        return path
    if (packaged := find_packaged(name)) is not None:
        return packaged
    problem = f"no such file (from {Path.cwd()}), and no packaged recipe (nemo-rl config list)"
    raise ConfigError("config", str(name), problem, known=recipe_names())


def find_packaged(name: str | Path) -> Path | None:
    """Return the file of a packaged recipe by its name, with or without its suffix; None where there is none."""
    path = Path(name)
    packaged = RECIPES / f"{path.stem if path.suffix == '.yaml' else path.name}.yaml"
    return packaged if _is_name(path) and packaged.is_file() else None


def _is_name(path: Path) -> bool:
    return path.parent.parts in ((), ("examples", "configs"))


def find_prompt(name: str) -> Path:
    """Return the file of a prompt: a path from the working directory, or else one of this package.

    Example: `find_prompt("prompts/cot.txt")`; NeMo-RL's spelling "examples/prompts/cot.txt" works too.
    """
    path = Path(name)
    packaged = RECIPES / "prompts" / path.name
    is_packaged = path.parent.parts in (("prompts",), ("examples", "prompts")) and packaged.is_file()
    return packaged if is_packaged and not path.is_file() else path
