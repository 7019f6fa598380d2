"""Advantage estimators by name: sections, checks and factories of `grpo.adv_estimator`.

Imports no torch, since a configuration imports it; the estimators themselves are in advantages.py.
"""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from nemo_rl import batch as keys
from nemo_rl.config.kinds import Entry, entry_from_callable
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.master import AdvantageEstimatorConfig, GRPORunConfig
from nemo_rl.config.registries import ADVANTAGE_ESTIMATORS
from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.interfaces import AdvantageEstimator


def make_advantage_estimator(section: AdvantageEstimatorConfig, loss: LossConfig) -> "AdvantageEstimator":
    """Return the estimator of a section; `loss` is the section of the loss, whose KL may belong to the reward."""
    return ADVANTAGE_ESTIMATORS.entry(section.name, key="grpo.adv_estimator.name").make(section, loss)


class GroupEstimatorConfig(AdvantageEstimatorConfig):
    """Keys of the built-in estimators; NeMo-RL's recipes set them whatever the estimator is."""

    normalize_rewards: bool = True  # divide by the group's standard deviation
    use_leave_one_out_baseline: bool = False  # the baseline of a rollout is the mean of the others of its group
    minus_baseline: bool = True  # reinforce_plus_plus: subtract the group's mean
    normalization_scope: Literal["group", "batch"] = "group"  # grpo: whose standard deviation divides
    std_epsilon: float = Field(default=1e-6, ge=0)  # added to the standard deviation
    # use_leave_one_out_baseline: the others' deviation is at least this share of the group's; 0: as it is (NeMo-RL)
    min_std_share: float = Field(default=0.5, ge=0, le=1)


class GRPOEstimatorConfig(GroupEstimatorConfig):
    """`name: grpo` (arXiv 2402.03300): rewards relative to their group."""

    name: str = "grpo"


def check_unread(key: str, section: GroupEstimatorConfig) -> None:
    """Raise ConfigError for a key that only another estimator reads."""
    if not section.minus_baseline:
        raise ConfigError(f"{key}.minus_baseline", False, "read by name: reinforce_plus_plus only; allowed: true")
    if section.normalization_scope != "group" and section.name != "grpo":
        raise ConfigError(
            f"{key}.normalization_scope", section.normalization_scope, "read by name: grpo only; allowed: group"
        )


def check_group_size(key: str, section: GroupEstimatorConfig, config: GRPORunConfig) -> None:
    """Raise ConfigError if every group has one rollout, which is its own baseline: all advantages would be 0."""
    if config.grpo.num_generations_per_prompt == 1:
        raise ConfigError(
            "grpo.num_generations_per_prompt",
            1,
            f"every advantage of {key}.name: {section.name} would be 0, as a rollout is compared with others of its "
            f"prompt; must be at least 2, or {key}: {{name: reinforce_plus_plus, minus_baseline: false}}",
        )


def check_grpo_estimator(key: str, section: GRPOEstimatorConfig, config: GRPORunConfig) -> None:
    """Raise ConfigError for unread keys, options that exclude each other, and groups of one."""
    check_unread(key, section)
    check_group_size(key, section, config)
    if section.normalization_scope == "batch" and section.use_leave_one_out_baseline:
        raise ConfigError(
            f"{key}.normalization_scope",
            "batch",
            f"{key}.use_leave_one_out_baseline takes the deviation of the group's others; allowed: group",
        )


def _make_group_relative(section: GRPOEstimatorConfig, loss: LossConfig) -> "AdvantageEstimator":
    from nemo_rl.algorithms.advantages import GroupRelativeAdvantages  # loads torch

    return GroupRelativeAdvantages(
        loss.reward_kl,
        leave_one_out=section.use_leave_one_out_baseline,
        normalize=section.normalize_rewards,
        std_epsilon=section.std_epsilon,
        min_std_share=section.min_std_share,
        batch_std=section.normalization_scope == "batch",
    )


GRPO = Entry(GRPOEstimatorConfig, make=_make_group_relative, check=check_grpo_estimator)


class PassAtKEstimatorConfig(GroupEstimatorConfig):
    """`name: grpo_passk` (arXiv 2503.19595): only the best rollout of a group counts, by its lead over the second."""

    name: str = "grpo_passk"


def check_group_alone(key: str, section: GroupEstimatorConfig, config: GRPORunConfig) -> None:
    """Raise ConfigError for unread keys, the leave-one-out baseline among them, and groups of one."""
    check_unread(key, section)
    check_group_size(key, section, config)
    check_no_leave_one_out(key, section)


