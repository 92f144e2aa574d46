"""What is computed beside the loop."""

import asyncio
import threading

from marlaas.loop.concurrency import LARGE, beside_the_loop


def test_only_what_is_large_is_computed_in_a_thread() -> None:
    async def main() -> None:
        here = threading.get_ident()
        assert await beside_the_loop(LARGE, threading.get_ident) == here
        assert await beside_the_loop(LARGE + 1, threading.get_ident) != here

    asyncio.run(main())
