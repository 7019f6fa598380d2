"""Engines in the driver's process: the entry of `hf`, and those of users' own engines. Loads no torch."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from nemo_rl.config.kinds import Entry
from nemo_rl.config.policy import GenerationConfig, SamplingConfig
from nemo_rl.distributed.devices import ALL_DEVICES, Device
from nemo_rl.errors import ConfigError
from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.vllm.entry import VllmGenerationConfig, check_vllm
from nemo_rl.interfaces import Generation

if TYPE_CHECKING:
    from nemo_rl.config.layout import Layout
    from nemo_rl.config.master import TrainingRunConfig
    from nemo_rl.config.server import ServerConfig


class DriverEngineConfig(VllmGenerationConfig):
    """`policy.generation` with one engine in the driver's process.

    It accepts vLLM's keys, so that a recipe needs no other edit; of `vllm_cfg` `precision` and `max_model_len` hold.
    """

    CAN_GUIDE: ClassVar[bool] = False

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the devices that the engine runs on: torch's."""
        return ALL_DEVICES

    @property
    def runs_in_driver(self) -> bool:
        """Return whether the engine runs in the driver's process even if the policy has a cluster."""
        return True

    @property
    def holds_adapters(self) -> bool:
        """Return false: the engine has one set of whole weights."""
        return False

    @property
    def can_sleep(self) -> bool:
        """Return whether the engine may leave its device's memory to the trainer."""
        return False

    @classmethod
    def from_server(cls, server: "ServerConfig", sampling: SamplingConfig) -> GenerationConfig:
        """Return the section of an engine that `nemo-rl collect` starts for itself; raises ConfigError."""
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if (value := getattr(server, name)) > 1:
                raise ConfigError(f"server.{name}", value, f"the {server.backend} backend is one process; allowed: 1")
        if server.vllm_kwargs:
            raise ConfigError("server.vllm_kwargs", server.vllm_kwargs, "needs backend: vllm")
        return super().from_server(server.model_copy(update={"trust_remote_code": False}), sampling)

    def check_layout(self, layout: "Layout", *, collects_in_background: bool) -> None:
        """Raise ConfigError for engines that the driver's process cannot hold beside the policy's workers."""
        if not layout.needs_cluster:
            return
        if len(layout.engines) > 1:
            raise ConfigError(
                "policy.generation.num_replicas",
                len(layout.engines),
                f"the {self.backend} backend is one engine; allowed: 1, or backend: vllm",
            )
        if layout.device == "cuda" or layout.num_nodes > 1:
            raise ConfigError(
                "policy.generation.backend",
                self.backend,
                "runs in the driver's process: beside several ranks on one machine's CPU alone; allowed: vllm",
            )


class CustomEngineConfig(DriverEngineConfig):
    """`policy.generation` with a user's engine, by dotted path."""

    kwargs: dict[str, Any] = Field(default_factory=dict)  # keyword arguments of the class or function

    @property
    def shares_process(self) -> bool:
        """Return false: the engine may keep the weights that it is given, or hand them to a process of its own."""
        return False


def check_driver_engine(key: str, section: DriverEngineConfig, config: "TrainingRunConfig") -> None:
    """Raise ConfigError for keys that only vLLM can honour."""
    check_vllm(key, section, config)
    if section.in_actor:
        problem = f"the {section.backend} backend runs beside the trainer; allowed: false, or backend: vllm"
        raise ConfigError(f"{key}.in_actor", True, problem)
    if section.vllm_kwargs:
        raise ConfigError(f"{key}.vllm_kwargs", section.vllm_kwargs, "needs backend: vllm")


def check_hf(key: str, section: DriverEngineConfig, config: "TrainingRunConfig") -> None:
    """Raise ConfigError for what needs an engine whose requests end one by one."""
    check_driver_engine(key, section, config)
    if (factor := config.rollout.oversample) > 1:
        problem = "the hf engine samples all rollouts together, none ends early; allowed: 1, or backend: vllm"
        raise ConfigError("rollout.oversample", factor, problem)


async def make_hf(section: DriverEngineConfig, model: EngineModel, **placement: Any) -> Generation:
    """Load the transformers model into this process."""
    from nemo_rl.generation.hf import HFGeneration  # loads torch

    own = _own_arguments(model)
    del own["vision_type"]  # read from the model's own files
    return HFGeneration(**own)


HF = Entry(DriverEngineConfig, make=make_hf, check=check_hf)


def adapt_engine(key: str, path: str, target: Any) -> Entry[Any]:
    """Return the entry of a user's class, or of a function, also an `async` one, that returns an engine.

    It is called with the section's `kwargs` and those of `model_path`, `dtype`, `max_model_len`, `device` and
    `trust_remote_code` that it declares. Raises ConfigError for what cannot be called.
    """
    if not callable(target):
        raise ConfigError(key, path, "must be a class of an engine, a function that returns one, or an Entry")

    async def make(section: CustomEngineConfig, model: EngineModel, **placement: Any) -> Generation:
        return await _call_with_declared(target, section.kwargs, _own_arguments(model))

    return Entry(CustomEngineConfig, make=make, check=check_driver_engine)


def _own_arguments(model: EngineModel) -> dict[str, Any]:
    """Return the fields of `model` that engines of this module may take.

    None has a process of its own, holds adapters or counts requests.
    """
    others = ("adapters", "divides_cores", "trace", "profile_dir")
    return {name: value for name, value in asdict(model).items() if name not in others}


async def _call_with_declared(target: Callable[..., Any], kwargs: dict[str, Any], model: dict[str, Any]) -> Generation:
    parameters = inspect.signature(target).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    declared = {name: value for name, value in model.items() if takes_all or name in parameters}
    try:
        inspect.signature(target).bind(**{**declared, **kwargs})
    except TypeError as error:
        raise ConfigError("policy.generation.kwargs", kwargs, f"{target.__name__}: {error}") from error
    made: Generation | Awaitable[Generation] = target(**{**declared, **kwargs})
    return await made if inspect.isawaitable(made) else made
