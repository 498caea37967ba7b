"""The completions of one call as they end, for `for` and for `async for`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from batchspec.process.own_process import OwnProcess
from batchspec.records import Completion


class Stream:
    """An iterator of completions, and an asynchronous iterator of the same ones; a context manager that closes it.

    From its first completion on the engine serves only the stream, until it is exhausted or closed. `async for` computes in its
    own thread, so that the event loop stays free. If its task is cancelled, or the loop is left, the remaining rows are cancelled
    within a round, and the engine is free once the loop's `aclose` or the cancellation has returned.
    """

    def __init__(self, completions: Generator[Completion], cancel: Callable[[], None]) -> None:
        """cancel: makes `completions` end at its next round."""
        self._completions, self._cancel = completions, cancel
        self._stepping, self._own = threading.Lock(), OwnProcess()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Completion:
        self._own.check("this stream")
        with self._stepping:
            return next(self._completions)

    def __aiter__(self) -> AsyncGenerator[Completion]:
        return self._each()

    async def _each(self) -> AsyncGenerator[Completion]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="batchspec") as thread:
            try:
                while (completion := await loop.run_in_executor(thread, next, self, None)) is not None:
                    yield completion
            finally:
                self.close()

    def close(self) -> None:
        """Cancel unfinished rows. Any thread may call it; it returns when the engine is free. In a fork it does nothing."""
        if not self._own.is_this():
            return
        self._cancel()
        with self._stepping:
            self._completions.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
