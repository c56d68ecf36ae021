"""Options, markers and fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Generator, Iterator
from html import escape
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# Kernels that were tuned on this machine are not what tests are about.
os.environ["EPILOQ_TUNING"] = "off"
# How long an example takes says something about the machine, and nothing about what is tested.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail, rather than skip, GPU tests without a GPU")
    parser.addoption("--seeds", type=int, default=1, help="run each test of random numbers with so many fresh seeds")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    seeds = metafunc.config.getoption("--seeds")
    given = any("seed" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "seed" in metafunc.fixturenames and seeds > 1 and not given:
        metafunc.parametrize("seed", [None] * seeds, ids=range(seeds), indirect=True)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device and a build with kernels")
    config.addinivalue_line("markers", "slow: left out of `make test`; `make test-all` runs it")
    config.addinivalue_line(
        "markers",
        "alone: needs the GPU to itself: it times kernels, or what matters is which of them follow one another",
    )


Case = TypeVar("Case")
FEW = 2
"""Cases of a parametrised test that `make test` runs."""


def few_of(cases: list[Case]) -> list[Case]:
    """At most FEW cases at even distances, the first and the last among them."""
    if len(cases) <= FEW:
        return cases
    return [cases[i * (len(cases) - 1) // (FEW - 1)] for i in range(FEW)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_slow(items)
    if torch.cuda.is_available() or config.getoption("--require-gpu"):
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What was imported and collected stays: collections, which many libraries ask for, need not look at it again."""
    gc.collect()
    gc.freeze()


def _mark_slow(items: list[pytest.Item]) -> None:
    """Mark all but a few CPU cases, and all but a few GPU cases, of each parametrised test."""
    cases: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        if "slow" not in item.keywords:
            cases.setdefault((item.nodeid.partition("[")[0], "gpu" in item.keywords), []).append(item)
    for found in cases.values():
        kept = {item.nodeid for item in few_of(found)}
        for item in found:
            if item.nodeid not in kept:
                item.add_marker(pytest.mark.slow)


def _always_the_same() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test that does not ask for a `seed` draws the same numbers each time, whatever ran before it."""
    _always_the_same()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
    """What several tests share does not depend on which of them comes first."""
    if fixturedef.scope == "function":
        return (yield)
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    _always_the_same()
    try:
        return (yield)
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> Iterator[int]:
    """A fresh seed each run, printed when the test fails; EPILOQ_TEST_SEED repeats one."""
    if request.config.getoption("--seeds") > 1:
        torch.compiler.reset()  # what other seeds compiled counts towards the limit of recompilations
    value = int(os.environ.get("EPILOQ_TEST_SEED", int.from_bytes(os.urandom(4), "little")))
    torch.manual_seed(value)
    print(f"EPILOQ_TEST_SEED={value}")
    yield value


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def _reports_without_pictures() -> Iterator[None]:
    """Pictures take longer than the tiny models that reports are about: `pictures` draws them."""
    with patch("epiloq.quantize.figures.to_svg", lambda _, label: f'<svg aria-label="{escape(label)}"></svg>'):
        yield


@pytest.fixture(scope="module")
def pictures() -> Iterator[None]:
    """`epiloq quantize` draws the pictures of its reports, which other tests leave out."""
    from epiloq.pages.figures import to_svg

    with patch("epiloq.quantize.figures.to_svg", to_svg):
        yield


@pytest.fixture
def epiloq_in_transformers() -> Iterator[None]:
    """transformers opens quantised directories with epiloq, for one test."""
    import epiloq.integrations.transformers as integration

    integration.register()
    yield
    integration.unregister()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model, with a text beside it."""
    from command_line import ROUND, teacher_and_text

    return teacher_and_text(tmp_path_factory.mktemp("teacher"), ROUND)
