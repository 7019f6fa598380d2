"""Two Ray nodes on one machine, with simulated GPUs: what was configured stands where it was configured."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray._private.authentication_test_utils import reset_auth_token_state
from ray.cluster_utils import Cluster
from transformers import AutoModelForCausalLM

from nemo_rl.config.layout import Layout
from nemo_rl.config.layout_planner import make_layout
from nemo_rl.distributed.actors import spawn_actor
from nemo_rl.distributed.cluster import (
    GLOO_INTERFACE,
    TOKEN,
    TOKEN_FILE,
    TOKEN_MODE,
    connect,
    node_ip,
    reserve,
    shutdown,
)
from nemo_rl.distributed.machine import interface_of, outward_address, write_private
from nemo_rl.errors import WorkerError
from nemo_rl.policy.driver import PolicyWorkerGroup
from tests.contracts.standing import Standing
from tests.contracts.test_policy_group import LENGTHS, settings
from tests.unit.config.test_layout import config
from tests.unit.policy.tiny import make_batch, plain_logprobs, saved_model

DEADLINE_S = 300.0
GPUS_OF_A_NODE = 2


@pytest.fixture(scope="module", autouse=True)
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster that requires the token of this process's environment, as that of a user who joins one does."""
    shutdown()
    token_file = tmp_path_factory.mktemp("token") / "token"
    write_private(token_file, "12" * 32)
    variables = pytest.MonkeyPatch()
    variables.setenv(TOKEN_MODE, "token")
    variables.setenv(TOKEN_FILE, str(token_file))
    variables.delenv(TOKEN, raising=False)
    variables.delenv(GLOO_INTERFACE, raising=False)  # set where a test has started a local cluster
    reset_auth_token_state()  # Ray has read the variables when it was imported
    cluster = Cluster()
    for _ in range(2):
        resources: dict[str, Any] = {"sim_gpu": GPUS_OF_A_NODE}
        where: dict[str, Any] = {"node_ip_address": outward_address()}
        cluster.add_node(num_cpus=2, resources=resources, object_store_memory=100 * 2**20, **where)
    cluster.wait_for_nodes(timeout=DEADLINE_S)
    connect(cluster.address)
    yield str(cluster.address)
    shutdown()
    cluster.shutdown()
    variables.undo()
    reset_auth_token_state()


def layout(device: Any, **values: Any) -> Layout:
    return make_layout(config({"cluster.num_nodes": 2, **values}), device)


def nodes_of(placed: Layout) -> tuple[list[str], list[str]]:
    """Ray's nodes of the policy's ranks and of the engines."""

    async def main() -> tuple[list[str], list[str]]:
        reservation = await reserve(placed, timeout_s=DEADLINE_S, gpu_resource="sim_gpu")
        try:
            actors = [
                spawn_actor(Standing, slot=reservation.slot(device_slot))
                for device_slot in (*placed.ranks, *placed.engines)
            ]
            nodes = [await actor.call("node_id", timeout_s=DEADLINE_S) for actor in actors]
        finally:
            reservation.release()
        return nodes[: len(placed.ranks)], nodes[len(placed.ranks) :]

    return asyncio.run(main())


def test_stranger_is_refused_and_told_what_to_set(two_nodes: str) -> None:
    script = "import sys; from nemo_rl.distributed.cluster import connect; connect(sys.argv[1])"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", script, two_nodes]
    stranger = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert stranger.returncode == 1
    assert f"WorkerError: the Ray cluster at '{two_nodes}'" in stranger.stderr
    assert "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH" in stranger.stderr


def test_split_by_nodes_they_stand_on_machines_of_their_own() -> None:
    split = {"policy.generation.colocated": {"enabled": False, "resources": {"num_nodes": 1}}}
    ranks, engines = nodes_of(layout("cuda", **{"cluster.gpus_per_node": GPUS_OF_A_NODE}, **split))
    assert (len(ranks), len(engines)) == (2, 2)
    assert len(set(ranks)) == len(set(engines)) == 1
    assert set(ranks) != set(engines)


def test_colocated_each_machine_has_both() -> None:
    ranks, engines = nodes_of(layout("cuda"))
    assert len(set(ranks)) == 2
    assert engines == ranks


@pytest.mark.parametrize(("may_grow", "timeout_s"), [(False, DEADLINE_S), (True, 1.0)])
def test_more_than_there_is_names_what_was_asked_for_and_what_there_is(may_grow: bool, timeout_s: float) -> None:
    asked = layout("cuda", **{"cluster.gpus_per_node": GPUS_OF_A_NODE + 1, "policy.dtensor_cfg.data_parallel_size": 1})
    expected = r"2 nodes with 3 sim_gpu each .* it has 2 nodes: .*\(2 sim_gpu\).* \d sim_gpu free"
    with pytest.raises(WorkerError, match=expected):
        asyncio.run(reserve(asked, timeout_s=timeout_s, may_grow=may_grow, gpu_resource="sim_gpu"))


def test_gloo_in_an_actor_listens_at_the_address_of_its_node_whatever_the_host_is_called() -> None:
    assert os.environ.get(GLOO_INTERFACE) is None, "else actors would inherit it"

    async def main() -> tuple[str, str]:
        plain, told = spawn_actor(Standing), spawn_actor(Standing, env_vars={GLOO_INTERFACE: "ib0"})
        return await plain.call("variable", GLOO_INTERFACE), await told.call("variable", GLOO_INTERFACE)

    assert asyncio.run(main()) == (interface_of(node_ip()), "ib0")


def test_a_policy_over_two_machines_is_the_plain_model(tmp_path: Path) -> None:
    model_path = saved_model("qwen2", tmp_path)
    section, arguments = settings(model_path)
    batch = make_batch(LENGTHS)
    placed = layout("cpu", **{"policy.dtensor_cfg.data_parallel_size": 2})

    async def main() -> torch.Tensor:
        reservation = await reserve(placed, timeout_s=DEADLINE_S)
        slots = [reservation.slot(device_slot) for device_slot in placed.ranks]
        assert slots[0].node_id != slots[1].node_id
        group = await PolicyWorkerGroup.create(section, slots=slots, timeout_s=DEADLINE_S, **arguments)
        try:
            return await group.logprobs(batch)
        finally:
            await group.close()
            reservation.release()

    with torch.no_grad():
        expected = plain_logprobs(
            AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval(), batch, temperature=0.7
        )
    torch.testing.assert_close(asyncio.run(main()), expected, rtol=0, atol=1e-5)
