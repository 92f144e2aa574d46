"""The store for an event loop: in order, never in doubt, and holding up nobody."""

import asyncio
import threading
from pathlib import Path

import pytest

from marlaas.errors import NotFound
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import EventKind
from tests.store.records import ACME, record_of, spec_of, write_state


@pytest.mark.parametrize("is_threaded", [True, False])
def test_calls_keep_their_order_and_raise_what_they_raise(
    tmp_path: Path, is_threaded: bool
) -> None:
    async def main() -> list[int]:
        store = AsyncStore(Store(tmp_path), is_threaded=is_threaded)
        with pytest.raises(NotFound):
            await store.call(Store.job, ACME, "sums")
        await store.call(Store.add_job, ACME, spec_of())
        calls = [
            store.call(Store.add_event, ACME, "sums", EventKind.LOG, {"text": str(number)})
            for number in range(20)
        ]
        numbers = await asyncio.gather(*calls)
        await store.close()
        return numbers

    assert asyncio.run(main()) == list(range(2, 22))


def test_a_cancelled_caller_waits_for_its_call(tmp_path: Path) -> None:
    entered, release = threading.Event(), threading.Event()

    def slow(store: Store) -> None:
        entered.set()
        release.wait()
        store.add_job(ACME, spec_of())

    async def main() -> None:
        store = AsyncStore(Store(tmp_path))
        calling = asyncio.create_task(store.call(slow))
        await asyncio.to_thread(entered.wait)
        calling.cancel()
        await asyncio.sleep(0.01)
        assert not calling.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert (await store.call(Store.job, ACME, "sums")).step == 0
        await store.close()

    asyncio.run(main())


def test_a_step_does_not_wait_for_files_to_be_deleted(tmp_path: Path) -> None:
    async def main() -> None:
        plain = Store(tmp_path)
        store = AsyncStore(plain)
        await store.call(Store.add_job, ACME, spec_of())
        release = threading.Event()
        assert store._deleting is not None
        store._deleting.submit(release.wait)  # a disk that takes its time
        paths = [write_state(plain, step) for step in (1, 2)]
        for step in (1, 2):
            await store.call(Store.commit_step, ACME, "sums", record_of(step), dropped={})
        assert paths[0].exists()
        release.set()
        await store.close()
        assert [path.exists() for path in paths] == [False, True]

    asyncio.run(main())
