from penstock.bench import stats


def test_percentiles_interpolate() -> None:
    values = stats.percentiles(float(value) for value in range(101, 0, -1))
    assert values is not None
    assert (values.p50, values.p90, values.p99, values.largest) == (51.0, 91.0, 100.0, 101.0)


def test_one_value_is_every_percentile() -> None:
    values = stats.percentiles([3.0])
    assert values is not None
    assert (values.p50, values.p99, values.mean) == (3.0, 3.0, 3.0)


def test_nothing_measured_is_not_zero() -> None:
    assert stats.percentiles([]) is None
    assert stats.median([None, None]) is None
    assert stats.median([None, 2.0, 4.0]) == 3.0
