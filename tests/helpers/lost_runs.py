"""Runs that save every row in the journal at once, and lose their store before they commit a shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from batchspec import run
from batchspec.data.runstate.journal import Journal
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.errors import StorageError


def lost(*_: Any) -> None:
    """In place of a function that must not be called, or that fails because the store is gone."""
    raise StorageError("the store is gone")


def run_and_lose(words: Sequence[str]) -> None:
    """Run the job of these words up to its first commit, which fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "flush_every", lambda self, seconds: self.flush())
        patch.setattr(OutputFolder, "publish", lost)
        assert run.main([*words]) == StorageError.exit_code


def lose_and_continue(words: Sequence[str], computes: tuple[type, str], capsys: pytest.CaptureFixture[str], *, rows: int) -> None:
    """Run the job and lose it, then continue it twice: neither run computes anything, as the journal has all rows.

    computes  the method that computing a row calls
    """
    run_and_lose(words)
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*computes, lost)
        assert run.main([*words]) == 0
        assert f"{rows} completions are saved" in capsys.readouterr().err
        assert run.main([*words]) == 0
        assert "already complete" in capsys.readouterr().err
