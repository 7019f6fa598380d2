"""Without compat and the modules at NeMo-RL's import paths the rest works, and NeMo-RL's keys are unknown keys."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
CONTRACT = "NeMo-RL is known to compat alone"

# Prints the resolved configuration of every recipe, then the refusals of two keys and of a module.
PROGRAM = """
from nemo_rl.config import config_command, loading
from nemo_rl.config.registries import ENVIRONMENTS
from nemo_rl.errors import ConfigError
from nemo_rl.recipes import find_recipe, recipe_names

for name in recipe_names():
    load = loading.LOADERS[config_command.verb_of(find_recipe(name))]
    print(name, loading.resolved_yaml(load(find_recipe(name))))
print("---")
for override in ("++grpo.normalize_rewards=true", "++loss_fn.use_cispo=true", "++grpo.no_such_key=1"):
    try:
        loading.load_config(find_recipe("quickstart"), [override])
    except ConfigError as error:
        print(error)
try:
    ENVIRONMENTS.entry("nemo_rl.utils.config.load", key="env.user.type")
except ConfigError as error:
    print(error)
"""


def run(directory: Path) -> tuple[str, str]:
    """Return the configurations and the refusals of the package in this directory."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=directory, capture_output=True, text=True, check=True)
    configurations, _, refusals = done.stdout.partition("---\n")
    # The translation removes a val_temperature that equals the policy's.
    return configurations.replace("val_temperature: 1.0", "val_temperature: null"), refusals


def test_a_tree_without_compat_reads_all_recipes_alike_and_refuses_nemo_rls_keys(tmp_path: Path) -> None:
    for name in ("nemo_rl", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    modules = next(one["protected_modules"] for one in contracts if one["name"] == CONTRACT)
    for module in modules:
        path = tmp_path / module.replace(".", "/")
        shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()
    (with_compat, translated), (without, refused) = run(ROOT), run(tmp_path)
    assert with_compat.count("\npolicy:") > 15
    assert without == with_compat
    assert len(translated.splitlines()) == 2  # no_such_key and the module
    lines = refused.splitlines()
    assert [line.partition(" =")[0] for line in lines] == [
        "grpo.normalize_rewards", "loss_fn.use_cispo", "grpo.no_such_key", "env.user.type",
    ]  # fmt: skip
    assert all("unknown key" in line for line in lines[:3])
    assert lines[3].endswith("cannot be imported: No module named 'nemo_rl.utils'")
