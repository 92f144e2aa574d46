from collections.abc import Iterator

import pytest

from tests.client.running import Running


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service that the tests of a module share; what they make has names of its own."""
    running = Running(tmp_path_factory.mktemp("service"))
    running.start()
    yield running
    assert running.stop() == 0
