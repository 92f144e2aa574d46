"""One service for the suite, a process of its own, with two tenants; faults start their own.

It ends with the last test of this folder, not with those of others: what the SDK leaves to the
garbage collector is collected here, where that is let pass.
"""

import contextlib
import gc
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import tinker

from tests.client.running import Running
from tests.tinker.served import Tenant, add_tenant, new_run, start

HERE = Path(__file__).parent
SHARED = contextlib.ExitStack()
"""What the folder's tests share, until its last one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    yield
    if nextitem is None or HERE not in nextitem.path.parents:
        SHARED.close()
        gc.collect()


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Running:
    service = start(tmp_path_factory.mktemp("tinker"), "--exact")
    SHARED.callback(service.stop)
    return service


@pytest.fixture(scope="session")
def acme(running: Running) -> Tenant:
    return SHARED.enter_context(contextlib.closing(add_tenant(running, "acme")))


@pytest.fixture(scope="session")
def birch(running: Running) -> Tenant:
    return SHARED.enter_context(contextlib.closing(add_tenant(running, "birch")))


@pytest.fixture(scope="module")
def service(acme: Tenant) -> Iterator[tinker.ServiceClient]:
    """A session that the tests of a module share; its runs are at work until it ends."""
    client = acme.service(user_metadata={"suite": "acceptance"})
    yield client
    client.close("success").result()
    acme.clients.remove(client)


@pytest.fixture
def run(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A run of the test's own, always with the same first adapter."""
    return new_run(service)
