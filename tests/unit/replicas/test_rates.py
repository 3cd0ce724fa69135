import pytest

from bifolio.replicas.rates import HALF_LIFE_S, Average, Rate


def test_nothing_measured_is_zero() -> None:
    assert (Rate().value, Average().value) == (0, 0)


def test_a_rate_is_the_amount_by_the_time_it_took() -> None:
    rate = Rate()
    rate.add(30, 0.1)
    assert rate.value == pytest.approx(300)
    rate.add(0, 0)
    rate.add(10, 0.1)
    assert rate.value == pytest.approx(200, rel=0.02)


def test_what_was_half_a_life_ago_counts_half() -> None:
    rate = Rate()
    rate.add(100, 1.0)
    rate.add(0, HALF_LIFE_S)
    assert rate.value == pytest.approx(50 / (0.5 + HALF_LIFE_S))


def test_a_rate_follows_what_happens() -> None:
    rate = Rate()
    for speed in (1000, 200):
        for _ in range(600):
            rate.add(speed * 0.1, 0.1)
        assert rate.value == pytest.approx(speed, rel=0.01)


def test_time_alone_and_amounts_alone_are_no_error() -> None:
    rate = Rate()
    rate.add(5, 0.0)
    assert rate.value == 0
    rate.add(5, 1.0)
    assert rate.value > 0


def test_an_average_begins_with_its_first_value_and_follows() -> None:
    average = Average()
    average.add(3.0)
    assert average.value == 3.0
    average.add(0.0)
    assert 0 < average.value < 3.0
    for _ in range(100):
        average.add(7.0)
    assert average.value == pytest.approx(7.0)
