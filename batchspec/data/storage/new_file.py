"""Local files that appear under their names when they are complete."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from batchspec.data.storage.store import storing


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A temporary path next to the target: renamed to it if the block succeeds, deleted if it fails. Raises StorageError."""
    path = target.with_name(f".batchspec-{uuid.uuid4().hex}")
    with storing(f"writing {target}"):
        try:
            yield path
            with path.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(path, target)
        except BaseException:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise


def write_lines(lines: Iterable[Mapping[str, Any]], target: Path) -> int:
    """Write JSON lines; returns their number."""
    count = 0
    with new_file(target) as path, path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
    return count
