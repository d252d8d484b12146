"""Where a wish to stop waits for the trainers (`actors.stopping`).

A module without torch: whoever asks a run to stop waits for the process of this actor, and so does each run's start.
"""

import asyncio


class StopActor:
    """Holds the wish of one run."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def ask(self) -> None:
        """Asks all trainers of the run to stop at their next step boundary."""
        self.asked.set()

    async def wait(self) -> bool:
        """Returns True as soon as somebody has asked."""
        await self.asked.wait()
        return True
