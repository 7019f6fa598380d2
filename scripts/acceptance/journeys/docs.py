"""The first pages as a reader follows them: README of a new project, first run, own reward, keys by other names."""

from journey import Journey, main


def travel(journey: Journey) -> None:
    """Follow the pages, with runs of two steps."""
    journey.nemo_rl("init", "my_project")
    journey.directory /= "my_project"
    readme = (journey.directory / "README.md").read_text()
    for command in ("nemo-rl doctor --config grpo.yaml", "nemo-rl grpo --dry-run", "python test_project.py"):
        journey.claim(f"the README has {command}", command in readme, readme)
    doctor = journey.nemo_rl("doctor", "--config", "grpo.yaml")
    journey.says(doctor, "no faults")
    journey.nemo_rl("grpo", "--dry-run")
    journey.run(journey.program[0], "test_project.py")
    for word, key in (
        ("learning_rate", "policy.optimizer.kwargs.lr"),
        ("beta", "loss_fn.reference_policy_kl_penalty"),
        ("batch_size", "policy.train_global_batch_size"),
        ("kl", "loss_fn.reference_policy_kl_penalty"),
        ("clip", "loss_fn.ratio_clip_min"),
        ("temperature", "policy.generation.temperature"),
        ("epochs", "grpo.max_num_epochs"),
    ):
        journey.says(journey.nemo_rl("config", "explain", word), key)
    output = journey.nemo_rl("grpo", "policy.generation.backend=hf", "grpo.max_num_steps=2", "grpo.max_val_samples=20")
    journey.says(output, "Training reward", "Validation accuracy", "Look        nemo-rl view runs/exp_001")
    journey.nemo_rl("view", "runs/exp_001", "--export", "report")
    journey.claim("the report has pages", any((journey.directory / "report").rglob("*.html")))
    journey.nemo_rl("compare", "runs/exp_001", "runs/exp_001")


if __name__ == "__main__":
    main(travel)
