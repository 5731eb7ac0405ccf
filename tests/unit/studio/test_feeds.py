"""Live updates: pollers whose files cannot be read for a moment, or only slowly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from gracetune.studio.feeds import Feed, Message


async def followed(
    poll: Callable[[], list[Message]], until: Callable[[asyncio.Queue[Message | None]], Awaitable[None]]
) -> None:
    feed = Feed(poll, 0.001)
    queue = feed.listen()
    try:
        await asyncio.wait_for(until(queue), 30)
    finally:
        feed.leave(queue)


def test_a_poller_outlives_a_failing_file_server() -> None:
    answers: list[OSError | list[Message]] = [OSError(5, "Input/output error"), [("step", {"step": 1})]]
    seen = []

    def poll() -> list[Message]:
        answer = answers.pop(0) if answers else []
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def first(queue: asyncio.Queue[Message | None]) -> None:
        seen.append(await queue.get())

    asyncio.run(followed(poll, first))
    assert seen == [("step", {"step": 1})]


def test_a_poll_that_waits_for_files_or_for_a_core_is_not_followed_by_a_long_pause() -> None:
    """On a machine that is busy with training every poll takes long; new points must be there within two seconds."""
    times: list[float] = []

    def poll() -> list[Message]:
        times.append(time.monotonic())
        time.sleep(0.1)
        return []

    async def five(queue: asyncio.Queue[Message | None]) -> None:
        while len(times) < 5:
            await asyncio.sleep(0.01)

    asyncio.run(followed(poll, five))
    assert times[-1] - times[0] < 4 * 2
