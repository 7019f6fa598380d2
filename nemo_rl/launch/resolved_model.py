"""Models of a run without their weights: path, configuration, tokenizer and chat template, read and checked once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from nemo_rl.algorithms.cross_tokenizer_stage import TeacherTargetBuilder
from nemo_rl.algorithms.cross_tokenizer_targets import TokenMap
from nemo_rl.config.checks import uses_cross_tokenizer
from nemo_rl.config.data import BaseDataConfig, resolve_dataset
from nemo_rl.config.images import VISION_FAMILIES, ImagesConfig
from nemo_rl.config.master import DistillationRunConfig, RolloutRunConfig, TrainingRunConfig
from nemo_rl.config.moe import check_moe
from nemo_rl.config.policy import ModelConfig, PolicyConfig, TeacherConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.token_alignment import Vocabulary
from nemo_rl.data.tokenizer import load_tokenizer, load_tokenizer_with_template
from nemo_rl.data.vision import ImageEncoder
from nemo_rl.distributed.expert_routers import MODEL_TYPES
from nemo_rl.distributed.vision_towers import sees
from nemo_rl.errors import ConfigError
from nemo_rl.launch.models import resolve_model
from nemo_rl.policy.hf_model import load_config

READS_TEXT = "policy.model_name reads text; allowed: {} or a model of type " + ", ".join(VISION_FAMILIES)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model of a run, without its weights."""

    key: str  # its section: policy, teacher or teachers.<task>
    path: str  # a directory or a hub name
    config: PreTrainedConfig | None  # its config.json with hf_config_overrides; None for a served teacher
    tokenizer: PreTrainedTokenizerBase
    encoder: ChatEncoder

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the embedding, padding included."""
        assert self.config is not None
        return self.config.get_text_config().vocab_size

    @property
    def max_length(self) -> int | None:
        """Return the longest sequence that the model accepts, in tokens; None without a limit or if it is served."""
        return None if self.config is None else max_positions(self.config)


async def resolve_policy(section: PolicyConfig) -> ResolvedModel:
    """Resolve `policy`; raises ConfigError for a model that cannot be split, adapted or given such long sequences."""
    path = await resolve_model(section.model_name)
    config = load_config(path, section.hf_config_overrides)
    section.parallelism.check_model(config, key=f"policy.{section.backend_key}")
    check_moe(section.moe, config)
    check_router_replay(section, config)
    check_vision(section, config)
    check_context_length(section, config)
    tokenizer = load_tokenizer(section.tokenizer, path)
    images = ImageEncoder.load(path) if sees(config) else None
    encoder = ChatEncoder(tokenizer, chat_template_kwargs=section.tokenizer.chat_template_kwargs, images=images)
    encoder.check()
    encoder.check_images()
    return ResolvedModel("policy", path, config, tokenizer, encoder)


def check_vision(policy: PolicyConfig, model: PreTrainedConfig) -> None:
    """Raise ConfigError for options that a model that sees, or one that does not, excludes."""
    if not sees(model):
        if policy.freeze_vision:
            problem = f"models of type {model.model_type!r} have no vision tower of a known family; allowed: false"
            raise ConfigError("policy.freeze_vision", True, problem)
        return
    _check_seeing_model("policy", policy, model)


def _check_seeing_model(key: str, section: PolicyConfig | TeacherConfig, model: PreTrainedConfig) -> None:
    """Raise ConfigError for options of the section `key` that its model, which sees, excludes."""
    kind = f"the model sees (it is of type {model.model_type!r})"
    if section.sequence_packing.share_prefixes:
        raise ConfigError(f"{key}.sequence_packing.share_prefixes", True, f"{kind}; allowed: false")
    if section.parallelism.num_context_parallel_ranks > 1:
        size = section.parallelism.num_context_parallel_ranks
        raise ConfigError(f"{key}.{section.backend_key}.context_parallel_size", size, f"{kind}; allowed: 1")
    if not section.parallelism.SEES:
        raise ConfigError(f"{key}.model_name", section.model_name, f"{kind}; allowed: {key}.backend fsdp2")


def check_images_are_seen(config: RolloutRunConfig, encoder: ChatEncoder) -> None:
    """Raise ConfigError for rows or environments with images and a policy that reads text."""
    for name, environment in config.env.items():
        if environment.shows_images and encoder.images is None:
            raise ConfigError(f"env.{name}.images", True, READS_TEXT.format("false,"))
    check_image_rows(config.data, encoder)


def check_image_rows(data: BaseDataConfig, encoder: ChatEncoder) -> None:
    """Raise ConfigError for rows with images and a policy that reads text."""
    if encoder.images is not None or encoder.is_rendered_by_server:
        return
    for key, section in _image_sections(data):
        raise ConfigError(key, section.model_dump(exclude_unset=True), READS_TEXT.format("null,"))


def _image_sections(data: BaseDataConfig) -> Iterator[tuple[str, ImagesConfig]]:
    """Yield the `images` of each dataset that has one, by its key."""
    for key, own in data.datasets:
        section = resolve_dataset(own, data.default, key=key)[1].images
        if section is not None:
            yield f"{key}.images", section


def check_router_replay(policy: PolicyConfig, model: PreTrainedConfig) -> None:
    """Raise ConfigError for `policy.router_replay` with a model whose routers are not known, such as a dense one."""
    if policy.router_replay.enabled and model.model_type not in MODEL_TYPES:
        problem = f"models of type {model.model_type!r} have no routers that can replay; allowed: false"
        raise ConfigError("policy.router_replay.enabled", True, f"{problem}, or types {', '.join(MODEL_TYPES)}")


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence of a model, in tokens; None without a limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_context_length(policy: ModelConfig, model: PreTrainedConfig) -> None:
    """Raise ConfigError if the model does not accept `policy.max_total_sequence_length` tokens."""
    length, longest = policy.max_total_sequence_length, max_positions(model)
    if longest is not None and length > longest:
        raise ConfigError("policy.max_total_sequence_length", length, f"the model takes {longest} tokens at most")


async def resolve_teachers(config: TrainingRunConfig, policy: ResolvedModel) -> dict[str, ResolvedModel]:
    """Resolve every teacher, by key; raises ConfigError for one that cannot be compared with the policy."""
    teachers = {
        key: await _resolve_teacher(key, section, config, policy) for key, section in config.teacher_sections.items()
    }
    if isinstance(config, DistillationRunConfig):
        own = () if uses_cross_tokenizer(config) else (policy,)
        for model in (*own, *(teacher for teacher in teachers.values() if teacher.config is not None)):
            if config.distillation.topk_logits_k > model.vocab_size:
                raise ConfigError(
                    "distillation.topk_logits_k",
                    config.distillation.topk_logits_k,
                    f"more tokens than {model.key}.model_name has; allowed: at most {model.vocab_size}",
                )
    return teachers


async def _resolve_teacher(
    key: str, section: TeacherConfig, config: TrainingRunConfig, policy: ResolvedModel
) -> ResolvedModel:
    path = await resolve_model(section.model_name, key=f"{key}.model_name")
    tokenizer = load_tokenizer_with_template(
        section.tokenizer.name or path,
        section.tokenizer.chat_template,
        name_key=f"{key}.model_name" if section.tokenizer.name is None else f"{key}.tokenizer.name",
        template_key=f"{key}.tokenizer.chat_template",
    )
    model_config, images = None, None
    if section.server is None:
        model_config = load_config(path, section.hf_config_overrides, section=key)
        section.parallelism.check_model(model_config, key=f"{key}.{section.backend_key}")
        if sees(model_config) and not uses_cross_tokenizer(config):  # else its encoder refuses images
            _check_seeing_model(key, section, model_config)
            images = ImageEncoder.load(path, key=f"{key}.model_name")
    encoder = ChatEncoder(tokenizer, chat_template_kwargs=section.tokenizer.chat_template_kwargs, images=images)
    teacher = ResolvedModel(key, path, model_config, tokenizer, encoder)
    if not uses_cross_tokenizer(config):  # else what exceeds the teacher's context is dropped
        _check_same_vocabulary(section, teacher, policy)
        _check_teacher_length(section, teacher, config.policy.max_total_sequence_length)
        _check_teacher_images(section, teacher, policy, images_key=_find_images_key(config))
    return teacher


def _find_images_key(config: TrainingRunConfig) -> str | None:
    """Return the key of a dataset or an environment that shows images; None if there is none."""
    for name, environment in config.env.items():
        if environment.shows_images:
            return f"env.{name}.images"
    return next((key for key, _ in _image_sections(config.data)), None)


def _check_teacher_images(
    section: TeacherConfig, teacher: ResolvedModel, policy: ResolvedModel, *, images_key: str | None
) -> None:
    """Raise ConfigError for a teacher that cannot be given the features of the policy's images."""
    key = f"{teacher.key}.model_name"
    if policy.encoder.images is None:
        return
    if teacher.encoder.images is None:
        if images_key is not None:
            problem = f"it reads text, and {images_key} shows images; allowed: a model with the policy's processor"
            raise ConfigError(key, section.model_name, problem)
        return
    own, others = policy.encoder.images.settings, teacher.encoder.images.settings
    differing = next((name for name in {**own, **others} if own.get(name) != others.get(name)), None)
    if differing is not None:
        problem = f"its processor has {differing} = {others.get(differing)}, and the policy's {own.get(differing)}"
        raise ConfigError(key, section.model_name, f"{problem}; allowed: a model with the policy's processor")


