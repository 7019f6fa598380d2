"""The table of all metric names: for W&B, TensorBoard, metrics.jsonl and `checkpointing.metric_name`.

`scripts/reference` writes docs/metrics.md from it. A part in angle brackets stands for one word, e.g. an
environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TOKENS = "token mean"  # over the trained tokens, as docs/metrics.md says
ROLLOUT_ALGORITHMS = frozenset({"grpo", "distillation"})  # algorithms by the key of their section
# failed rollouts would make a checkpoint look better, or no worse
NEVER_RANKING = frozenset({"reward_without_failed", "accuracy_without_failed", "greedy_num_failed"})
POLICY_PHASES = ("policy_and_reference_logprobs", "policy_training")  # in timing/train; the policy computes
COLLECTION_PHASES = ("generation", "exposed_generation")  # in timing/train; the trainer waits for rollouts
# counts of one step; logged as rates, performance/train_flops and others
CHECKPOINT_ONLY_METRICS = frozenset({"train_flops", "train_peak_flops"})


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """Metrics that are documented together."""

    title: str
    algorithms: frozenset[str]  # algorithms in whose runs these metrics may rank checkpoints
    meanings: Mapping[str, str]  # keys: full names


METRIC_GROUPS = (
    MetricGroup(
        "Optimization",
        ROLLOUT_ALGORITHMS | {"sft", "dpo"},
        {
            "train/loss": "the minimised loss, summed over the micro-batches of an optimizer step",
            "train/grad_norm": "norm of the gradient before clipping",
            "train/lr": "learning rate of the step",
            "train/router_balance": "balance loss of the routers before `policy.moe.aux_loss_coeff`, summed over the "
            "layers; 1 per layer if the experts have the same load",
            "train/router_z": "z-loss of the routers before `policy.moe.z_loss_coeff`, summed over the layers",
            "train/global_valid_seqs": "samples that contribute to the gradient",
            "train/global_valid_toks": "tokens that contribute to the gradient",
            "train/total_num_tokens": "tokens of the batch, including prompts, excluding padding",
            "train/num_optimizer_steps": "optimizer steps taken on the batch",
            "train/num_skipped_steps": "optimizer steps that left the weights as they were",
            "train/skipped_steps/<cause>": "skipped steps by cause: no_valid_tokens, nonfinite_loss, "
            "nonfinite_gradient",
        },
    ),
    MetricGroup(
        "Mixtures of experts",
        ROLLOUT_ALGORITHMS | {"sft", "dpo"},
        {
            "train/moe/load_max_over_mean": "tokens of a layer's most used expert over the mean of its experts, in the "
            "least balanced layer; like all of these metrics over the tokens that a trained one depends on",
            "train/moe/load_p<percent>_over_mean": "percentiles (0, 10, 50, 90) of the load of all experts, each over "
            "the mean of its layer",
            "train/moe/unused_experts": "experts, over all layers, that no token went to",
            "train/moe/router_entropy": "mean entropy of the routers' distributions over experts, in nats",
            "train/moe/other_experts": "share of tokens that in some layer went to other experts than recorded "
            "(`policy.router_replay`); 0 under replay",
            "train/moe/live_other_experts": "share of tokens that the routers would send to other experts than "
            "recorded",
            "train/moe/missing_routes": "share of tokens without recorded experts, which are routed live",
        },
    ),
    MetricGroup(
        "Samples and accuracy",
        ROLLOUT_ALGORITHMS | {"dpo", "rm"},
        {
            "train/num_valid_samples": "samples of the batch with a weight above 0; pairs in run_dpo.py and run_rm.py",
            "validation/accuracy": "share of correct rollouts at the validation temperature: those with a reward of "
            "at least `val_correct_reward`; a failed one is wrong. With several datasets the mean over them; in "
            "run_dpo.py and run_rm.py, the share of pairs whose chosen answer has the higher reward",
        },
    ),
    MetricGroup(
        "Batch and rewards",
        ROLLOUT_ALGORITHMS,
        {
            "train/reward": "mean reward of the rollouts that did not fail, before scaling and shaping",
            "train/baseline_reward": "mean reward of the greedy rollouts that samples are compared with (`remax`)",
            "train/filtered_reward": "mean reward of the groups that are trained on (dynamic sampling)",
            "train/shaped_reward": "mean reward after scaling and shaping",
            "train/baseline_reward/pct_0": "percentage of the groups whose mean reward is 0, without failed rollouts",
            "train/baseline_reward/pct_1": "percentage of the groups whose mean reward is 1",
            "train/baseline_reward/pct_mixed": "percentage of the other groups",
            "train/reward/<name>": "mean of one named reward, if there are several",
            "train/reward_penalties/<penalty>": "rollouts that lose their reward to one of `reward_penalties`",
            "train/mean_prompt_length": "mean tokens of a prompt",
            "train/overlong_prompts": "prompts above `data.max_input_seq_length` drawn since the last step, masked or "
            "dropped (`data.overlong`)",
            "train/held_out_prompts": "prompts drawn and dropped because they occur in a validation dataset, of "
            "datasets whose rows stay in their files",
            "train/unusable_prompts": "prompts drawn and dropped because their row cannot be read, or the template "
            "refuses them; the log names each",
            "data/validation/<dataset>/num_overlong": "measured prompts above `data.max_input_seq_length`, logged "
            "once if there are any",
            "train/avg_trajectory_age": "mean age of a rollout: steps from the weights that sampled it to those it "
            "trains",
            "train/max_trajectory_age": "highest age of a rollout",
            "train/failures/<class>": "failed rollouts by class: infra, environment, agent, reward, cancelled, "
            "truncated",
            "train/response_faults/<fault>": "share of the rollouts whose response did this to its verifier or tool, "
            "e.g. verifier_timeout, or ran into a limit before any reward (truncated_before_reward); the reward "
            "counts, and a fault that does not occur has no metric",
            "train/env/<environment>/reward_mean": "mean reward of the rollouts of one environment, or agent of NeMo "
            "Gym",
            "train/env/<environment>/turns": "mean turns of the rollouts that did not fail",
            "train/env/<environment>/tokens": "mean sampled tokens of the rollouts that did not fail",
            "train/env/<environment>/truncation_rate": "share of the rollouts that were cut by a token limit",
            "train/env/<environment>/num_failed": "failed rollouts of that environment",
            "train/env/<environment>/<metric>": "with several environments: the rollout metrics of each",
            "train/env/<environment>/failures/<class>": "with several environments: the failures of each",
            "train/env/<environment>/response_faults/<fault>": "with several environments: the response faults of each",
            "train/env/<environment>/reward/<name>": "with several environments: the named rewards of each",
        },
    ),
    MetricGroup(
        "Several policies (`policies`)",
        frozenset({"grpo"}),
        {
            "train/policies/<policy>/reward_mean": "mean reward of a policy over the rollouts in which it spoke",
            "train/policies/<policy>/<metric>": "metrics of the batch and of the training of each policy; without its "
            "name they are those of the first policy, and counts the sums over all policies",
            "train/policies/<policy>/advantages/<metric>": "advantages of each policy",
            "train/policies/<policy>/skipped_steps/<cause>": "skipped optimizer steps of each policy by cause",
            "train/policies/<policy>/reward/<name>": "mean of one named reward of each policy, if there are several",
        },
    ),
    MetricGroup(
        "Policy gradient",
        ROLLOUT_ALGORITHMS,
        {
            "train/advantages/mean": "mean advantage over the trained tokens",
            "train/advantages/max": "highest advantage of a trained token",
            "train/advantages/min": "lowest advantage of a trained token",
            "train/probs_ratio": f"{TOKENS} of exp(lp - lp_prev)",
            "train/probs_ratio_min": "lowest ratio of a token",
            "train/probs_ratio_max": "highest ratio of a token",
            "train/probs_ratio_clamped": "the ratio after clipping",
            "train/probs_ratio_clamped_min": "lowest clipped ratio of a token",
            "train/probs_ratio_clamped_max": "highest clipped ratio of a token",
            "train/kl_penalty": "KL divergence from the reference policy, before its coefficient",
            "train/approx_entropy": f"{TOKENS} of -exp(lp - lp_gen) lp",
            "train/entropy": f"{TOKENS} of the distribution's entropy, if `loss_fn` reads it",
            "train/num_invalid_tool_calls": "replies whose advantage is `grpo.invalid_tool_call_advantage`",
            "train/num_malformed_thinking": "replies whose advantage is `grpo.malformed_thinking_advantage`",
            "train/oversampling/begun_groups": "groups begun for the step (`rollout.oversample` above 1)",
            "train/oversampling/deferred_groups": "groups put off; the next step begins with their prompts",
            "train/oversampling/cancelled_groups": "deferred groups with rollouts that had not ended",
            "train/oversampling/discarded_rollouts": "ended rollouts of deferred groups",
            "train/dynamic_sampling_num_gen_batches": "batches generated to fill the step (dynamic sampling)",
            "train/dynamic_sampling_num_discarded_valid_samples": "usable rollouts that did not fit the step",
        },
    ),
    MetricGroup(
        "Trainer against engine",
        ROLLOUT_ALGORITHMS,
        {
            "train/token_mult_prob_error": f"{TOKENS} of exp(abs(lp_prev - lp_gen)); 1 is perfect",
            "train/gen_kl_error": f"{TOKENS} of the k3 estimate with d = lp_prev - lp_gen",
            "train/policy_kl_error": f"{TOKENS} of the k3 estimate with d = lp_gen - lp_prev",
            "train/js_divergence_error": f"{TOKENS} of half the k3 estimate to the mixture, from each side",
            "train/max_logprob_error": "highest abs(lp_prev - lp_gen) of a token",
            "train/num_nonfinite_generation_logprobs": "trained tokens for which the engine's log-prob is not finite",
            "train/sampling_mask_mismatch": "share of trained tokens drawn from another set than the policy's own",
            "train/sampling_mask_missing": "share without a recorded set: scored on the policy's own top-k and top-p",
            "train/sampling_importance_ratio": f"{TOKENS} of exp(lp_prev - lp_gen), as it weights the loss",
            "train/is_oob_ratio": "share of the tokens or sequences whose importance weight was clamped or dropped",
            "train/max_seq_mult_prob_error": "highest mean of exp(abs(lp_prev - lp_gen)) of a sequence",
            "train/mean_seq_mult_prob_error": "mean of that value over the sequences",
            "train/max_seq_mult_prob_error_after_mask": "highest value below `grpo.seq_logprob_error_threshold`",
            "train/num_masked_seqs_by_logprob_error": "sequences above that threshold, which get no gradient",
            "train/masked_correct_pct": "share of these sequences with a positive reward",
        },
    ),
    MetricGroup(
        "Distillation",
        frozenset({"distillation"}),
        {
            "train/forward_kl": f"{TOKENS} of sum p (log p - log q) over the teacher's top tokens; q is the student",
            "train/reverse_kl": f"{TOKENS} of sum q (log q - log p), whichever of the two is trained on",
            "train/teacher_topk_mass": f"{TOKENS} of the total probability that the teacher gives to those tokens",
            "train/student_topk_mass": f"{TOKENS} of the total probability that the student gives to them",
        },
    ),
    MetricGroup(
        "Teachers with another tokenizer",
        frozenset({"distillation"}),
        {
            "train/divergence": f"{TOKENS} of the divergence from the teacher's top tokens",
            "train/unmatched": f"{TOKENS} of the distance between tokens without a counterpart (matching: identical)",
            "train/cross_tokenizer/with_target": "share of sampled tokens for which the teacher's distribution is "
            "known",
            "train/cross_tokenizer/target_mass": "mean probability that the teacher gives to the candidates of a token",
            "train/cross_tokenizer/unmatched_mass": "mean probability of teacher tokens that the student does not have",
            "train/cross_tokenizer/teacher_tokens_per_token": "teacher's tokens per sampled token, for the same text",
        },
    ),
    MetricGroup(
        "Teachers, measured once at the start",
        frozenset(),
        {
            "validation/teacher_reward": "mean reward of the teachers (`distillation.val_teacher`)",
            "validation/teacher_accuracy": "share of correct rollouts of the teachers",
            "validation/teacher_greedy_reward": "mean reward of the teachers at temperature 0",
            "validation/teacher_greedy_accuracy": "share of correct rollouts of the teachers at temperature 0",
        },
    ),
    MetricGroup(
        "Rollouts",
        ROLLOUT_ALGORITHMS,
        {
            "train/num_rollouts": "rollouts of the step, including failed ones",
            "train/total_turns": "turns of all rollouts together",
            "train/avg_turns_per_sample": "mean turns of a rollout",
            "train/max_turns_per_sample": "most turns of a rollout",
            "train/natural_termination_rate": "share ended by the environment",
            "train/truncation_rate": "share cut by a token limit",
            "train/max_turns_reached_rate": "share that used all allowed turns without an end",
            "train/mean_total_tokens_per_sample": "mean tokens of a rollout",
            "train/mean_gen_tokens_per_sample": "mean sampled tokens of a rollout",
            "train/max_gen_tokens_per_sample": "most sampled tokens of a rollout",
            "train/mean_env_tokens_per_sample": "mean tokens that environments added to a rollout",
        },
    ),
    MetricGroup(
        "Background collection",
        ROLLOUT_ALGORITHMS,
        {
            "train/replay_buffer/size": "complete groups left in the buffer after this step's groups are taken",
            "train/replay_buffer/in_flight": "groups whose rollouts are still running at that time",
            "train/replay_buffer/dropped_groups": "groups dropped since the last step: late, or older than the bound",
            "train/replay_buffer/given_up_rollouts": "rollouts of late groups that were given up (`stale_groups: "
            "trim`)",
        },
    ),
    MetricGroup(
        "Validation",
        ROLLOUT_ALGORITHMS,
        {
            "validation/reward": "mean reward at the validation temperature over all rollouts; a failed one counts as "
            "wrong, with the lowest reward of the others, at most 0. With several datasets the mean over them",
            "validation/reward_without_failed": "`reward` over the rollouts that did not fail, if any failed",
            "validation/accuracy_without_failed": "`accuracy` over the rollouts that did not fail, if any failed",
            "validation/greedy_reward": "mean reward at temperature 0 (`grpo.val_greedy`), failed ones counted as "
            "wrong",
            "validation/greedy_accuracy": "share of correct rollouts at temperature 0 (`grpo.val_greedy`)",
            "validation/greedy_num_failed": "failed rollouts of that pass, if any",
            "validation/avg_length": "mean sampled tokens of a rollout that did not fail",
            "validation/pass_<k>": "pass@k of the k generations of a prompt, failed ones counted as wrong",
            "validation/num_failed": "failed rollouts",
            "validation/response_faults/<fault>": "share of the rollouts with this response fault, as in training",
            "validation/<dataset>/<metric>": "each of these metrics for one of several validation datasets",
            "validation/<dataset>/response_faults/<fault>": "the response faults of one of several validation datasets",
        },
    ),
    MetricGroup(
        "Preferences (run_dpo.py, run_rm.py)",
        frozenset({"dpo", "rm"}),
        {
            "train/accuracy": "share of the step's pairs whose chosen answer has the higher reward; a tie counts as "
            "wrong",
            "train/rewards_chosen_mean": "mean reward of the chosen answers: DPO's sum of `lp - lp_reference` without "
            "`dpo.reference_policy_kl_penalty`, a reward model's score",
            "train/rewards_rejected_mean": "mean reward of the rejected answers",
            "validation/rewards_chosen_mean": "mean over the validation pairs",
            "validation/rewards_rejected_mean": "mean over the validation pairs",
            "validation/num_valid_samples": "validation pairs that were measured (run_rm.py)",
            "data/train/num_pairs": "training pairs of run_dpo.py, logged once",
        },
    ),
    MetricGroup(
        "Direct preference optimization (run_dpo.py)",
        frozenset({"dpo"}),
        {
            "train/preference_loss": "mean loss of the pairs (`dpo.loss_type`)",
            "train/sft_loss": "mean negative log-likelihood of the chosen answers, whatever its weight in the loss",
            "validation/preference_loss": "mean over the validation pairs",
            "validation/sft_loss": "mean over the validation pairs",
        },
    ),
    MetricGroup(
        "Reward models (run_rm.py)",
        frozenset({"rm"}),
        {
            "train/pair_accuracy": "`train/accuracy` under its own name",
            "train/reward_margin": "mean score of the chosen answers minus that of the rejected ones",
            "validation/pair_accuracy": "share over all validation pairs",
            "validation/reward_margin": "margin over all validation pairs",
        },
    ),
    MetricGroup(
        "Supervised training (run_sft.py, run_dpo.py)",
        frozenset({"sft", "dpo"}),
        {
            "validation/loss": "mean loss of all trained tokens of the validation set; of preferences, of all pairs",
            "data/train/num_conversations": "training conversations, logged once",
            "data/train/num_overlong": "conversations, or pairs, with more tokens than `data.max_input_seq_length`",
            "data/train/num_dropped": "those of them that were dropped, not masked or truncated (`data.overlong`)",
            "data/validation/<dataset>/<count>": "the same counts for each validation dataset",
        },
    ),
    MetricGroup(
        "Seconds",
        frozenset(),
        {
            "timing/train/total_step_time": "the whole step",
            "timing/train/generation": "rollouts of a synchronous step, including environments",
            "timing/train/exposed_generation": "waiting for rollouts that are collected in the background (async_grpo)",
            "timing/train/data_processing": "batch assembly",
            "timing/train/reward_calculation": "reward scaling and shaping",
            "timing/train/teacher_logprobs": "the teachers' forward passes, including moving them to the device",
            "timing/train/policy_and_reference_logprobs": "forward passes before training",
            "timing/train/advantage_calculation": "advantages",
            "timing/train/rollout_details": "recording the groups of `logger.rollout_details`",
            "timing/train/policy_training": "forward, backward and optimizer",
            "timing/train/weight_sync": "sending the new weights to the engine",
            "timing/train/checkpointing": "waiting for a checkpoint, in steps that begin or finish one",
            "timing/moves/sleep": "the engine leaves the device that it shares with the policy; part of the phases "
            "above",
            "timing/moves/wake": "the engine returns to it",
            "timing/moves/offload": "the policy leaves it",
            "timing/moves/onload": "the policy's return is begun; what it computes with first is awaited there",
            "timing/validation/total_validation_time": "a whole validation",
        },
    ),
    MetricGroup(
        "Efficiency",
        frozenset(),
        {
            "efficiency/training_busy_pct": "share of the step in which the policy computed log-probs or trained",
            "efficiency/exposed_wait_s/<cause>": "seconds that the trainer waited for generation, teachers, "
            "weight_sync, validation, checkpointing; of generation, for too_few_groups that are complete, or for a "
            "late_group at the age bound",
            "efficiency/generation_busy_pct": "share of the time since the last step's groups in which rollouts ran",
        },
    ),
    MetricGroup(
        "Throughput",
        frozenset(),
        {
            "performance/samples_per_sec": "trained samples per second of the step",
            "performance/tokens_per_sec": "tokens of the batch per second of the step",
            "performance/generation_tokens_per_sec": "sampled tokens per second of generation",
            "performance/policy_training_tokens_per_sec": "tokens of the batch per second of training",
            "performance/train_flops": "floating-point operations per second of training",
            "performance/mfu": "that over the bfloat16 peak of the devices that train, if it is known "
            "(device_peaks.py)",
            "performance/tokens_per_sec_per_device": "tokens of the batch per second of the step and device of the run",
            "performance/policy_training_tokens_per_sec_per_device": "per second of training and device that trains",
        },
    ),
    MetricGroup(
        "GPUs of the driver's node, by nvidia-smi (`logger.monitor_gpus`)",
        frozenset(),
        {
            "gpu/<index>/util": "mean share of the time since the last step in which the GPU computed, in percent",
            "gpu/<index>/mem_gb": "mean memory in use, in GiB",
            "gpu/<index>/power_w": "mean power in watts",
            "gpu/<index>/temperature_c": "mean temperature in degrees Celsius",
        },
    ),
)


def ranking_metrics(split: Literal["train", "val"], algorithm: str) -> frozenset[str]:
    """Return the names that `checkpointing.metric_name` may use after `train:` or `val:` for an algorithm.

    Names with a slash or of variable parts depend on the data and are left to the first checkpoint.

    Example: `ranking_metrics("val", "sft")` is `{"loss"}`.
    """
    prefix = "train/" if split == "train" else "validation/"
    names = (name for group in METRIC_GROUPS if algorithm in group.algorithms for name in group.meanings)
    plain = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    ranking = frozenset(name for name in plain if not set(name) & set("/<")) - NEVER_RANKING
    return ranking | CHECKPOINT_ONLY_METRICS if split == "train" and algorithm in ROLLOUT_ALGORITHMS else ranking
