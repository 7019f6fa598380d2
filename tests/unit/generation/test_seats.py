import pytest

from nemo_rl.generation.router import Seats


def test_requests_of_new_sessions_go_to_the_least_busy():
    seats = Seats([0, 1, 2])
    assert [seats.take(f"s{i}") for i in range(6)] == [0, 1, 2, 0, 1, 2]
    seats.leave(1)
    assert seats.take("new") == 1


def test_a_session_stays_where_it_is_however_busy_that_is():
    seats = Seats([0, 1])
    assert seats.take("a") == 0
    assert [seats.take("a") for _ in range(5)] == [0] * 5
    assert [seats.take(f"other{i}") for i in range(3)] == [1, 1, 1]


def test_among_equally_busy_replicas_the_one_with_fewer_sessions_is_taken():
    seats = Seats([0, 1])
    for session, expected in (("a", 0), ("b", 1), ("c", 0)):
        assert seats.take(session) == expected
        seats.leave(expected)


def test_a_forgotten_session_is_placed_anew():
    seats = Seats([0, 1])
    seats.take("a")
    seats.take("a")
    seats.forget("a")
    assert seats.take("a") == 1


def test_memory_is_bounded_and_the_most_silent_session_goes_first():
    seats = Seats([0, 1], max_sessions=2)
    assert [seats.take("a"), seats.take("b")] == [0, 1]
    seats.take("a")  # now b is the most silent
    seats.take("c")  # 1, and b is forgotten
    assert seats.take("a") == 0
    assert [seats.take("b"), seats.take("b")] == [1, 1]


def test_sessions_of_a_removed_replica_are_placed_on_the_others():
    seats = Seats([0, 1])
    seats.take("a")
    seats.remove(0)
    seats.leave(0)  # a request that ends late
    assert seats.take("a") == 1
    seats.add(0)
    assert seats.take("b") == 0
    assert seats.take("a") == 1
    seats.remove(0)
    seats.remove(1)
    with pytest.raises(LookupError):
        seats.take("a")
