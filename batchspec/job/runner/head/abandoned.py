"""Deletes the files of trainings that no run continues: answers and checkpoints of models whose jobs were given up.

A training has files in its model's place (`store.py`), and its run renews the claim there. A place without a record in which no
file has changed for AGE_S has no run; its claim is taken before anything is deleted, so that no run begins there meanwhile. Heads
of trainings that ended, claims and logs stay.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from batchspec.data.runstate.claims import Claims
from batchspec.data.storage.open_store import open_store
from batchspec.errors import StorageError
from batchspec.job.runner.head.store import CLAIM, RECORD, ROWS, heads_in

AGE_S = 30 * 24 * 3600.0
PLACE = re.compile(r"(eagle3|block)-[0-9a-f]{24}")
"""Other folders are somebody else's."""


def drop_abandoned(own: Path, attempt: str) -> None:
    """Beside the place of one model, `own`, which stays as it is. The next training tries again what cannot be deleted.

    attempt  of the run, which takes claims
    """
    with suppress(OSError):
        for path in sorted(own.parent.iterdir()):
            if PLACE.fullmatch(path.name) and path != own:
                with suppress(OSError, StorageError):
                    _drop(path, attempt)


def _drop(path: Path, attempt: str) -> None:
    if not _is_abandoned(path):
        return
    claims = Claims(open_store(path, "_batchspec/tmp"), attempt, stale_s=0.0)
    # An owner who has not renewed it for AGE_S is gone, if the claim is still the one that was read first.
    if claims.take(CLAIM) or (_is_abandoned(path) and claims.take(CLAIM)):
        try:
            if not (path / RECORD).exists():  # a run may have ended its training since
                (path / ROWS).unlink(missing_ok=True)
                for head in heads_in(path):
                    shutil.rmtree(head)
        finally:
            claims.release()


def _is_abandoned(path: Path) -> bool:
    """Whether there is something to delete, and no file has changed for long. A folder changes when somebody tries its claim."""
    def failed(error: OSError) -> None:
        raise error  # what cannot be listed may be new

    if (path / RECORD).exists() or not ((path / ROWS).exists() or heads_in(path)):
        return False
    files = (Path(folder, name) for folder, _, names in os.walk(path, onerror=failed) for name in names)
    return time.time() - max((file.lstat().st_mtime for file in files), default=0.0) > AGE_S
