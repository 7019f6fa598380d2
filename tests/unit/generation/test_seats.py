import pytest

from nemo_rl.generation.router import LoadBalancer


def test_requests_of_new_sessions_go_to_the_least_busy():
    seats = LoadBalancer([0, 1, 2])
    assert [seats.acquire(f"s{i}") for i in range(6)] == [0, 1, 2, 0, 1, 2]
    seats.release(1)
    assert seats.acquire("new") == 1


def test_a_session_stays_where_it_is_however_busy_that_is():
    seats = LoadBalancer([0, 1])
    assert seats.acquire("a") == 0
    assert [seats.acquire("a") for _ in range(5)] == [0] * 5
    assert [seats.acquire(f"other{i}") for i in range(3)] == [1, 1, 1]


def test_among_equally_busy_replicas_the_one_with_fewer_sessions_is_taken():
    seats = LoadBalancer([0, 1])
    for session, expected in (("a", 0), ("b", 1), ("c", 0)):
        assert seats.acquire(session) == expected
        seats.release(expected)


def test_a_forgotten_session_is_placed_anew():
    seats = LoadBalancer([0, 1])
    seats.acquire("a")
    seats.acquire("a")
    seats.forget("a")
    assert seats.acquire("a") == 1


def test_memory_is_bounded_and_the_most_silent_session_goes_first():
    seats = LoadBalancer([0, 1], max_sessions=2)
    assert [seats.acquire("a"), seats.acquire("b")] == [0, 1]
    seats.acquire("a")  # now b is the most silent
    seats.acquire("c")  # 1, and b is forgotten
    assert seats.acquire("a") == 0
    assert [seats.acquire("b"), seats.acquire("b")] == [1, 1]


def test_sessions_of_a_removed_replica_are_placed_on_the_others():
    seats = LoadBalancer([0, 1])
    seats.acquire("a")
    seats.remove(0)
    seats.release(0)  # a request that ends late
    assert seats.acquire("a") == 1
    seats.add(0)
    assert seats.acquire("b") == 0
    assert seats.acquire("a") == 1
    seats.remove(0)
    seats.remove(1)
    with pytest.raises(LookupError):
        seats.acquire("a")
