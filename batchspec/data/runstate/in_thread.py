"""Runs an operation of a store in a background thread: it may take seconds, and rounds must not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from batchspec.process.threads import start_thread


def in_thread(task: Callable[[], None], name: str) -> Future[None]:
    """Run the task in a daemon thread; the future is done when the task ends, with the error that it raised."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            task()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    start_thread(run, name)
    return future
