"""Retries of requests to remote stores, and their time limits: one for a single try, one for all tries of a request."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from batchspec.console import terminal
from batchspec.errors import StorageError

CONNECT_S = 10.0
"""Time limit for making a connection."""
REQUEST_S = 30.0
"""Time limit without a byte from the store."""
DEADLINE_S = 120.0
"""All tries of a request together: none begins that would end later than this if it took as long as the longest before it."""
UNRESOLVED_S = 10.0
"""The same for the first request to a server whose name cannot be resolved: most often the machine has no network."""
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 8.0
NOTICE_S = 10.0
"""A request that has failed for so long is reported once, so that a run that waits for a store is not silent for two minutes."""
REFUSALS = (
    "ACCESS_DENIED", "NO_SUCH_BUCKET", "INVALID_ACCESS_KEY", "SIGNATURE_DOES_NOT_MATCH", "INVALID_CLIENT", "HTTP status 403",
    "HTTP status 301",
)
SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")

T = TypeVar("T")


def aws_explained(error: Exception) -> str:
    return f"{reason(error)}; check the network, the endpoint (AWS_ENDPOINT_URL) and the store's health"


def retried(
    what: str, act: Callable[[], T], passing: Callable[[Exception], bool], explain: Callable[[Exception], str] = aws_explained,
    *, limit_s: float | None = None, notice_s: float | None = None,
) -> T:
    """The result of `act`, which is repeated, with growing pauses, after errors that are temporary according to `passing`.

    explain   tells what is wrong and what to check on this store, without credentials
    limit_s   seconds for all tries; default DEADLINE_S
    notice_s  once the tries have failed for so long, one line on stderr says that the request is tried again, and why; default
              NOTICE_S

    Raises StorageError, beginning with `what`, when the limit is reached; any other error of `act` at once.
    """
    limit_s, notice_s = DEADLINE_S if limit_s is None else limit_s, NOTICE_S if notice_s is None else notice_s
    began, pause, noticed, longest = time.monotonic(), FIRST_PAUSE_S, False, 0.0
    while True:
        try_began = time.monotonic()
        try:
            return act()
        except Exception as error:
            if not passing(error):
                raise
            now = time.monotonic()
            waited, longest = now - began, max(longest, now - try_began)
            if waited + pause + longest > limit_s:
                raise StorageError(
                    f"{what} failed for {waited:.0f} s ({explain(error)}); nothing committed is lost: run the same command again "
                    "after that"
                ) from error
            if waited + pause >= notice_s and not noticed:
                noticed = True
                terminal.say(f"{what} fails ({explain(error)}); it is tried again for up to {limit_s:.0f} s")
        time.sleep(pause * random.uniform(0.5, 1.0))  # so that the tasks of an array do not retry all at once
        pause = min(2 * pause, LONGEST_PAUSE_S)


@contextmanager
def noticed(what: str) -> Iterator[None]:
    """Within this block, which waits for one answer, one line on stderr reports a wait of more than NOTICE_S."""
    notice = threading.Timer(
        NOTICE_S, lambda: terminal.say(f"{what} has taken {NOTICE_S:.0f} s without an answer; still waiting")
    )
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def arrow_passing(error: Exception) -> bool:
    """Whether an error of Arrow's file systems may be temporary. Only its text tells."""
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError):
        return False
    return not any(word in str(error) for word in REFUSALS)


def reason(error: Exception) -> str:
    """The text of an error in one line, without credentials."""
    lines = str(error).strip().splitlines()
    text = re.sub(r"//[^/@\s]*@", "//***@", lines[0] if lines else type(error).__name__)
    for name in SECRETS:
        value = os.environ.get(name)
        if value:
            text = text.replace(value, "***")
    return text
