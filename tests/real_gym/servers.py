"""Real servers of NeMo Gym in one process, without Ray and without an environment for each; run by Gym's Python.

    python gym_servers.py '{"policy_base_url": ..., "head_port": ..., "configs": [...]}'

Each server is the class of its own app.py, on a port of its own; the head tells where they are. Prints "up" when all
listen.
"""

# pyright: reportMissingImports=false
# Its imports are those of another Python.

import asyncio
import importlib.util
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import nemo_gym
import uvicorn
from omegaconf import OmegaConf

ROOT = Path(str(nemo_gym.__file__)).parents[1]
MODEL = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
KINDS = ("resources_servers", "responses_api_agents", "responses_api_models")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def merged(asked: dict[str, Any]) -> Any:
    """The configuration as Gym's command line would make it, an address for each server included."""
    parts = [OmegaConf.load(ROOT / path) for path in (*asked["configs"], MODEL)]
    own = {
        "policy_base_url": asked["policy_base_url"],
        "policy_api_key": asked["policy_api_key"],
        "policy_model_name": "policy",
        "head_server": {"host": "127.0.0.1", "port": asked["head_port"]},
        "dry_run": False,
        "skip_venv_if_present": True,
    }
    config: Any = OmegaConf.merge(*parts, own)
    for name, kind, app in servers(config):
        config[name][kind][app].host = "127.0.0.1"
        config[name][kind][app].port = free_port()
        config[name][kind][app].pop("datasets", None)
    return config


def servers(config: Any) -> list[tuple[str, str, str]]:
    """(name, kind, folder of the app) of each server."""
    found = []
    for name, entry in config.items():
        kind = next((kind for kind in KINDS if OmegaConf.is_dict(entry) and kind in entry), None)
        if kind is not None:
            found.append((str(name), kind, str(next(iter(entry[kind])))))
    return found


def server_of(name: str, kind: str, app: str, config: Any, bases: tuple[type, ...], client: Any) -> Any:
    path = ROOT / kind / app / config[name][kind][app].get("entrypoint", "app.py")
    spec = importlib.util.spec_from_file_location(f"{kind}.{app}.served", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, bases)]
    (served,) = [c for c in classes if c.__module__ == spec.name]
    settings: Any = OmegaConf.to_container(config[name][kind][app], resolve=True)
    section = served.model_fields["config"].annotation(**settings, name=name)
    return served(config=section, server_client=client)


async def main(asked: dict[str, Any]) -> None:
    os.environ["NEMO_GYM_CONFIG_DICT"] = OmegaConf.to_yaml(merged(asked), resolve=True)
    from nemo_gym.base_resources_server import SimpleResourcesServer
    from nemo_gym.base_responses_api_agent import SimpleResponsesAPIAgent
    from nemo_gym.base_responses_api_model import SimpleResponsesAPIModel
    from nemo_gym.global_config import get_global_config_dict
    from nemo_gym.server_utils import HeadServer, ServerClient

    config = get_global_config_dict()
    client = ServerClient(head_server_config=ServerClient.load_head_server_config(), global_config_dict=config)
    bases = (SimpleResourcesServer, SimpleResponsesAPIAgent, SimpleResponsesAPIModel)
    apps = [(HeadServer(config=client.head_server_config).setup_webserver(), asked["head_port"])]
    for name, kind, app in servers(config):
        server = server_of(name, kind, app, config, bases, client)
        served = server.setup_webserver()
        server.setup_liveness(served)
        apps.append((served, server.config.port))
    listening = [
        uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", access_log=False))
        for app, port in apps
    ]
    tasks = [asyncio.create_task(server.serve()) for server in listening]
    while not all(server.started for server in listening):  # noqa: ASYNC110 - uvicorn tells nobody
        await asyncio.sleep(0.01)
    sys.stdout.write("up\n")
    sys.stdout.flush()
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
