"""NeMo-RL's `env` sections in this project's terms: its verifiers and rewards, its games, classes of a user's own.

NeMo-RL builds the entries that a dataset names, or that a run script of its own builds; here every entry has a type.
"""

from typing import Any

from nemo_rl.compat.data_sections import dataset_sections
from nemo_rl.compat.tables import Cause, Report, load_table, reach
from nemo_rl.config.environment import CustomEnvironmentConfig
from nemo_rl.config.recipe_files import at
from nemo_rl.config.registries import ENVIRONMENTS
from nemo_rl.errors import ConfigError

DEFAULT_VERIFIER = "math_verify"
MATH_NAMES = {"dapo": "dapo_math_verify", "math_default": None}  # NeMo-RL's other names of `math`, with their verifier
PUZZLE = "sliding_puzzle_game"
PUZZLE_ROWS = "nemo_rl.environments.sliding_puzzle.puzzle_rows"
MAX_PUZZLES = 10_000  # boards that are made at start; NeMo-RL makes new ones without end
PUZZLE_NOTE = (
    "env.sliding_puzzle_game: the game is env type sliding_puzzle, and its boards take the place of data.train and "
    "data.validation, as in run_grpo_sliding_puzzle.py; policy.generation.stop_strings has </action>, and "
    "grpo.max_num_epochs are passes over the boards; its texts are this project's, its actions up, down, left and right"
)


def translate_environments(config: dict[str, Any], report: Report) -> None:
    """Write the math verifiers, rewards of vision and the puzzle as kinds, and a `type` as that of a user's class.

    Every other entry is refused with the lines to write, whether or not a dataset names it.
    """
    environments, data = config.get("env"), config.get("data")
    if not isinstance(environments, dict):
        return
    named = [one.get("env_name") for one in dataset_sections(data)] if isinstance(data, dict) else []
    used = {name for name in named if isinstance(name, str | None)}  # others are refused by the schema
    for name, section in list(environments.items()):
        if not isinstance(section, dict):
            continue
        if name in MATH_NAMES and "type" not in section:
            section["type"] = "math"
            if MATH_NAMES[name] is not None:
                section.setdefault("math_verify_impl", MATH_NAMES[name])
        if "reward_functions" in section:
            section.setdefault("type", "tagged_answers")
        _name_verifier(section)
        if report.release is None or name in ENVIRONMENTS.names:
            continue
        if "type" in section:
            _wrap_class_section(section)
        elif name == PUZZLE and name not in used and "grpo" in config:
            _translate_puzzle(config, environments, section, report)
        else:
            report.refuse(f"env.{name}", "set", _unknown(name, is_used=name in used))
            del environments[name]


def _unknown(name: str, *, is_used: bool) -> Cause:
    lines = f"write env.{name}.type: <dotted path of its class or function>"
    if is_used:
        return Cause("results", f"no such environment; {lines}")
    problem = f"no dataset names it, so a run script builds it; {lines}, and data.default.env_name: {name}"
    return Cause("results", problem)


def _name_verifier(section: dict[str, Any]) -> None:
    """Write NeMo-RL's verifier as the kind of the environment `math`; an unknown one is left for the table."""
    verifiers = load_table("releases")["verifiers"]
    for key in ("math_verify_impl", "verifier_type"):
        kind = section.pop(key, None)
        if verifiers.get(kind) == DEFAULT_VERIFIER:
            continue
        if kind in verifiers:
            section["verifier"] = verifiers[kind]
        elif kind is not None:
            section[key] = kind


def _wrap_class_section(section: dict[str, Any]) -> None:
    """Hand the keys of a class of NeMo-RL's interface to its constructor: `cfg`, or all of them as `cfg`."""
    if section["type"] in ENVIRONMENTS.names or "kwargs" in section:
        return
    own = {key: section.pop(key) for key in list(section) if key not in CustomEnvironmentConfig.model_fields}
    if own:
        section["kwargs"] = own if own.keys() == {"cfg"} else {"cfg": own}


def _translate_puzzle(
    config: dict[str, Any], environments: dict[str, Any], section: dict[str, Any], report: Report
) -> None:
    """Write the sliding puzzle, whose run script makes its own data, as an environment and two datasets."""
    game, grpo = at(section, ["cfg", "game_config"]), config["grpo"]
    if not isinstance(game, dict) or not isinstance(grpo, dict):
        raise ConfigError(f"env.{PUZZLE}.cfg.game_config", game, "must be a mapping of size and shuffle_moves")
    difficulty = {
        "size": [2, game.get("size", 3)],
        "shuffle_moves": [1, game.get("shuffle_moves", 1)],
    }
    rows = {"dataset_name": PUZZLE_ROWS, "env_name": PUZZLE, "task_kwargs": difficulty}
    num_prompts = int(grpo.get("num_prompts_per_step") or 1) * int(grpo.get("max_num_steps") or 1)
    num_puzzles = min(num_prompts, MAX_PUZZLES)
    grpo["max_num_epochs"] = -(-num_prompts // num_puzzles)
    data = reach(config, ["data"])
    data |= {
        "train": {**rows, "size": num_puzzles},
        "validation": {**rows, "size": grpo.get("max_val_samples") or num_puzzles},
        "default": {},
    }
    environments[PUZZLE] = {"type": "sliding_puzzle"}
    if (limit := at(section, ["cfg", "max_moves"])) is not None:
        environments[PUZZLE]["max_moves"] = limit
    generation = reach(config, ["policy", "generation"])
    generation["stop_strings"] = list(dict.fromkeys([*(generation.get("stop_strings") or ()), "</action>"]))
    report.notes.append(PUZZLE_NOTE)