def _check_teacher_length(section: TeacherConfig, teacher: ResolvedModel, length: int) -> None:
    if teacher.max_length is not None and length > teacher.max_length:
        problem = f"it takes {teacher.max_length} tokens at most, and policy.max_total_sequence_length is {length}"
        raise ConfigError(f"{teacher.key}.model_name", section.model_name, problem)


def _check_same_vocabulary(section: TeacherConfig, teacher: ResolvedModel, policy: ResolvedModel) -> None:
    """Raise ConfigError unless every token has the same id in the teacher's tokenizer as in the policy's."""
    own, others = policy.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    if own == others:
        return
    differing = min((token for token in own.keys() | others.keys() if own.get(token) != others.get(token)), default="")
    raise ConfigError(
        f"{teacher.key}.model_name",
        section.model_name,
        f"its tokenizer has another vocabulary than the policy's: {len(others)} and {len(own)} tokens, and e.g. "
        f"{differing!r} is {others.get(differing)} there and {own.get(differing)} here, while the loss compares tokens "
        "by their ids; allowed: a teacher with the policy's tokenizer, or, in examples/run_distillation.py, "
        "loss_fn.cross_tokenizer.enabled: true",
    )


def make_target_builders(
    config: TrainingRunConfig, policy: ResolvedModel, teachers: Mapping[str, ResolvedModel]
) -> dict[str, TeacherTargetBuilder]:
    """Return one target builder per teacher with a tokenizer of its own, by key; none if all share the policy's.

    Raises ConfigError for a tokenizer whose bytes are not known, and for a chat template that refuses a user's message.
    """
    if not uses_cross_tokenizer(config):
        return {}
    student = Vocabulary.of(policy.tokenizer, stop_token_ids=policy.encoder.stop_token_ids)
    return {key: _make_target_builder(config, teacher, student) for key, teacher in teachers.items()}


def _make_target_builder(
    config: DistillationRunConfig, teacher: ResolvedModel, student: Vocabulary
) -> TeacherTargetBuilder:
    section, matching = config.teacher_sections[teacher.key], config.loss_fn.token_matching
    assert matching is not None
    try:
        teacher.encoder.check()
        vocabulary = Vocabulary.of(teacher.tokenizer, stop_token_ids=teacher.encoder.stop_token_ids)
    except ConfigError as error:  # its keys are those of `policy`
        key = error.key.replace("policy.", f"{teacher.key}.", 1)
        raise ConfigError(key, error.value, error.problem, known=error.known) from error
    # A teacher's tokens may be more than the student's: they must also fit one of its micro-batches.
    budgets = [part.logprob_mb_tokens for part in (section.sequence_packing, section.dynamic_batching) if part.enabled]
    is_served = section.server is not None
    return TeacherTargetBuilder(
        TokenMap(student, vocabulary),
        tokenizer=teacher.tokenizer,
        encoder=teacher.encoder,
        matching=matching.matching,
        max_length=None if is_served else min(filter(None, (teacher.max_length, *budgets)), default=None),
    )
