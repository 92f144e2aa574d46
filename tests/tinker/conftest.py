"""One service for the suite, a process of its own, with two tenants; faults start their own."""

from collections.abc import Iterator

import pytest
import tinker

from tests.client.running import Running
from tests.tinker.served import Tenant, add_tenant, new_run, start


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    service = start(tmp_path_factory.mktemp("tinker"), "--exact")
    yield service
    assert service.stop() == 0


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
