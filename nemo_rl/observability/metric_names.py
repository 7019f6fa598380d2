"""The names of all metrics and what they mean: W&B, TensorBoard and metrics.jsonl use the same.

docs/metrics.md is `render_metrics_table()`. A part in angle brackets stands for one word: an environment, a data set.
"""

import re
from collections.abc import Iterable

TOKENS = "mean over the trained tokens"

METRICS: dict[str, dict[str, str]] = {
    "Training": {
        "train/loss": "the loss that is minimised, summed over the micro-batches of an optimizer step",
        "train/grad_norm": "norm of the gradient before clipping",
        "train/lr": "learning rate of the step",
        "train/reward": "mean reward of the rollouts that did not fail, before scaling and shaping",
        "train/filtered_reward": "mean reward of the groups that are trained on (dynamic sampling)",
        "train/shaped_reward": "mean reward after scaling and shaping",
        "train/reward_penalties/<penalty>": "rollouts that lose their reward to one of `reward_penalties`",
        "train/num_invalid_tool_calls": "replies whose advantage is grpo.invalid_tool_call_advantage",
        "train/num_malformed_thinking": "replies whose advantage is grpo.malformed_thinking_advantage",
        "train/reward/<name>": "mean of one named reward, where there are several",
        "train/advantages/mean": "mean advantage over the trained tokens",
        "train/advantages/max": "largest advantage of a trained token",
        "train/advantages/min": "smallest advantage of a trained token",
        "train/probs_ratio": f"{TOKENS} of exp(lp - lp_prev)",
        "train/probs_ratio_min": "its smallest value",
        "train/probs_ratio_max": "its largest value",
        "train/probs_ratio_clamped": "the ratio after clipping",
        "train/probs_ratio_clamped_min": "its smallest value",
        "train/probs_ratio_clamped_max": "its largest value",
        "train/kl_penalty": "KL to the reference policy, before its coefficient",
        "train/approx_entropy": f"{TOKENS} of -exp(lp - lp_gen) lp",
        "train/global_valid_seqs": "samples that carry a gradient",
        "train/global_valid_toks": "tokens that carry a gradient",
        "train/num_valid_samples": "samples of the batch whose weight is not 0",
        "train/num_optimizer_steps": "optimizer steps made on the batch",
        "train/num_skipped_steps": "optimizer steps left out, since nothing carried a gradient or it was not finite",
        "train/total_num_tokens": "tokens of the batch, prompts included, padding not",
        "train/mean_prompt_length": "mean tokens of a prompt",
        "train/dynamic_sampling_num_gen_batches": "batches generated to fill the step (dynamic sampling)",
        "train/dynamic_sampling_num_discarded_valid_samples": "rollouts worth training on that did not fit the step",
        "train/avg_trajectory_age": "mean steps between the weights that sampled a rollout and those it trains",
        "train/max_trajectory_age": "most such steps of a rollout",
        "train/failures/<class>": "rollouts that failed: infra, environment, agent, reward, cancelled",
        "train/env/<environment>/reward_mean": "mean reward of the rollouts of one environment, or agent of NeMo Gym",
        "train/env/<environment>/turns": "mean turns of its rollouts that did not fail",
        "train/env/<environment>/tokens": "mean sampled tokens of them",
        "train/env/<environment>/truncation_rate": "share of all its rollouts that a token limit cut",
        "train/env/<environment>/num_failed": "its rollouts that failed",
        "train/env/<environment>/<metric>": "with several environments: the rollout metrics of one of them",
        "train/env/<environment>/failures/<class>": "with several environments: the failures of one of them",
        "train/env/<environment>/reward/<name>": "with several environments: a named reward of one of them",
    },
    "Trainer against engine": {
        "train/token_mult_prob_error": f"{TOKENS} of exp(abs(lp_prev - lp_gen)); 1 is perfect",
        "train/gen_kl_error": f"{TOKENS} of the k3 estimate with d = lp_prev - lp_gen",
        "train/policy_kl_error": f"{TOKENS} of the k3 estimate with d = lp_gen - lp_prev",
        "train/js_divergence_error": f"{TOKENS} of half the k3 estimate to the mixture, from each side",
        "train/max_logprob_error": "largest abs(lp_prev - lp_gen) of a token",
        "train/num_nonfinite_generation_logprobs": "trained tokens whose log-prob of the engine is not finite",
        "train/sampling_importance_ratio": f"{TOKENS} of exp(lp_prev - lp_gen), as it weighs the loss",
        "train/is_oob_ratio": "share of the tokens or sequences whose importance weight was clamped or dropped",
        "train/max_seq_mult_prob_error": "largest mean of exp(abs(lp_prev - lp_gen)) of a sequence",
        "train/mean_seq_mult_prob_error": "its mean over the sequences",
        "train/max_seq_mult_prob_error_after_mask": "its largest value under grpo.seq_logprob_error_threshold",
        "train/num_masked_seqs_by_logprob_error": "sequences above the threshold, which carry no gradient",
        "train/masked_correct_pct": "share of those that had a positive reward",
    },
    "Distillation": {
        "train/forward_kl": f"{TOKENS} of sum p (log p - log q) over the teacher's likely tokens; q: the student",
        "train/reverse_kl": f"{TOKENS} of sum q (log q - log p), whichever of the two is trained on",
        "train/teacher_topk_mass": f"{TOKENS} of the probability that the teacher gives to those tokens together",
        "train/student_topk_mass": f"{TOKENS} of the student's",
        "validation/teacher_accuracy": "mean reward of the teachers, at the start (distillation.val_teacher)",
        "validation/teacher_greedy_accuracy": "the same at temperature 0",
        "timing/train/teacher_logprobs": "what the teachers say of the batch, moving them to the device included",
    },
    "Teachers with another tokenizer": {
        "train/divergence": f"{TOKENS} of the divergence from the teacher's likely tokens",
        "train/unmatched": f"{TOKENS} of the distance between tokens without a counterpart (matching: identical)",
        "train/cross_tokenizer/with_target": "share of sampled tokens before which the teacher's distribution is known",
        "train/cross_tokenizer/target_mass": "mean probability that the teacher gives to the candidates of a token",
        "train/cross_tokenizer/unmatched_mass": "mean probability of its tokens that the student has none for",
        "train/cross_tokenizer/teacher_tokens_per_token": "teacher's tokens a sampled token, of the same text",
    },
    "Rollouts": {
        "train/num_rollouts": "rollouts of the step, failed ones included",
        "train/total_turns": "turns of all rollouts together",
        "train/avg_turns_per_sample": "mean turns of a rollout",
        "train/max_turns_per_sample": "most turns of a rollout",
        "train/natural_termination_rate": "share ended by the environment",
        "train/truncation_rate": "share cut by a token limit",
        "train/max_turns_reached_rate": "share still going after the last allowed turn",
        "train/mean_total_tokens_per_sample": "mean tokens of a rollout",
        "train/mean_gen_tokens_per_sample": "mean sampled tokens of a rollout",
        "train/max_gen_tokens_per_sample": "most sampled tokens of a rollout",
        "train/mean_env_tokens_per_sample": "mean tokens that environments added to a rollout",
    },
    "Background collection": {
        "train/replay_buffer/size": "complete groups that wait (async_grpo), after this step's are taken",
        "train/replay_buffer/in_flight": "groups whose rollouts still run then",
        "train/replay_buffer/dropped_groups": "groups dropped since the last step: late, or older than the bound",
    },
    "Validation": {
        "validation/accuracy": "mean reward at the validation temperature; with several sets the mean over them",
        "validation/greedy_accuracy": "mean reward at temperature 0 (grpo.val_greedy)",
        "validation/avg_length": "mean sampled tokens of a rollout",
        "validation/pass_<k>": "pass@k of the k generations of a prompt",
        "validation/num_failed": "rollouts that failed and are left out of the means",
        "validation/<set>/<metric>": "each of these for one of several validation sets",
    },
    "Reward models (run_rm.py)": {
        "train/pair_accuracy": "share of the step's pairs whose chosen answer has the higher score",
        "train/reward_margin": "mean score of the chosen answer minus that of the rejected one",
        "validation/pair_accuracy": "the share of all validation pairs",
        "validation/reward_margin": "the margin over all validation pairs",
        "validation/loss": "the mean loss of all validation pairs; of run_sft.py, of all learnt tokens",
    },
    "Supervised training (run_sft.py)": {
        "data/train/num_conversations": "conversations to train on, logged once",
        "data/train/num_overlong": "those with more tokens than data.max_input_seq_length",
        "data/train/num_dropped": "those that were left out for it",
        "data/validation/<set>/<count>": "the same counts of each validation set",
    },
    "Seconds": {
        "timing/train/total_step_time": "the whole step",
        "timing/train/generation": "rollouts of a synchronous step, environments included",
        "timing/train/exposed_generation": "waiting for rollouts that are collected in the background (async_grpo)",
        "timing/train/data_processing": "making the batch",
        "timing/train/reward_calculation": "scaling and shaping rewards",
        "timing/train/policy_and_reference_logprobs": "forward passes before training",
        "timing/train/advantage_calculation": "advantages",
        "timing/train/policy_training": "forward, backward and optimizer",
        "timing/train/weight_sync": "bringing the new weights to the engine",
        "timing/train/checkpointing": "writing a checkpoint, in steps that do",
        "timing/validation/total_validation_time": "a whole validation",
    },
    "Efficiency": {
        "efficiency/training_busy_pct": "share of the step in which the policy computed log-probs or trained",
        "efficiency/exposed_wait_s/<cause>": "seconds that the trainer waited for generation, teachers, weight_sync, "
        "validation, checkpointing; of generation, for too_few_groups that are complete, or for a late_group at the "
        "age bound",
        "efficiency/generation_busy_pct": "share of the time since the last step's groups in which rollouts ran",
    },
    "Throughput": {
        "performance/samples_per_sec": "trained samples a second of the step",
        "performance/tokens_per_sec": "tokens of the batch a second of the step",
        "performance/generation_tokens_per_sec": "sampled tokens a second of generation",
        "performance/policy_training_tokens_per_sec": "tokens of the batch a second of training",
        "performance/train_flops": "floating-point operations a second of training",
    },
}

_HEAD = """# Metrics

The same names in W&B, TensorBoard and `metrics.jsonl`; the x axis is the training step. `lp` is a token's log-prob
under the policy that is trained, `lp_prev` before the first optimizer step on the batch, `lp_gen` as the engine
sampled it.
"""


def render_metrics_table() -> str:
    """The text of docs/metrics.md."""
    parts = [_HEAD]
    for title, metrics in METRICS.items():
        rows = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in metrics.items())
        parts.append(f"## {title}\n\n| metric | meaning |\n|---|---|\n{rows}")
    return "\n".join(parts)


def find_undocumented(names: Iterable[str]) -> list[str]:
    """Those of `names` that no line of METRICS describes."""
    patterns = [_pattern(name) for metrics in METRICS.values() for name in metrics]
    return [name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)]


def _pattern(name: str) -> re.Pattern[str]:
    """A part in angle brackets matches one word, without a slash."""
    return re.compile(
        "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in re.split("(<[a-z]+>)", name))
    )
