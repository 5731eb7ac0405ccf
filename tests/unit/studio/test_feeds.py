"""Live updates: what a poller does when its files cannot be read for a moment."""

from __future__ import annotations

import asyncio

from gracetune.studio.feeds import Feed, Message


def test_a_poller_outlives_a_failing_file_server() -> None:
    answers: list[OSError | list[Message]] = [OSError(5, "Input/output error"), [("step", {"step": 1})]]

    def poll() -> list[Message]:
        answer = answers.pop(0) if answers else []
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def first() -> Message | None:
        feed = Feed(poll, 0.001)
        queue = feed.listen()
        try:
            return await asyncio.wait_for(queue.get(), 20)
        finally:
            feed.leave(queue)

    assert asyncio.run(first()) == ("step", {"step": 1})
