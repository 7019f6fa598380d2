"""A run with W&B offline that resumes: read back it is one run, with its name, tags, notes and all steps."""

import json
import sys

from journey import SHORT, Journey, main

NAMED = ("logger.wandb_enabled=true", "logger.run_name=words", "logger.tags=[first]", "++logger.notes=A note.")


def travel(journey: Journey) -> None:
    """Train three steps, resume for two more, read W&B's files and ours."""
    journey.nemo_rl("grpo", *SHORT, *NAMED, "grpo.max_num_steps=3")
    resumed = ("grpo.max_num_steps=5", "checkpointing.checkpoint_dir=runs/exp_001/checkpoints")
    output = journey.nemo_rl("grpo", *SHORT, *NAMED, *resumed)
    journey.says(output, "run directory: runs/exp_001", "Training reward", "at step 1,", "at step 5")
    runs = sorted(path.name for path in (journey.directory / "runs").iterdir())
    journey.claim("there is one run directory", runs == ["exp_001"], str(runs))
    journey.claim("its metrics are those of five steps", [row["step"] for row in journey.metrics()] == [1, 2, 3, 4, 5])
    record = json.loads((journey.directory / "runs/exp_001/run.json").read_text())
    journey.claim("its name is kept", (record["name"], record["tags"]) == ("words", ["first"]), str(record))
    journey.claim("both starts ended", [start["state"] for start in record["starts"]] == ["ended", "ended"])

    files = sorted((journey.directory / "runs/exp_001/wandb").glob("offline-run-*/run-*.wandb"))
    journey.claim("W&B has a file for each start", len(files) == 2, str(files))
    found = [read(journey, str(path)) for path in files]
    ids = {record["run"]["run_id"] for records in found for record in records if "run" in record}
    journey.claim("both are of one run id", len(ids) == 1, str(ids))
    heads = [record["run"] for records in found for record in records if "run" in record]
    journey.claim("its display name is the run's", {head["display_name"] for head in heads} == {"words"}, str(heads))
    journey.claim(
        "its notes and tags too", all(head["notes"] == "A note." and head["tags"] == ["first"] for head in heads)
    )
    steps = [value for records in found for value in steps_of(records)]
    journey.claim("it has the rewards of five steps", sorted(set(steps)) == [1, 2, 3, 4, 5], str(steps))


def read(journey: Journey, path: str) -> list[dict]:
    """Return the records of an offline run."""
    text = journey.run(sys.executable, "-m", "wandb", "leet", "inspect", "--json", path)
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def steps_of(records: list[dict]) -> list[int]:
    """Return the training steps that have a reward."""
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    return [int(item["train/step"]) for item in items if "train/reward" in item]


if __name__ == "__main__":
    main(travel)
