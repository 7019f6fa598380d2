"""The Python interface: what `nemo-rl grpo`, `distill`, `sft`, `dpo` and `eval` do, with rewards and rows as objects.

The arguments become a recipe, written beside the runs, and take the path of the command line from there.
"""

import asyncio
import contextlib
import hashlib
import inspect
import json
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nemo_rl.config.registries import ENVIRONMENTS
from nemo_rl.errors import ConfigError
from nemo_rl.recipes import find_recipe

if TYPE_CHECKING:
    from nemo_rl.config.kinds import Section

ResultT = TypeVar("ResultT")
Rewards = Callable[..., Any] | Sequence[Callable[..., Any]] | str
Dataset = str | Path | Iterable[Mapping[str, Any]]

REWARD = "reward"  # the entry of `env`, and the type, that the reward functions become
COMMANDS = {"grpo": "grpo", "distillation": "distill", "sft": "sft", "dpo": "dpo"}  # algorithm -> command
# TRL's names, each with its key; {} is the algorithm's section.
KEYWORDS = {
    "beta": "loss_fn.reference_policy_kl_penalty",
    "learning_rate": "policy.optimizer.kwargs.lr",
    "max_completion_length": "policy.generation.max_new_tokens",
    "max_length": "policy.max_total_sequence_length",
    "max_steps": "{}.max_num_steps",
    "num_generations": "{}.num_generations_per_prompt",
    "num_train_epochs": "{}.max_num_epochs",
    "output_dir": "logger.log_dir",
    "temperature": "policy.generation.temperature",
}
SIZES = {"num_prompts_per_step": 8, "num_generations_per_prompt": 8}  # a step's sizes by default
WAIT_S = 0.2  # between two looks for Ctrl-C


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Outcome of `Trainer.train`."""

    run_dir: Path
    step: int  # training steps that the model has had, those of earlier calls included
    metrics: list[dict[str, float]]  # one dict per step of this call, with its number as "step"
    checkpoint: Path | None  # the newest; None if nothing was saved
    model_path: Path | None  # a Hugging Face directory with the trained weights, in the checkpoint
    interrupted: bool  # Ctrl-C ended it; `Trainer.train` continues


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Scores of one model over a dataset."""

    directory: Path  # its rollouts and profile
    scores: dict[str, float]  # means over all tasks by name, e.g. "pass@1[avg-of-4]"
    num_rollouts: int
    num_failed: int
    interrupted: bool


