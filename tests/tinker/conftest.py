"""One service for the suite, a process of its own, with two tenants; faults start their own."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests.client.running import Running
from tests.tinker.served import Tenant, add_tenant, new_run, start

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The SDK leaves connections to the garbage collector, here and nowhere else."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    service = start(tmp_path_factory.mktemp("tinker"), "--exact")
    yield service
    assert service.stop() == 0
    gc.collect()  # while the warnings of this folder's tests count


@pytest.fixture(scope="session")
def acme(running: Running) -> Iterator[Tenant]:
    tenant = add_tenant(running, "acme")
    yield tenant
    tenant.close()


@pytest.fixture(scope="session")
def birch(running: Running) -> Iterator[Tenant]:
    tenant = add_tenant(running, "birch")
    yield tenant
    tenant.close()


@pytest.fixture(scope="module")
def service(acme: Tenant) -> tinker.ServiceClient:
    """A session that the tests of a module share."""
    return acme.service(user_metadata={"suite": "acceptance"})


@pytest.fixture
def run(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A run of the test's own, always with the same first adapter."""
    return new_run(service)
