import logging
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from nemo_rl.distributed import cluster
from nemo_rl.distributed.cluster import (
    OBJECT_STORE_BYTES,
    TOKEN,
    TOKEN_FILE,
    cluster_address,
    connect,
    ensure_token,
    warn_of_small_stores,
)
from nemo_rl.errors import WorkerError
from nemo_rl.ray_environment import VARIABLES, set_ray_variables


@pytest.mark.timeout(120)
def test_an_address_where_no_cluster_answers_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # whatever cluster other tests have started
    with socket.socket() as listens_to_nobody:
        listens_to_nobody.bind(("127.0.0.1", 0))
        port = listens_to_nobody.getsockname()[1]
        with pytest.raises(WorkerError, match=rf"no Ray cluster answers at '127\.0\.0\.1:{port}' \(cluster\.address"):
            connect(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("needed", "size"), [(0, OBJECT_STORE_BYTES), (3 * OBJECT_STORE_BYTES, 3 * OBJECT_STORE_BYTES)]
)
def test_local_cluster_has_the_object_store_that_a_step_needs(
    needed: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: started.append(options))
    monkeypatch.setattr(cluster, "node_ip", lambda: "127.0.0.1")
    connect(object_store_bytes=needed)
    assert [options["object_store_memory"] for options in started] == [size]


@pytest.mark.parametrize(("given", "found"), [(None, "0"), ("1", "1")])
def test_variables_of_ray_are_set_unless_the_user_has_set_them(
    given: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(name, given)
    set_ray_variables()
    assert [os.environ[name] for name in VARIABLES] == [found] * len(VARIABLES)


LOADS_A_RECIPE = """
import os, sys
from pathlib import Path
from nemo_rl.config.loading import load_config
load_config(Path(sys.argv[1]))
assert "ray" not in sys.modules
from nemo_rl.distributed import cluster
from ray._private.ray_constants import ENABLE_RAY_CLUSTER, RAY_ENABLE_UV_RUN_RUNTIME_ENV
print(ENABLE_RAY_CLUSTER, RAY_ENABLE_UV_RUN_RUNTIME_ENV)
"""


def test_ray_reads_the_variables_when_it_is_imported() -> None:
    variables = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    recipe = Path(__file__).parents[3] / "examples" / "configs" / "quickstart.yaml"
    command = [sys.executable, "-c", LOADS_A_RECIPE, str(recipe)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_node_with_a_smaller_store_is_named(caplog: pytest.LogCaptureFixture) -> None:
    records = [
        {"NodeManagerAddress": "10.0.0.1", "Resources": {"object_store_memory": 2.0**30}},
        {"NodeManagerAddress": "10.0.0.2", "Resources": {"object_store_memory": 2.0**29}},
    ]
    with caplog.at_level(logging.WARNING):
        warn_of_small_stores(records, needed=2**30)
    assert [record.getMessage() for record in caplog.records] == [
        "the object store of node 10.0.0.2 holds 512 MiB, and batches and scores of a step take 1024 MiB, which Ray "
        "would write to its disk: start Ray there with --object-store-memory=1073741824"
    ]


def test_a_process_makes_one_token_that_only_its_user_may_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "")
    monkeypatch.setenv(TOKEN_FILE, "")
    ensure_token()
    path = Path(os.environ[TOKEN_FILE])
    ensure_token()
    assert os.environ[TOKEN_FILE] == str(path)
    assert len(path.read_text()) == 64
    assert [stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent)] == [0o600, 0o700]


@pytest.mark.parametrize(("token", "token_file"), [("secret", ""), ("", "/home/user/token")])
def test_token_of_the_user_is_kept(token: str, token_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, token)
    monkeypatch.setenv(TOKEN_FILE, token_file)
    ensure_token()
    assert (os.environ[TOKEN], os.environ[TOKEN_FILE]) == (token, token_file)


@pytest.mark.parametrize("given", [None, "", "local"])
def test_a_local_cluster_is_no_address_to_join(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", given or "")
    assert cluster_address() is None
    assert cluster_address("10.0.0.1:6379") == "10.0.0.1:6379"
