"""The servers of a stack, as its configuration lists them."""

from typing import Any

from nemo_rl.environments.nemo_gym.servers import parse_servers


def server(kind: str, port: int | None, *, host: str = "127.0.0.1", **settings: Any) -> dict[str, Any]:
    return {kind: {"implementation": {"host": host, "port": port, **settings}}}


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
    assert servers.agents == {"math_agent": "http://127.0.0.1:1", "chess_agent": "http://127.0.0.1:2"}
    assert sorted(servers.by_name) == ["chess", "chess_agent", "judge", "math", "math_agent", "policy_model"]


def test_an_agent_needs_what_its_servers_need() -> None:
    servers = parse_servers(CONFIG, head_host="127.0.0.1")
    assert [s.name for s in servers.required_by(["math_agent"])] == ["judge", "math", "math_agent", "policy_model"]
    assert [s.name for s in servers.required_by(["chess_agent", "nobody"])] == ["chess", "chess_agent"]


def test_servers_that_listen_everywhere_are_reached_where_the_head_is() -> None:
    config = {"a": server("responses_api_agents", 1, host="0.0.0.0"), "b": server("responses_api_agents", 2, host="::")}
    servers = parse_servers(config, head_host="10.0.0.7")
    assert servers.agents == {"a": "http://10.0.0.7:1", "b": "http://10.0.0.7:2"}


def test_entries_that_are_no_server_or_have_no_address_are_left_out() -> None:
    config = {
        "no_port": server("responses_api_agents", None),
        "no_mapping": {"responses_api_agents": "text"},
        "empty": {"responses_api_agents": {}},
        "list": [1],
        3: server("responses_api_agents", 3),
    }
    assert parse_servers(config, head_host="h").agents == {"3": "http://127.0.0.1:3"}