class Trainer:
    """A training run of a model, by its algorithm, from Python objects.

    Args:
        model: a Hugging Face name or directory, or a checkpoint.
        rewards: a function, several of them, or the name of a built-in environment ("math"). A function takes
            `(completion, **row)`: the text of the answer and the fields of its row; or `(prompts, completions, **row)`
            with lists of one item, as TRL calls it; or `(messages, metadata)`. It returns a number, or numbers by name.
            Several functions add up, each under its own name.
        dataset: rows (a list of dicts, or a `datasets.Dataset`), or a JSONL file. A row has `prompt` (a text, or OpenAI
            messages), `messages`, or `input` and `output`; preferences have `chosen` and `rejected`.
        validation: rows or a file to validate on.
        algorithm: grpo, distillation, sft or dpo.
        recipe: a recipe (a name or a file) below everything else.
        overrides: further keys, `{"policy.precision": "float32"}` or `["policy.precision=float32"]`.
        keywords: keys of the algorithm's section (`max_num_steps=50`), or TRL's names (`learning_rate`, `beta`,
            `num_generations`, `max_completion_length`, `output_dir`, ...).

    Raises ConfigError or DataError at once for whatever can be refused before a model loads.

    Example: `Trainer(model="nemo_rl/quickstart", rewards=short, dataset=rows, max_num_steps=50).train()`
    """

    def __init__(
        self,
        model: str | Path | None = None,
        rewards: Rewards | None = None,
        dataset: Dataset | None = None,
        *,
        validation: Dataset | None = None,
        algorithm: str = "grpo",
        recipe: str | Path | None = None,
        overrides: Mapping[str, Any] | Sequence[str] = (),
        **keywords: Any,
    ) -> None:
        if algorithm not in COMMANDS:
            raise ConfigError("algorithm", algorithm, "no algorithm of this project", known=COMMANDS)
        self._algorithm, self._command = algorithm, COMMANDS[algorithm]
        self._reward = None if rewards is None or isinstance(rewards, str) else _make_reward(rewards)
        keys = _find_keys(algorithm, keywords)
        keys |= dict(overrides) if isinstance(overrides, Mapping) else {}
        self._overrides = () if isinstance(overrides, Mapping) else tuple(overrides)
        log_dir = Path(keys.get("logger.log_dir", "runs"))
        base = _find_base(None if model is None else str(model), recipe, algorithm, has_rows=dataset is not None)
        written: dict[str, Any] = {} if base is None else {"defaults": str(find_recipe(base).absolute())}
        if base is None and algorithm in ("grpo", "distillation"):
            written |= _default_sizes(algorithm, keys)
        if model is not None:
            _set(written, "policy.model_name", str(model))
        if rewards is not None:
            _set_environment(written, rewards if isinstance(rewards, str) else REWARD)
        if dataset is not None:
            _set_datasets(written, log_dir, dataset, validation)
        for key, value in keys.items():
            _set(written, key, value)
        self._recipe = _write_recipe(log_dir, written)
        with self._reward_registered():
            self.config = load_config(self._recipe, self._overrides, command=self._command)
        self._checkpoint_dir: Path | None = None
        self._step = 0  # after the last call

    def train(self, **keywords: Any) -> TrainingResult:
        """Train, or continue after the newest checkpoint of an earlier call; return what it reached.

        `keywords` replace those of the constructor for this call and those after it. Ctrl-C ends the current step,
        saves and returns; a second one ends at once with KeyboardInterrupt. Works inside a running event loop too.
        """
        keys = _find_keys(self._algorithm, keywords)
        self._overrides += tuple(f"++{key}={json.dumps(value)}" for key, value in keys.items())
        resumed = () if self._checkpoint_dir is None else (f"checkpointing.checkpoint_dir={self._checkpoint_dir}",)
        with self._reward_registered():
            self.config = load_config(self._recipe, (*self._overrides, *resumed), command=self._command)
            opened: list[Any] = []
            step, interrupted = _run(partial(_train, self.config, opened), lambda: opened[0].interrupt.request())
        (run,) = opened
        earlier, self._step = self._step, step
        latest = run.checkpoints.latest() if run.checkpoints is not None else None
        if run.checkpoints is not None:
            self._checkpoint_dir = run.checkpoints.directory.absolute()
        run.lost_records.check()
        return TrainingResult(
            run_dir=run.run_dir,
            step=step,
            metrics=[row for row in _read_metrics(run.run_dir) if not earlier or row["step"] > earlier],
            checkpoint=None if latest is None else latest.path,
            model_path=None if latest is None else latest.path / "policy" / "weights",
            interrupted=interrupted,
        )

    @contextlib.contextmanager
    def _reward_registered(self) -> Iterator[None]:
        if self._reward is None:
            yield
            return
        with ENVIRONMENTS.registered_for(REWARD, self._reward):
            yield


def train(
    model: str | Path | None = None, rewards: Rewards | None = None, dataset: Dataset | None = None, **keywords: Any
) -> TrainingResult:
    """Train a model; the arguments are those of `Trainer`.

    Example: `train(model="nemo_rl/quickstart", rewards=short, dataset=rows, max_num_steps=50).metrics[-1]`
    """
    return Trainer(model, rewards, dataset, **keywords).train()


def evaluate(
    model: str | Path,
    rewards: Rewards | None = None,
    dataset: Dataset | None = None,
    *,
    recipe: str | Path | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    **keywords: Any,
) -> EvaluationResult:
    """Sample a model on a dataset, score the answers and return the means; `keywords` are keys of `eval`.

    Arguments as for `Trainer`; without rewards and dataset a recipe of `nemo-rl eval` has them. A second call with the
    same arguments reads what the first one stored.

    Example: `evaluate("runs/exp_001/checkpoints/step_50", short, rows, num_tests_per_prompt=4).scores`
    """
    keys = _find_keys("eval", keywords)
    keys |= dict(overrides) if isinstance(overrides, Mapping) else {}
    log_dir = Path(keys.get("logger.log_dir", "runs"))
    base = _find_base(str(model), recipe, "eval", has_rows=dataset is not None)
    written: dict[str, Any] = {"eval": {}} if base is None else {"defaults": str(find_recipe(base).absolute())}
    _set(written, "policy.model_name", str(model))
    if rewards is not None:
        _set_environment(written, rewards if isinstance(rewards, str) else REWARD)
    if dataset is not None:
        _set(written, "data.input", _dataset_section(log_dir, dataset))
    for key, value in keys.items():
        _set(written, key, value)
    texts = () if isinstance(overrides, Mapping) else tuple(overrides)
    reward = None if rewards is None or isinstance(rewards, str) else _make_reward(rewards)
    with contextlib.nullcontext() if reward is None else ENVIRONMENTS.registered_for(REWARD, reward):
        config = load_config(_write_recipe(log_dir, written), texts, command="eval")
        from nemo_rl.collect.profile import profile  # loads numpy
        from nemo_rl.launch.collection import run_collection

        result = _run(partial(run_collection, config))
    scores = {}
    if not result.interrupted:
        measured = profile(result.directory, seeds=[config.eval.seed], ks=sorted({1, config.eval.k}))
        means = {name: score.mean for name, score in measured.summaries[0].scores.items()}
        scores = {name: mean for name, mean in means.items() if mean is not None}
    return EvaluationResult(result.directory, scores, result.num_finished, result.num_given_up, result.interrupted)


