"""A teacher's distillation, from the recipe to the evaluation of what was learnt."""

import json

from journey import Journey, main

SHORT = (
    "policy.generation.backend=hf",
    "distillation.num_prompts_per_step=8",
    "distillation.num_generations_per_prompt=1",
    "distillation.max_num_steps=3",
    "distillation.max_val_samples=20",
    "checkpointing.enabled=true",
    "logger.progress=false",
)


def travel(journey: Journey) -> None:
    """Distil three steps, then evaluate the run and look at it."""
    output = journey.nemo_rl("distill", *SHORT)
    journey.says(output, "step 3/3", "Checkpoint  runs/exp_001/checkpoints/step_3")
    steps = journey.metrics()
    journey.claim("three steps with a loss above 0", [row["train/loss"] > 0 for row in steps] == [True] * 3)
    journey.nemo_rl("eval", "runs/exp_001", "server.backend=hf", "eval.limit=10")
    (profile,) = (journey.directory / "evaluations").rglob("profile.json")
    journey.claim("the evaluation has a profile", bool(json.loads(profile.read_text())))
    journey.nemo_rl("check", "runs/exp_001")


if __name__ == "__main__":
    main(travel)
