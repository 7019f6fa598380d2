"""The servers of a stack, as its configuration lists them."""

from typing import Any

from nemo_rl.environments.nemo_gym.protocols import AGENT_PROTOCOL, EPISODE_PROTOCOL, RELAY_PROTOCOL
from nemo_rl.environments.nemo_gym.servers import GymServers, parse_servers


def server(kind: str, port: int | None, *, host: str = "127.0.0.1", **settings: Any) -> dict[str, Any]:
    return {kind: {"implementation": {"host": host, "port": port, **settings}}}


def urls_of(servers: GymServers) -> dict[str, str]:
    return {name: server.url for name, server in servers.runners.items()}


def ref(kind: str, name: str) -> dict[str, str]:
    return {"type": kind, "name": name}


CONFIG = {
    "head_server": {"host": "127.0.0.1", "port": 11000},
    "config_paths": ["a.yaml"],
    "math_agent": server(
        "responses_api_agents",
        1,
        model_server=ref("responses_api_models", "policy_model"),
        resources_server=ref("resources_servers", "math"),
    ),
    "chess_agent": server("responses_api_agents", 2, resources_server=ref("resources_servers", "chess")),
    "math": server("resources_servers", 3, judges=[{"model": ref("responses_api_models", "judge")}]),
    "chess": server("resources_servers", 4),
    "judge": server("responses_api_models", 5),
    "policy_model": server("responses_api_models", 6),
}


def test_agents_are_found_among_all_entries() -> None:
    servers = parse_servers(CONFIG, head_host="127.0.0.1")
    assert urls_of(servers) == {"math_agent": "http://127.0.0.1:1", "chess_agent": "http://127.0.0.1:2"}
    assert sorted(servers.by_name) == ["chess", "chess_agent", "judge", "math", "math_agent", "policy_model"]


def test_an_agent_needs_what_its_servers_need() -> None:
    servers = parse_servers(CONFIG, head_host="127.0.0.1")
    assert [s.name for s in servers.required_by(["math_agent"])] == ["judge", "math", "math_agent", "policy_model"]
    assert [s.name for s in servers.required_by(["chess_agent", "nobody"])] == ["chess", "chess_agent"]


def test_servers_that_listen_everywhere_are_reached_where_the_head_is() -> None:
    config = {"a": server("responses_api_agents", 1, host="0.0.0.0"), "b": server("responses_api_agents", 2, host="::")}
    servers = parse_servers(config, head_host="10.0.0.7")
    assert urls_of(servers) == {"a": "http://10.0.0.7:1", "b": "http://10.0.0.7:2"}


def test_entries_that_are_no_server_or_have_no_address_are_left_out() -> None:
    config = {
        "no_port": server("responses_api_agents", None),
        "no_mapping": {"responses_api_agents": "text"},
        "empty": {"responses_api_agents": {}},
        "list": [1],
        3: server("responses_api_agents", 3),
    }
    assert urls_of(parse_servers(config, head_host="h")) == {"3": "http://127.0.0.1:3"}


def front(implementation: str, port: int, **settings: Any) -> dict[str, Any]:
    return {"environment_servers": {implementation: {"host": "127.0.0.1", "port": port, **settings}}}


def test_rows_go_to_the_environment_server_that_fronts_their_agent() -> None:
    fronts = {
        "math_front": front("legacy_agent", 7, agent_server={"name": "math_agent"}),  # the type may be left out
        "chess_front": front(
            "single_agent_turn",
            8,
            agent_server=ref("responses_api_agents", "chess_agent"),
            resources_server=ref("resources_servers", "chess"),
        ),
    }
    servers = parse_servers({**CONFIG, **fronts}, head_host="127.0.0.1")
    assert urls_of(servers) == {
        "math_agent": "http://127.0.0.1:7",
        "math_front": "http://127.0.0.1:7",
        "chess_agent": "http://127.0.0.1:8",
        "chess_front": "http://127.0.0.1:8",
    }
    assert servers.runners["math_agent"].protocol is RELAY_PROTOCOL
    assert servers.runners["chess_agent"].protocol is EPISODE_PROTOCOL
    assert [s.name for s in servers.required_by(["chess_agent"])] == ["chess", "chess_agent", "chess_front"]
    assert parse_servers(CONFIG, head_host="h").runners["math_agent"].protocol is AGENT_PROTOCOL


def test_rows_of_a_taskset_go_to_the_environment_server_of_its_route() -> None:
    fronts = {"chess_front": front("single_agent_turn", 8, agent_server=ref("responses_api_agents", "chess_agent"))}
    routes = {"environment_server_routes": {"endgames": "chess_front", "openings": "elsewhere"}}
    runners = parse_servers({**CONFIG, **fronts, **routes}, head_host="127.0.0.1").runners
    assert runners["endgames"].name == "chess_front"
    assert "openings" not in runners


def test_an_agent_of_several_environment_servers_has_no_route_of_its_own() -> None:
    fronts = {f"front_{i}": front("two_agents", i, user=ref("responses_api_agents", "math_agent")) for i in (7, 8)}
    servers = parse_servers({**CONFIG, **fronts}, head_host="127.0.0.1")
    assert sorted(servers.runners) == ["chess_agent", "front_7", "front_8"]