def load_config(recipe: str | Path, overrides: Sequence[str] = (), *, command: str = "grpo") -> Any:
    """Return the checked configuration of a recipe, as `nemo-rl COMMAND --config RECIPE` reads it.

    Raises ConfigError that lists every problem.

    Example: `load_config("dapo", ["policy.model_name=Qwen/Qwen2.5-0.5B"]).grpo.num_prompts_per_step`
    """
    from nemo_rl.launch import recipe_commands

    jobs = {job.verb: job for job in vars(recipe_commands).values() if isinstance(job, recipe_commands.Job)}
    if command not in jobs:
        raise ConfigError("command", command, "reads no recipe", known=jobs)
    return jobs[command].load(find_recipe(recipe), overrides)


def _find_keys(section: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords as dotted keys; raises ConfigError for a name that is neither a key of the section nor TRL's."""
    from nemo_rl.config.reference import find_schema

    own: Any = find_schema(COMMANDS.get(section, section)).model_fields[section].annotation
    keys = {}
    for name, value in keywords.items():
        if name in KEYWORDS:
            keys[KEYWORDS[name].format(section)] = value
        elif name in own.model_fields:
            keys[f"{section}.{name}"] = value
        else:
            known = (*own.model_fields, *KEYWORDS)
            raise ConfigError(name, value, f"no keyword of {section}; any other key goes into overrides", known=known)
    return keys


def _find_base(model: str | None, recipe: str | Path | None, algorithm: str, *, has_rows: bool) -> str | Path | None:
    """Return the recipe below the arguments; None for the schema's defaults.

    The quickstart's small models need the small sizes of their recipes, and a call without data needs a recipe.
    """
    if recipe is not None:
        return recipe
    packaged = {"grpo": "quickstart", "distillation": "distillation", "sft": "sft_quickstart", "dpo": "dpo_quickstart"}
    is_small = model is None or model.startswith("nemo_rl/quickstart")
    return packaged.get(algorithm, algorithm) if is_small or not has_rows else None


def _default_sizes(algorithm: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {name: keys.get(f"{algorithm}.{name}", value) for name, value in SIZES.items()}
    batch = sizes["num_prompts_per_step"] * sizes["num_generations_per_prompt"]
    return {algorithm: sizes, "policy": {"train_global_batch_size": batch, "train_micro_batch_size": 1}}


def _set_environment(written: dict[str, Any], name: str) -> None:
    """Replace the environments of the recipe below by one."""
    written["env"] = {"_override_": True, name: {"type": name}}
    _set(written, "data.default.env_name", name)


def _set_datasets(written: dict[str, Any], log_dir: Path, dataset: Dataset, validation: Dataset | None) -> None:
    """Replace the datasets of the recipe below; without validation rows nothing is validated."""
    _set(written, "data.train", _dataset_section(log_dir, dataset))
    _set(written, "data.validation", None if validation is None else _dataset_section(log_dir, validation))
    if validation is None:
        _set(written, "checkpointing.metric_name", None)


def _dataset_section(log_dir: Path, dataset: Dataset) -> dict[str, Any]:
    """Return the section of a JSONL file; rows are written to one whose name is a digest of them."""
    if not isinstance(dataset, str | Path):
        text = "".join(json.dumps(_normalize_row(dict(row))) + "\n" for row in dataset)
        path = log_dir / "data" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        dataset = path
    return {"_override_": True, "dataset_name": "jsonl", "data_path": str(Path(dataset).absolute())}


def _normalize_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose `prompt`, a text or messages, stands under `messages`."""
    if "messages" in row or "prompt" not in row or "chosen" in row:
        return row
    prompt = row["prompt"]
    return {**row, "messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}


def _write_recipe(log_dir: Path, written: Mapping[str, Any]) -> Path:
    """Write the recipe beside the runs, under a digest of its text, and return its path."""
    text = json.dumps(written, indent=1, default=str)  # JSON is YAML
    path = log_dir / "recipes" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")
    return path


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    *parents, name = key.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config[name] = value


def _make_reward(rewards: Callable[..., Any] | Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Return `(messages, metadata) -> rewards by name` of one or several reward functions."""
    functions = [rewards] if callable(rewards) else list(rewards)
    calls = [
        (getattr(function, "__name__", f"reward{i + 1}"), _adapt(function)) for i, function in enumerate(functions)
    ]
    if any(inspect.iscoroutinefunction(each) for each in functions):

        async def score_async(messages: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> dict[str, float]:
            scores = {name: call(messages, metadata) for name, call in calls}
            return {name: await score if inspect.isawaitable(score) else score for name, score in scores.items()}

        return score_async

    def score(messages: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> Any:
        if len(calls) == 1:
            return calls[0][1](messages, metadata)
        return {name: call(messages, metadata) for name, call in calls}

    return score


def _adapt(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `(messages, metadata) -> reward` of a function of any of the three forms."""
    if not callable(function):
        raise ConfigError("rewards", function, "must be a function, a list of functions, or the name of an environment")
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())

    def fields_of(row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if takes_all or name in parameters}

    if names[:2] == ["messages", "metadata"]:
        return function
    if "completions" in parameters:

        def call_batched(messages: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> Any:
            row = {name: [value] for name, value in metadata.items() if name not in ("prompts", "completions")}
            columns = {**row, "prompts": [metadata.get("prompt", messages[:-1])]}
            (score,) = function(completions=[messages[-1]["content"]], **fields_of(columns))
            return score

        return call_batched
    if not names or names[0] != "completion":
        allowed = "(completion, **row), (prompts, completions, **row) or (messages, metadata)"
        raise ConfigError("rewards", getattr(function, "__name__", function), f"its parameters must be {allowed}")

    def call_one(messages: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> Any:
        return function(messages[-1]["content"], **fields_of({k: v for k, v in metadata.items() if k != "completion"}))

    return call_one


async def _train(config: "Section", opened: list[Any]) -> tuple[int, bool]:
    """Open the run, which `opened` receives, and train; return the step and whether it was interrupted."""
    from nemo_rl.algorithms.interrupt import cancel_on_termination
    from nemo_rl.config.supervised_runs import SupervisedRunConfig

    is_supervised = isinstance(config, SupervisedRunConfig)
    if is_supervised:
        from nemo_rl.algorithms.supervised_loop import train_supervised as train_loop
        from nemo_rl.launch.supervised_training import open_supervised as open_run
    else:
        from nemo_rl.algorithms.loop import train as train_loop
        from nemo_rl.launch.training import open_run
    with cancel_on_termination():
        async with open_run(config) as run:  # pyright: ignore[reportArgumentType]
            opened.append(run)
            with run.interrupt.listen():
                progress = await train_loop(run)  # pyright: ignore[reportArgumentType]
    return progress.position.step, progress.interrupted


def _run(work: Callable[[], Coroutine[Any, Any, ResultT]], stop: Callable[[], None] | None = None) -> ResultT:
    """Return the result of `work`: in this thread, or beside a running event loop in a thread of its own.

    In that thread Ctrl-C calls `stop` on the loop of `work`, or cancels `work` if it cannot stop; the second cancels.
    """
    from nemo_rl.experience.cancellation import run_async

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_async(work())
    return _InThread(work, stop).result()


class _InThread:
    """Work on a thread with an event loop of its own, while this thread listens for Ctrl-C."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Any]], stop: Callable[[], None] | None) -> None:
        self._work, self._stop = work, stop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._ended = threading.Event()  # Ctrl-C during Thread.join marks a thread that runs as ended (Python 3.11)

    def result(self) -> Any:
        """Wait for the end; raises what the work raised, and KeyboardInterrupt once it is cancelled."""
        threading.Thread(target=self._main, name="nemo_rl", daemon=True).start()
        num_interrupts = 0
        while not self._ended.is_set():
            try:
                self._ended.wait(WAIT_S)
            except KeyboardInterrupt:
                num_interrupts += 1
                self._interrupt(is_first=num_interrupts == 1)
        if isinstance(self._error, asyncio.CancelledError) and num_interrupts:
            raise KeyboardInterrupt from self._error
        if self._error is not None:
            raise self._error
        return self._result

    def _interrupt(self, *, is_first: bool) -> None:
        if self._loop is None or self._task is None:
            return
        self._loop.call_soon_threadsafe(self._stop_or_cancel if is_first else self._task.cancel)

    def _stop_or_cancel(self) -> None:
        assert self._task is not None
        try:
            if self._stop is not None:
                self._stop()
                return
        except IndexError:  # the run is not open yet
            pass
        self._task.cancel()

    def _main(self) -> None:
        from nemo_rl.experience.cancellation import run_async

        async def watched() -> Any:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            return await self._work()

        try:
            self._result = run_async(watched())
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            self._error = error
        finally:
            self._ended.set()


def _read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Return the metrics of a run, one dict per step."""
    from nemo_rl.observability.loggers import METRICS_FILE

    by_step: dict[int, dict[str, float]] = {}
    path = run_dir / METRICS_FILE
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        row = json.loads(line)
        by_step.setdefault(row["step"], {}).update(row)
    return [by_step[step] for step in sorted(by_step)]
