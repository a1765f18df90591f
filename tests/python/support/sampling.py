"""Tests of many cases run some of them each time: ``@pytest.mark.sample(3)`` is three of a test's parametrizations,
drawn anew. ``--thorough`` runs all, ``--sample-seed`` those of another run, whose seed is in its first lines.
"""

import random
from collections import defaultdict

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run all cases of tests that are marked with sample(n)")
    parser.addoption("--sample-seed", type=int, help="draw the cases of sample(n) that another run has drawn")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sample(n): run n of its parametrizations, drawn anew each time")
    if config.option.sample_seed is None:
        config.option.sample_seed = random.SystemRandom().randrange(10**6)


def pytest_report_header(config: pytest.Config) -> str:
    return "sampled: " + ("no" if config.option.thorough else f"--sample-seed={config.option.sample_seed}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.thorough:
        return
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") is not None:
            groups[item.nodeid.split("[")[0]].append(item)
    left_out: list[pytest.Item] = []
    for name, group in groups.items():
        marker = group[0].get_closest_marker("sample")
        assert marker is not None
        count = min(len(group), marker.args[0])
        kept = random.Random(f"{config.option.sample_seed} {name}").sample(group, count)
        left_out += [item for item in group if item not in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
