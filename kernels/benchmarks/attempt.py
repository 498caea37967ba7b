"""For benchmark mains: a configuration that fails is printed, and the table goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def attempt(shape: str) -> Iterator[None]:
    """What raises inside (a wrong result included) becomes one printed line."""
    try:
        yield
    except Exception as error:
        print(f"{shape}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
