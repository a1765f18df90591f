import pytest

from farandole.bench._output import value_text
from farandole.bench._series import Sample, Series, Target, excess, excess_ratio, interleave, ratio, size_name


def series_of(*rounds: list[float]) -> Series:
    return Series("8 B", "peer", rounds=[[Sample(value, value) for value in values] for values in rounds])


def test_peers_take_turns_round_after_round():
    order = []

    def measure(name: str) -> list[list[Sample]]:
        order.append(name)
        return [[Sample(len(order), 0.0)]]

    a, b = Series("8 B", "a"), Series("8 B", "b")
    ticks = []
    interleave(3, [([a], lambda: measure("a")), ([b], lambda: measure("b"))], lambda: ticks.append(0))
    assert order == ["a", "b"] * 3
    assert len(ticks) == 6
    assert [samples[0].median for samples in b.rounds] == [2, 4, 6]


def test_the_median_is_over_rounds_of_the_median_within_one():
    assert series_of([1, 2, 9], [4, 4, 4], [3, 100, 3]).median() == 3


def test_a_ratio_compares_within_rounds_so_that_a_slow_machine_does_not_change_it():
    under = series_of([1.0], [10.0], [2.0], [50.0], [1.0])
    over = series_of([3.0], [30.0], [6.0], [150.0], [9.0])
    assert ratio("over / under", over, under).median() == pytest.approx(3.0)


def test_a_ratio_of_series_with_different_rounds_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        ratio("over / under", series_of([1.0]), series_of([1.0], [1.0])).median()


def test_an_excess_is_the_difference_within_rounds():
    under = series_of([1.0], [10.0], [2.0])
    over = series_of([1.5], [10.5], [9.0])
    assert excess("over", over, under).median() == pytest.approx(0.5)


def test_a_ratio_of_what_is_left_above_a_floor_takes_the_floor_of_the_same_round():
    over, floor, under = (
        series_of([3.0], [30.0], [9.0]),
        series_of([1.0], [10.0], [1.0]),
        series_of([1.0], [10.0], [1.0]),
    )
    assert excess_ratio("less", over, floor, under).median() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(1.234, "ratio", "1.23x"), (0.987, "share", "98.7 %"), (2.5e-7, "s", "250 ns"), (-3e-6, "s", "-3 us")],
)
def test_a_value_is_written_in_its_unit(value, unit, text):
    assert value_text(value, unit) == text


@pytest.mark.parametrize(("measured", "at_most", "met"), [(1.9, True, True), (2.1, True, False), (2.1, False, True)])
def test_a_target_is_met_on_the_right_side_of_its_limit(measured, at_most, met):
    assert Target("latency", measured, 2.0, at_most).met() is met


@pytest.mark.parametrize(("size", "name"), [(8, "8 B"), (4096, "4 KiB"), (64 * 2**20, "64 MiB")])
def test_sizes_are_named_in_binary_units(size, name):
    assert size_name(size) == name
