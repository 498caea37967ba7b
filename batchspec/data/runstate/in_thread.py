"""Runs an operation of a store in a background thread: it may take seconds, and rounds must not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from batchspec.process.threads import start_thread

T = TypeVar("T")


def in_thread(task: Callable[[], T], name: str) -> Future[T]:
    """Run the task in a daemon thread; the future is done when the task ends, with its result or the error that it raised."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = task()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    start_thread(run, name)
    return future
