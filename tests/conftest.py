from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool import Pool

MAX_REPLICAS = 4


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Up to four replicas in real processes, shared by all tests."""
    workers = Pool(MAX_REPLICAS)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def pair() -> Iterator[Pool]:
    """Two workers in a world of their own, shared by all tests: what takes all of a world may use them."""
    workers = Pool(2)
    yield workers
    workers.close()
