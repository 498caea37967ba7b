"""The errors shown to users, and the exit code with which each ends the process.

BatchspecError            1   base class; never raised itself
  ConfigError             2   a wrong key, value or combination of keys
  InputError              2   a problem with the input dataset
  CheckpointError         2   a problem with a model folder, a tokenizer or a drafter
    TokenizerFails        2   the tokenizer fails on a text of the configuration, or on an answer's tokens
  OutputError             2   the output folder cannot be used, for example because it belongs to another job
  CapacityError           2   the job does not fit the machine's memory; in the middle of a job finished rows stay
  EngineInUse             2   a call that a warm engine cannot take now: another one is running, or it is closed
  TooManyErrors           3   more error rows than input.max_error_fraction allows, or only error rows
  DivergedError          70   ranks that compute one model came to different tokens; nothing of it is saved
  StorageError           74   reading or writing failed; after the repair the same command continues
  Interrupted            75   a signal ended the run; the same command continues
    RankLost             75   a rank of the group that computes the model is gone; the same command continues
    WorkerLost           75   a shard killed the processes that admit rows and make tables; the same command continues

A message says what is wrong, where, the value, the limit and what to do. OneLine makes it one line, whatever values it names.
RendererKilled and BadRow are not shown: admission makes an error row of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchspec.console.text import error_line

if TYPE_CHECKING:
    from batchspec.records import Ids


class OneLine(Exception):
    """An exception whose message is one printable line of limited length (`error_line`)."""

    def __init__(self, message: object = "") -> None:
        super().__init__(error_line(message))


class BatchspecError(OneLine):
    exit_code = 1


class ConfigError(BatchspecError):
    exit_code = 2


class InputError(BatchspecError):
    exit_code = 2


class CheckpointError(BatchspecError):
    exit_code = 2


class TokenizerFails(CheckpointError):
    """The tokenizer fails on a text: by a defect, or because a regular expression of tokenizer.json takes too many steps (the
    library gives up after 10 million). If the text is in a row, admission makes an error row of it."""


class OutputError(BatchspecError):
    exit_code = 2


class CapacityError(BatchspecError):
    exit_code = 2


class EngineInUse(BatchspecError):
    exit_code = 2


class TooManyErrors(BatchspecError):
    exit_code = 3


class DivergedError(BatchspecError):
    exit_code = 70


class StorageError(BatchspecError):
    exit_code = 74


class Interrupted(BatchspecError):
    exit_code = 75


class RankLost(Interrupted):
    """Unlike after a signal, the run's work may have caused it: it counts as a crash (`job/supervise/leases.py`)."""


class WorkerLost(Interrupted):
    """Counts as a crash like RankLost: the next run finds the row that kills a process (`job/supervise/poison_rows.py`)."""


class RendererKilled(OneLine, ValueError):
    """The process that renders chat templates was killed twice at the same chat, or could not start again: the machine is
    the cause, not the chat."""


class BadRow(OneLine):
    """Why a row gets no request. Admission catches it. retryable: the machine is the cause, not the row."""

    def __init__(
        self, code: str, message: str, *, prompt_ids: Ids | None = None, status: str = "error", retryable: bool = False
    ) -> None:
        super().__init__(message)
        self.code, self.prompt_ids, self.status, self.retryable = code, prompt_ids, status, retryable
        self.num_samples = 1
        """Samples that the row asked for, where they were counted before this was raised."""
