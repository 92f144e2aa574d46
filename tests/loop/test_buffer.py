"""The staleness rule by hand and by brute force: no group is ever taken past its bound."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from marlaas import runtime
from marlaas.loop.buffer import Buffer, Ticket
from marlaas.types import Group


def buffer_of(
    steps: int = 100, prompts: int = 2, staleness: int = 1, seeded: bool = False
) -> Buffer:
    return Buffer(
        num_steps=steps, prompts_per_step=prompts, max_staleness=staleness, is_seeded=seeded
    )


def open_all(buffer: Buffer) -> list[Ticket]:
    tickets = []
    while (ticket := buffer.next_ticket()) is not None:
        buffer.open(ticket)
        tickets.append(ticket)
    return tickets


def finish(buffer: Buffer, *tickets: Ticket) -> None:
    for ticket in tickets:
        buffer.finish(
            Group(index=ticket.index, prompt_index=ticket.index, version=ticket.version,
                  trajectories=())
        )  # fmt: skip


async def taken_now(buffer: Buffer) -> list[int] | None:
    """Return the indices that `take` gives without waiting, or None if it waits."""
    task = asyncio.create_task(buffer.take(deadline_s=1e9, cut=lambda index: None))
    for _ in range(3):
        await asyncio.sleep(0)
    if task.done():
        return [group.index for group in task.result()]
    task.cancel()
    return None


def test_the_example_of_the_docstring() -> None:
    async def main() -> None:
        buffer = buffer_of()
        g0, g1, g2, g3 = open_all(buffer)
        assert buffer.next_ticket() is None
        finish(buffer, g2, g3)
        assert await taken_now(buffer) == [2, 3]
        buffer.publish(1)
        g4, g5 = open_all(buffer)
        assert (g4, g5) == (Ticket(4, 1), Ticket(5, 1))
        finish(buffer, g4, g5)
        assert await taken_now(buffer) is None
        finish(buffer, g1)
        assert await taken_now(buffer) is None
        finish(buffer, g0)
        assert await taken_now(buffer) == [0, 1]

    runtime.run_virtual(main())


def test_oldest_finished_groups_go_first() -> None:
    async def main() -> None:
        buffer = buffer_of(prompts=1, staleness=2)
        _, g1, g2 = open_all(buffer)
        finish(buffer, g2, g1)
        assert await taken_now(buffer) == [1]

    runtime.run_virtual(main())


def test_without_staleness_a_step_waits_for_all_of_its_groups() -> None:
    async def main() -> None:
        buffer = buffer_of(staleness=0)
        tickets = open_all(buffer)
        assert len(tickets) == 2
        finish(buffer, tickets[0])
        assert await taken_now(buffer) is None
        finish(buffer, tickets[1])
        assert await taken_now(buffer) == [0, 1]
        assert buffer.next_ticket() is None, "slots are held until the version is published"
        buffer.publish(1)
        assert [ticket.version for ticket in open_all(buffer)] == [1, 1]

    runtime.run_virtual(main())


def test_a_straggler_is_cut_at_the_deadline_and_not_before() -> None:
    async def main() -> None:
        buffer = buffer_of(prompts=1, staleness=1)
        g0, g1 = open_all(buffer)
        finish(buffer, g1)
        assert await taken_now(buffer) == [1]
        buffer.publish(1)
        (g2,) = open_all(buffer)
        finish(buffer, g2)
        cuts: list[tuple[float, int]] = []

        def cut(index: int) -> None:
            cuts.append((runtime.now_s(), index))
            finish(buffer, g0)

        groups = await buffer.take(deadline_s=60.0, cut=cut)
        assert [group.index for group in groups] == [0]
        assert cuts == [(60.0, 0)]

    runtime.run_virtual(main())


def test_the_number_of_groups_is_exactly_what_the_steps_need() -> None:
    async def main() -> None:
        buffer = buffer_of(steps=3, prompts=2, staleness=4)
        assert len(open_all(buffer)) == 6

    runtime.run_virtual(main())


def test_a_lost_group_is_opened_again_first_under_the_version_of_then() -> None:
    async def main() -> None:
        buffer = buffer_of(prompts=1, staleness=2)
        _, g1, g2 = open_all(buffer)
        finish(buffer, g1)
        assert await taken_now(buffer) == [1]
        buffer.publish(1)
        buffer.reopen(g2.index)
        buffer.reopen(0)
        assert open_all(buffer) == [Ticket(0, 1), Ticket(2, 1), Ticket(3, 1)]

    runtime.run_virtual(main())


def test_fixed_lag_versions_and_order() -> None:
    async def main() -> None:
        buffer = buffer_of(prompts=2, staleness=2, seeded=True, steps=5)
        seen: dict[int, int] = {}
        for version in range(5):
            opened = open_all(buffer)
            seen |= {ticket.index: ticket.version for ticket in opened}
            assert buffer.oldest_needed_version() == max(0, version - 2)
            finish(buffer, *reversed(opened))
            assert await taken_now(buffer) == [2 * version, 2 * version + 1]
            buffer.publish(version + 1)
        assert seen == {index: max(0, index // 2 - 2) for index in range(10)}

    runtime.run_virtual(main())


def test_a_restored_buffer_goes_on_where_the_record_ends() -> None:
    async def main() -> None:
        buffer = buffer_of(prompts=2, staleness=1, steps=4)
        kept = Group(index=3, prompt_index=3, version=0, trajectories=())
        buffer.restore(1, consumed=[0, 2], finished=[kept])
        assert open_all(buffer) == [Ticket(1, 1), Ticket(4, 1), Ticket(5, 1)]
        finish(buffer, Ticket(4, 1))
        assert await taken_now(buffer) == [3, 4]

    runtime.run_virtual(main())


def test_closing_ends_the_wait() -> None:
    async def main() -> None:
        buffer = buffer_of()
        open_all(buffer)
        task = asyncio.create_task(buffer.take(deadline_s=1.0, cut=lambda index: None))
        await asyncio.sleep(0)
        buffer.close()
        assert await task is None
        assert buffer.next_ticket() is None

    runtime.run_virtual(main())


async def _random_run(
    rng: random.Random,
    prompts: int,
    staleness: int,
    draw_s: Callable[[], float],
    deadline_s: float,
) -> tuple[int, int]:
    """Drive one job with random rollout times; return worst staleness and number of cuts."""
    steps = 60
    buffer = buffer_of(steps, prompts, staleness)
    rollouts: dict[int, asyncio.Task] = {}
    worst = num_cuts = 0
    taken: list[int] = []

    async def roll_out(ticket: Ticket) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(draw_s())
        finish(buffer, ticket)

    def admit() -> None:
        for ticket in open_all(buffer):
            assert buffer.num_held <= buffer.num_slots
            rollouts[ticket.index] = asyncio.create_task(roll_out(ticket))

    def cut(index: int) -> None:
        nonlocal num_cuts
        num_cuts += 1
        rollouts[index].cancel()

    admit()
    await asyncio.sleep(0)
    for version in range(steps):
        groups = await buffer.take(deadline_s=deadline_s, cut=cut)
        worst = max(worst, *(version - group.version for group in groups))
        taken += [group.index for group in groups]
        admit()
        await asyncio.sleep(rng.random())
        buffer.publish(version + 1)
        admit()
        await asyncio.sleep(0)
    assert sorted(taken) == list(range(steps * prompts))
    return worst, num_cuts


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_no_tail_is_heavy_enough_to_pass_the_bound(seed: int, staleness: int) -> None:
    rng = random.Random(seed)
    worst, _ = runtime.run_virtual(
        _random_run(
            rng,
            prompts=rng.choice([1, 2, 4]),
            staleness=staleness,
            draw_s=lambda: rng.paretovariate(0.7),
            deadline_s=rng.choice([0.0, 5.0, 1e12]),
        )
    )
    assert worst <= staleness


def test_the_bound_is_used_to_the_full_under_heavy_tails() -> None:
    rng = random.Random(0)
    worst, num_cuts = runtime.run_virtual(
        _random_run(rng, 2, 3, lambda: rng.paretovariate(0.7), deadline_s=1.0)
    )
    assert worst == 3
    assert num_cuts > 0