def check_no_leave_one_out(key: str, section: GroupEstimatorConfig) -> None:
    """Raise ConfigError for the leave-one-out baseline of an estimator that has another."""
    if section.use_leave_one_out_baseline:
        raise ConfigError(
            f"{key}.use_leave_one_out_baseline", True, f"not read by name: {section.name}; allowed: false"
        )


def _make_pass_at_k(section: PassAtKEstimatorConfig, loss: LossConfig) -> "AdvantageEstimator":
    from nemo_rl.algorithms.advantages import BestOfGroupAdvantages  # loads torch

    return BestOfGroupAdvantages(loss.reward_kl, normalize=section.normalize_rewards, std_epsilon=section.std_epsilon)


GRPO_PASSK = Entry(PassAtKEstimatorConfig, make=_make_pass_at_k, check=check_group_alone)


class OPOEstimatorConfig(GroupEstimatorConfig):
    """`name: opo` (arXiv 2505.23585): rewards less the group's mean, weighted by length; nothing is divided."""

    name: str = "opo"


def _make_opo(section: OPOEstimatorConfig, loss: LossConfig) -> "AdvantageEstimator":
    from nemo_rl.algorithms.advantages import LengthWeightedAdvantages  # loads torch

    return LengthWeightedAdvantages(loss.reward_kl)


OPO = Entry(OPOEstimatorConfig, make=_make_opo, check=check_group_alone)


class ReMaxEstimatorConfig(GroupEstimatorConfig):
    """`name: remax` (arXiv 2310.10505): rewards less that of the prompt's greedy rollout; nothing is divided."""

    name: str = "remax"

    @property
    def compares_group(self) -> bool:
        """Return False: each rollout is compared with the greedy one."""
        return False

    @property
    def needs_greedy_baseline(self) -> bool:
        return True


def check_remax(key: str, section: ReMaxEstimatorConfig, config: GRPORunConfig) -> None:
    """Raise ConfigError for unread keys, the leave-one-out baseline among them."""
    check_unread(key, section)
    check_no_leave_one_out(key, section)


def _make_remax(section: ReMaxEstimatorConfig, loss: LossConfig) -> "AdvantageEstimator":
    from nemo_rl.algorithms.advantages import GreedyBaselineAdvantages  # loads torch

    return GreedyBaselineAdvantages(loss.reward_kl)


REMAX = Entry(ReMaxEstimatorConfig, make=_make_remax, check=check_remax)


class GDPOEstimatorConfig(GroupEstimatorConfig):
    """`name: gdpo` (arXiv 2601.05242): each named reward relative to its group, then their weighted sum, whitened."""

    name: str = "gdpo"
    # weights by reward name, 1 if not named; or a list in the alphabetical order of the names
    reward_weights: dict[str, float] | list[float] = Field(default_factory=dict)

    @property
    def reads_named_rewards(self) -> bool:
        return True


def check_gdpo(key: str, section: GDPOEstimatorConfig, config: GRPORunConfig) -> None:
    """Raise ConfigError for unread keys, groups of one, and options that change the total reward, which is not read."""
    check_unread(key, section)
    check_group_size(key, section, config)
    options = {
        "grpo.reward_scaling.enabled": config.grpo.reward_scaling.enabled,
        "grpo.reward_shaping.enabled": config.grpo.reward_shaping.enabled,
        **{f"reward_penalties.{name}": True for name in config.reward_penalties.enabled},
    }
    for option in (option for option, is_on in options.items() if is_on):
        raise ConfigError(option, True, "gdpo reads the named rewards as they are; allowed: false")


def _make_gdpo(section: GDPOEstimatorConfig, loss: LossConfig) -> "AdvantageEstimator":
    from nemo_rl.algorithms.advantages import DecoupledAdvantages  # loads torch

    return DecoupledAdvantages(
        loss.reward_kl,
        leave_one_out=section.use_leave_one_out_baseline,
        normalize=section.normalize_rewards,
        std_epsilon=section.std_epsilon,
        min_std_share=section.min_std_share,
        reward_weights=section.reward_weights,
    )


GDPO = Entry(GDPOEstimatorConfig, make=_make_gdpo, check=check_gdpo)


