"""The two ranks of the benchmarks: what goes wrong on one reaches the caller, in bounded time."""

import time

import pytest

from bench.rank_functions import MarkProcess, die_on, fail_on, remember, sizes, sleep, sums, variable
from farandole.bench._ranks import RankPair, Ranks


def test_both_ranks_have_every_peers_group_and_keep_their_state():
    with RankPair() as pair:
        assert pair.call(sums) == [{"farandole": 3.0, "gloo": 3.0}] * 2
        assert pair.call(remember, value=1) == [1, 1]
        assert pair.call(remember, value=2) == [1, 1]


def test_ranks_are_as_many_and_have_such_groups_as_they_were_asked_for():
    with Ranks(3, ("gloo",)) as ranks, Ranks(1, ()) as nobody:
        assert ranks.call(sizes) == [(rank, 3, ["gloo"]) for rank in range(3)]
        assert nobody.call(sizes) == [(0, 1, [])]


def test_ranks_have_their_environment_and_enter_first():
    with Ranks(2, (), {"COLOUR": "blue"}, MarkProcess()) as ranks:
        assert ranks.call(variable, name="COLOUR") == ["blue"] * 2
        assert ranks.call(variable, name="MARK") == ["seen by 0", "seen by 1"]


@pytest.mark.parametrize(
    ("fn", "arguments", "message"),
    [
        (fail_on, {"failing": 1}, "rank 1 failed:(.|\n)*the lamp is out"),
        (die_on, {"failing": 0}, "rank 0 died"),
        (sleep, {"timeout": 1.0}, r"no answer from ranks \[0, 1\] in 1 s"),
    ],
)
def test_a_failure_is_raised_to_the_caller_soon(fn, arguments, message):
    with pytest.raises(RuntimeError, match=message), RankPair() as pair:
        start = time.monotonic()
        pair.call(fn, **arguments)
    assert time.monotonic() - start < 30
