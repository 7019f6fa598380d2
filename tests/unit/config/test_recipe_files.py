"""Plain interpolations have the values that OmegaConf gives them; all others are left to it."""

import subprocess
import sys
from typing import Any

import pytest

from nemo_rl.config import recipe_files
from nemo_rl.config.overrides import merge_layers
from nemo_rl.config.recipe_files import walk_layers
from nemo_rl.errors import ConfigError
from nemo_rl.recipes import find_recipe, recipe_names

SECTIONS = {"a": 3, "b": 2.5, "s": "text", "n": None, "t": True, "m": {"x": "${a}", "y": [1, "${b}"]}}


def resolve_plain(value: Any) -> Any:
    raw = {**SECTIONS, "value": value}
    return recipe_files._resolve_plain(raw, raw, ())


@pytest.mark.parametrize(
    "value",
    [
        "${a}",
        "${b}",
        "${s}",
        "${n}",
        "${t}",
        "${m}",
        "${m.x}",
        "${m.y}",
        "${mul:${a},${b}}",
        "${add:${a},1}",
        "${max:${m.x},0.5}",
        "${div:${a},3}",
        "${div:${a},2}",
        ["${a}", {"x": "${m}"}],
        "1e-4",
        "$a {b}",
    ],
)
def test_a_plain_form_has_the_value_that_omegaconf_gives_it(value: Any) -> None:
    raw = {**SECTIONS, "value": value}
    ours, theirs = resolve_plain(value), recipe_files._resolve_with_omegaconf(raw, None)
    assert ours == theirs
    assert repr(ours) == repr(theirs)  # 1 is not 1.0, and true is not 1


@pytest.mark.parametrize(
    "value",
    [
        "${a} of ${b}",
        "${.a}",
        "${oc.env:HOME}",
        "${mul:${a},${s}}",
        "${mul:${t},${a}}",
        "${div:${a},0}",
        "${mul:${a},010}",
        "${a",
        "\\${a}",
        "???",
        "${value}",
        "${missing}",
        "${m.x.y}",
        "${pow:${a},2}",
        {1: "a"},
        {"x": b"bytes"},
    ],
)
def test_any_other_form_is_left_to_omegaconf(value: Any) -> None:
    with pytest.raises((recipe_files._NotPlain, RecursionError)):
        resolve_plain(value)


@pytest.mark.parametrize("name", recipe_names())
def test_a_packaged_recipe_resolves_to_the_same_both_ways(name: str) -> None:
    raw: dict[str, Any] = {}
    for _, layer in reversed(list(walk_layers(find_recipe(name)))):
        raw = merge_layers(raw, {key: value for key, value in layer.items() if key != "defaults"})
    try:
        expected = recipe_files._resolve_with_omegaconf(raw, None)
    except ConfigError:  # a fragment, whose references stand in other recipes
        return
    assert recipe_files.resolve_interpolations(raw) == expected


def test_recipe_files_are_read_without_the_schema() -> None:
    code = "import sys, nemo_rl.config.recipe_files as r; print('pydantic' in sys.modules, 'omegaconf' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False False"
