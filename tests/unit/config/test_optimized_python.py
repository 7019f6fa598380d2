"""`python -O` drops assertions, and with them nothing that is checked.

Hydra's own parser needs its assertions for mappings in overrides, so that what is to be refused stands in recipes here.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
# In plain code: pytest under -O would compile its own assertions away.
PROGRAM = """
import sys
from pathlib import Path
from nemo_rl.config.loading import load_config
from nemo_rl.errors import ConfigError
assert False, "assertions are on"
for recipe in sys.argv[1:]:
    try:
        load_config(Path(recipe))
    except ConfigError as error:
        sys.stdout.write(f"{error.key}\\n")
    else:
        sys.stdout.write("accepted\\n")
"""
USED = "env: {math: {scorers: [s]}}\n"
MODEL = USED + "scorers: {s: {type: reward_model, model_name: m%s}}\n"
JUDGE = USED + "scorers: {s: {type: judge, model: m, prompt: p, base_urls: ['http://a']%s}}\n"
POOL = MODEL % "" + "reward_model: {enable: true, enable_resource_pool: true, %s}\n"
CASES = {
    MODEL % "": "accepted",
    MODEL % ", micro_batch_size: 0": "scorers.s.micro_batch_size",
    MODEL % ", num_replicas: 0": "scorers.s.num_replicas",
    MODEL % ", timeout_s: 600": "scorers.s.timeout_s",
    POOL % "nnodes: 1": "reward_model.n_gpus_per_node",
    POOL % "n_gpus_per_node: 1": "reward_model.nnodes",
    MODEL % "" + "reward_model: {nnodes: -1}": "reward_model.nnodes",
    "reward_model: {enable: true}": "reward_model.enable",
    "env: {math: {scorers: [absent]}}": "env.math.scorers",
    "env: {rm: {type: reward_model}}": "env.rm.scorers",
    JUDGE % ", min_score: 2, max_score: 1": "scorers.s.min_score",
    JUDGE % ", limits: {requests_per_minute: 0}": "scorers.s.limits.requests_per_minute",
}


def test_scorers_are_checked_without_assertions_too(recipe: Path) -> None:
    recipes = [recipe.parent / f"{number}.yaml" for number in range(len(CASES))]
    for path, text in zip(recipes, CASES, strict=True):
        path.write_text(f"defaults: {recipe.name}\n{text}")
    done = subprocess.run(
        [sys.executable, "-O", "-c", PROGRAM, *map(str, recipes)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert dict(zip(CASES, done.stdout.splitlines(), strict=True)) == CASES
