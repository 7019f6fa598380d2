"""Own data in five forms, each trained on by its path alone, without a validation set and without further keys."""

import json

import datasets
from journey import SMALL, Journey, main

WORDS = ("able", "bird", "cold", "door", "east", "farm", "gold", "hill")
RECIPE = """
defaults: quickstart
data:
  _override_: true
  train: {{data_path: {path}, env_name: own{keys}}}
env: {{_override_: true, own: {{type: "rewards:spelling"}}}}
"""
REWARDS = """
def spelling(messages, metadata):
    return float(messages[-1]["content"].strip() == metadata["answer"])
"""


def travel(journey: Journey) -> None:
    """Train two steps on each form."""
    journey.write("rewards.py", REWARDS)
    questions = [{"question": f"Spell {word} backward.", "solution": word[::-1]} for word in WORDS]
    chats = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["solution"]} for row in questions]
    mapped = ", input_key: question, output_key: solution"
    journey.write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in questions))
    table, trl = datasets.Dataset.from_list(questions), datasets.Dataset.from_list(chats)
    table.to_parquet(str(journey.directory / "rows.parquet"))
    table.save_to_disk(str(journey.directory / "saved"))
    arrow = next((journey.directory / "saved").glob("*.arrow"))
    (journey.directory / "rows.arrow").write_bytes(arrow.read_bytes())
    trl.to_parquet(str(journey.directory / "trl.parquet"))
    forms = [("rows.jsonl", mapped), ("rows.parquet", mapped), ("rows.arrow", mapped), ("saved", mapped)]
    for number, (path, keys) in enumerate([*forms, ("trl.parquet", "")], start=1):
        journey.write("grpo.yaml", RECIPE.format(path=path, keys=keys))
        output = journey.nemo_rl("grpo", *SMALL, "grpo.max_num_steps=2")
        journey.says(output, "loaded 8 prompts", "data.validation is not set: keeping the newest checkpoints")
        steps = journey.metrics(f"runs/exp_{number:03d}")
        journey.claim(f"{path}: two steps of 16 rollouts", [row["train/num_rollouts"] for row in steps] == [16, 16])
        journey.claim(f"{path}: no rollout fails", not any(row["train/failures/reward"] for row in steps))
    journey.write("grpo.yaml", RECIPE.format(path="rows.parquet", keys=""))
    output = journey.nemo_rl("grpo", *SMALL, code=2)
    journey.says(output, "has no field 'input'; input_key may name one of question, solution")


if __name__ == "__main__":
    main(travel)