class ReinforcePlusPlusConfig(GroupEstimatorConfig):
    """`name: reinforce_plus_plus` (arXiv 2501.03262): rewards less their group's mean, whitened over the batch."""

    name: str = "reinforce_plus_plus"

    @property
    def compares_group(self) -> bool:
        """Return whether the group's mean is subtracted."""
        return self.minus_baseline


def check_reinforce_plus_plus(key: str, section: ReinforcePlusPlusConfig, config: GRPORunConfig) -> None:
    """Raise ConfigError for groups of one, if their mean is subtracted."""
    if section.minus_baseline:
        check_group_size(key, section, config)


def _make_reinforce_plus_plus(section: ReinforcePlusPlusConfig, loss: LossConfig) -> "AdvantageEstimator":
    from nemo_rl.algorithms.advantages import WhitenedAdvantages  # loads torch

    return WhitenedAdvantages(loss.reward_kl, minus_baseline=section.minus_baseline)


REINFORCE_PLUS_PLUS = Entry(ReinforcePlusPlusConfig, make=_make_reinforce_plus_plus, check=check_reinforce_plus_plus)


class OPDEstimatorConfig(GroupEstimatorConfig):
    """`name: opd`: on-policy distillation, with a teacher's log-probs in place of rewards."""

    name: str = "opd"

    @property
    def uses_teachers(self) -> bool:
        """Return True: the advantages are the teacher's."""
        return True

    @property
    def compares_group(self) -> bool:
        """Return False: a teacher judges each rollout by itself."""
        return False


def check_opd(key: str, section: OPDEstimatorConfig, config: GRPORunConfig) -> None:
    """Raise ConfigError for options that shape, or select by, rewards: these are not read."""
    options = {
        "loss_fn.use_kl_in_reward": config.loss_fn.reward_kl is not None,
        "grpo.reward_scaling.enabled": config.grpo.reward_scaling.enabled,
        "grpo.reward_shaping.enabled": config.grpo.reward_shaping.enabled,
        "grpo.use_dynamic_sampling": config.grpo.use_dynamic_sampling,
        f"{key}.use_leave_one_out_baseline": section.use_leave_one_out_baseline,
    }
    for option in (option for option, is_on in options.items() if is_on):
        raise ConfigError(option, True, "adv_estimator.name: opd reads no reward; allowed: false")
    check_unread(key, section)


def _make_opd(section: OPDEstimatorConfig, loss: LossConfig) -> "AdvantageEstimator":
    from nemo_rl.algorithms.advantages import TeacherAdvantages  # loads torch

    return TeacherAdvantages()


OPD = Entry(OPDEstimatorConfig, make=_make_opd, check=check_opd)


class CustomEstimatorConfig(AdvantageEstimatorConfig):
    """`name: package.module:Name`: a class, or a function that returns an estimator, called with `kwargs`."""

    kwargs: dict[str, Any] = Field(default_factory=dict)  # keyword arguments of the class or function

    @property
    def uses_teachers(self) -> bool:
        """Return whether the estimator reads the teachers' log-probs."""
        return keys.TEACHER_LOGPROBS in self._required_keys

    @property
    def needs_reference(self) -> bool:
        """Return whether the estimator reads the reference's log-probs."""
        return keys.REFERENCE_LOGPROBS in self._required_keys

    @property
    def needs_greedy_baseline(self) -> bool:
        """Return whether the estimator reads the greedy rollouts' rewards."""
        return keys.BASELINE_REWARD in self._required_keys

    @property
    def _required_keys(self) -> frozenset[str]:
        entry = ADVANTAGE_ESTIMATORS.entry(self.name, key="grpo.adv_estimator.name")
        return entry.make(self, None).required_keys


def adapt_estimator(key: str, path: str, target: Any) -> Entry[CustomEstimatorConfig]:
    """Return the entry of a user's own class or function; raises ConfigError for `key` if it is neither."""

    def check(section_key: str, section: CustomEstimatorConfig, config: GRPORunConfig) -> None:
        if config.loss_fn.reward_kl is not None:
            problem = f"{path} is made of its kwargs alone; for the loss's section it must be a kinds.Entry"
            raise ConfigError("loss_fn.use_kl_in_reward", True, f"{problem}; allowed: false")

    from nemo_rl.interfaces import AdvantageEstimator  # here: most configurations need no protocol

    return entry_from_callable(
        CustomEstimatorConfig, AdvantageEstimator, key=key, path=path, target=target, check=check
    )
