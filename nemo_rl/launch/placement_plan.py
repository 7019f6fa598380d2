"""The placement plan of a run: what `--dry-run` prints about which part runs where, and in which precision."""

from collections.abc import Sequence
from itertools import groupby

from nemo_rl.config.collect import SampledRunConfig
from nemo_rl.config.layout import DeviceSlot, Layout
from nemo_rl.config.master import RolloutRunConfig, TrainingRunConfig
from nemo_rl.config.policy import ParallelModelConfig
from nemo_rl.config.supervised_runs import SupervisedRunConfig
from nemo_rl.launch.sampled import find_device
from nemo_rl.weight_sync.adapters import DESCRIPTIONS, choose_adapter_refit
from nemo_rl.weight_sync.transports import choose_transport


def placement_plan(config: TrainingRunConfig | SupervisedRunConfig, layout: Layout) -> str:
    """Return one line per part of the run: its name, where it runs, in which precision; raises ConfigError."""
    lines = _policy_lines(config, layout)
    if isinstance(config, TrainingRunConfig):
        lines += _rollout_lines(config, layout)
    elif config.needs_reference:
        lines.append(f"#   reference policy: {_describe_reference(config)}")
    return "\n".join(lines)


def _rollout_lines(config: TrainingRunConfig, layout: Layout) -> list[str]:
    return [
        f"#   reference policy: {_describe_reference(config)}",
        *(f"#   {key}: {_describe_teacher(key, config, layout)}" for key in config.teacher_sections),
        f"#   generation: {_describe_engines(config, layout)}, {config.policy.engine_dtype}",
        *_environment_lines(config),
        f"#   weight sync: {_describe_weight_sync(config, layout)}",
    ]


def _describe_weight_sync(config: TrainingRunConfig, layout: Layout) -> str:
    transport = choose_transport(config.weight_sync.transport, layout).replace("_", " ")
    chosen, reason = choose_adapter_refit(config, layout)
    if config.policy.parallelism.adapter_dim is None:
        return transport
    return f"{transport}, the adapter {DESCRIPTIONS[chosen]} ({reason})"


def collection_placement_plan(*configs: SampledRunConfig) -> str:
    """Return the plan of collections of one model each that differ in nothing else; nothing is trained."""
    config = configs[0]
    models = ", then ".join(each.policy.model_name for each in configs)
    lines = [
        "# placement",
        f"#   model{'s' if len(configs) > 1 else ''}: {models}",
        f"#   generation: {_describe_server(config)}",
        *_environment_lines(config),
    ]
    return "\n".join(lines)


def _describe_server(config: SampledRunConfig) -> str:
    server = config.server
    if server.address is not None:
        return f"{server.model or 'the one model'} served at {', '.join(server.addresses)}, api: {server.api}"
    copies = {"tensor parallel": server.tensor_parallel_size, "data parallel": server.data_parallel_size}
    split = [f"{size} {name}" for name, size in copies.items() if size > 1]
    parts = [f"{server.backend} on {find_device(config)}", "started by the driver", *split]
    return ", ".join([*parts, config.policy.precision])


def _environment_lines(config: RolloutRunConfig) -> list[str]:
    agents = sorted(name for name, section in config.runner_sections.items() if not section.has_stack)
    return [
        f"#   environments: {', '.join(sorted(config.env.keys() - set(agents))) or 'none'}",
        *([f"#   agents: {', '.join(agents)}; gateway on {config.gateway.host}"] if agents else []),
    ]


def _policy_lines(config: TrainingRunConfig | SupervisedRunConfig, layout: Layout) -> list[str]:
    model = (
        f"{config.policy.model_name}, {_describe_ranks(config.policy, layout, layout.ranks)}, {config.policy.precision}"
    )
    return [
        "# placement",
        *([f"#   cluster: {_describe_cluster(config, layout)}"] if layout.needs_cluster else []),
        f"#   policy: {model}{_describe_adapters(config)}",
    ]


def _describe_adapters(config: TrainingRunConfig | SupervisedRunConfig) -> str:
    adapters = config.policy.parallelism.adapters
    return f", {adapters}" if adapters else ""


def _describe_reference(config: TrainingRunConfig | SupervisedRunConfig) -> str:
    if not config.needs_reference:
        return "none (no KL penalty)"
    return "the policy without its adapters" if _describe_adapters(config) else "a frozen copy beside the policy"


def _describe_cluster(config: TrainingRunConfig | SupervisedRunConfig, layout: Layout) -> str:
    gpus = f" with {layout.gpus_per_node} GPUs each" if layout.gpus_per_node else ""
    where = f"Ray at {config.cluster.address}" if config.cluster.address else "Ray, of RAY_ADDRESS or local"
    return f"{where}, {_pluralize(layout.num_nodes, 'node')}{gpus}"


def _describe_ranks(model: ParallelModelConfig, layout: Layout, slots: Sequence[DeviceSlot]) -> str:
    """Return e.g. "Megatron, 4 ranks (1 data x 2 pipeline x 2 tensor parallel) on cpu"."""
    parallelism = model.parallelism
    text = f"{parallelism.title}, {_pluralize(len(slots), 'rank')}"
    data, context = len(slots) // model.model_parallel_size, model.context_parallel_size
    experts = parallelism.experts_on(data, key=model.backend_key)
    if model.model_parallel_size > 1:
        stages = f"{model.pipeline_parallel_size} pipeline x " if parallelism.PIPELINE_PARALLEL_KEY else ""
        alone = " of long samples" if parallelism.divides_only_long else ""
        slices = f"{context} context{alone} x " if context > 1 else ""
        text += f" ({data} data x {slices}{stages}{model.tensor_parallel_size} tensor parallel)"
    if experts.num_ranks > 1:
        copies = f", in {experts.copies} copies" if experts.copies > 1 else ""
        text += f", experts over {experts.num_ranks} ranks{copies}"
    return f"{text} on {_format_devices(layout, slots)}"


def _describe_teacher(key: str, config: TrainingRunConfig, layout: Layout) -> str:
    section = config.teacher_sections[key]
    if section.server is not None:
        return f"{section.server.model} served at {', '.join(section.server.base_urls)}"
    shared = ", in turns with the policy" if layout.device == "cuda" and section.colocated.enabled else ""
    return (
        f"{section.model_name}, {_describe_ranks(section, layout, layout.teachers[key])}{shared}, {section.precision}"
    )


def _describe_engines(config: TrainingRunConfig, layout: Layout) -> str:
    section = config.policy.generation
    if section.runs_in_driver or not (section.in_actor or layout.needs_cluster):
        return f"{section.backend} on {layout.device}, started by the driver"
    if not layout.needs_cluster:
        return f"{section.backend} on {layout.device}, in a Ray actor"
    count = _pluralize(len(layout.engines), "engine")
    shared = "" if layout.is_split or layout.device == "cpu" else ", shared with the policy"
    return f"{section.backend}, {count} on {_format_devices(layout, layout.engines)}{shared}"


def _format_devices(layout: Layout, slots: Sequence[DeviceSlot]) -> str:
    """Return e.g. "cuda: node 0 GPUs 0 1; node 1 GPU 0"; without a cluster the device only."""
    if not layout.needs_cluster:
        return layout.device
    nodes: list[str] = []
    for node, on_node in groupby(slots, key=lambda slot: slot.node):
        gpus = [str(gpu) for slot in on_node for gpu in slot.gpus]
        nodes.append(f"node {node}" + (f" GPU{'s' if len(gpus) > 1 else ''} {' '.join(gpus)}" if gpus else ""))
    return f"{layout.device}: {'; '.join(nodes)}"


def _pluralize(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
