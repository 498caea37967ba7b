"""For benchmark mains: a configuration that fails becomes one printed line, and the table continues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def continue_on_error(shape: str) -> Iterator[None]:
    """Print an exception of the block (wrong results included) as one line instead of raising it."""
    try:
        yield
    except Exception as error:
        print(f"{shape}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
