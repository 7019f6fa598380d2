"""Real servers of NeMo Gym in one process, run by Gym's own Python: `gym_servers.py SETTINGS`, a JSON object.

`gym env start` needs Ray and a process a server, most of a minute in all. Here the same classes are taken from Gym's
wheel and served side by side, with Gym's own configuration, in a few seconds. Ends with its standard input.
"""

# Checked where Gym is not installed.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false

import asyncio
import importlib.util
import json
import os
import random
import sys
import traceback
from pathlib import Path

import nemo_gym
import uvicorn
from fastapi import FastAPI
from omegaconf import OmegaConf

ROOT = Path(nemo_gym.__file__).parent.parent
KINDS = ("resources_servers", "responses_api_agents", "responses_api_models", "environment_servers")
SEED = 7  # deals 7 and 4, then 2, 3 and a ten to whoever hits


class SeededRandom(random.Random):
    """`random.Random()` that deals the same cards every time: a test can hold a game to its length."""

    def __init__(self, seed: int | float | str | bytes | bytearray = SEED):
        super().__init__(seed)


def main() -> None:
    random.Random = SeededRandom
    settings = json.loads(sys.argv[1])
    config = OmegaConf.merge(*(OmegaConf.load(ROOT / path) for path in settings.pop("config_paths")))
    config = OmegaConf.merge(config, {"dry_run": False, "skip_venv_if_present": True}, settings)
    sys.path.extend(settings.get("python_path", ()))
    ports = iter(settings["ports"])
    places = {}
    for name, entry in config.items():
        kind = next((kind for kind in KINDS if OmegaConf.is_dict(entry) and kind in entry), None)
        if kind is not None:
            implementation = next(iter(entry[kind]))
            entry[kind][implementation].update(host="127.0.0.1", port=next(ports))
            places[str(name)] = (kind, implementation)
    text = OmegaConf.to_yaml(config, resolve=True)
    os.environ["NEMO_GYM_CONFIG_DICT"] = text
    asyncio.run(serve(places, text))


async def serve(places: dict[str, tuple[str, str]], text: str) -> None:
    from nemo_gym.global_config import get_global_config_dict

    config = get_global_config_dict()
    head = FastAPI()
    head.get("/global_config_dict_yaml")(lambda: text)
    apps = [(head, config.head_server.port)]
    for name, (kind, implementation) in places.items():
        try:
            app = app_of(name, kind, implementation, config)
        except Exception:
            if not config.get("skip_broken"):
                raise
            traceback.print_exc()
            continue
        apps.append((app, config[name][kind][implementation].port))
    servers = [uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="warning")) for app, port in apps]
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    running = [asyncio.create_task(server.serve()) for server in servers]
    await asyncio.wait([ended, *running], return_when=asyncio.FIRST_COMPLETED)
    os._exit(0)


def app_of(name: str, kind: str, implementation: str, config) -> FastAPI:
    """One server's application, as its own `run_webserver` makes it."""
    from nemo_gym.server_utils import ServerClient, SimpleServer

    settings = config[name][kind][implementation]
    module_name = f"{kind}.{implementation}.{Path(settings.entrypoint).stem}"
    file = ROOT / kind / implementation / settings.entrypoint  # an absolute entrypoint is one of this directory
    module = sys.modules.get(module_name) or load(module_name, file)
    own = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, SimpleServer)]
    server_class = [c for c in own if c.__module__ == module_name][-1]
    values = OmegaConf.to_container(settings, resolve=True)
    section = server_class.model_fields["config"].annotation(**values, name=name)
    client = ServerClient(head_server_config=ServerClient.load_head_server_config(), global_config_dict=config)
    server = server_class(config=section, server_client=client)
    app = server.setup_webserver()
    server.setup_liveness(app)
    server.setup_exception_middleware(app)
    if hasattr(server, "setup_cancellation_middleware"):  # since 0.7
        server.setup_cancellation_middleware(app)
    return app


def load(name: str, file: Path):
    sys.path.append(str(file.parent))  # as of a script: servers import files beside theirs
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
