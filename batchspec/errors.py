"""Every error that a user can meet, and the exit code it ends the process with.

BatchspecError            1   anything below; never raised itself
  ConfigError             2   a key, a value or a combination of keys
  InputError              2   the input dataset
  CheckpointError         2   a model folder, a tokenizer, a drafter
  OutputError             2   the output folder belongs to another job
  CapacityError           2   the job does not fit the machine's memory
  TooManyErrors           3   more error rows than input.max_error_fraction allows, or nothing but error rows
  StorageError           74   reading or writing failed; the same command goes on after the repair
  Interrupted            75   a signal ended the run; the same command goes on

A message says what, where, the value, the limit and what to do, in one line.
"""

from __future__ import annotations


class BatchspecError(Exception):
    exit_code = 1


class ConfigError(BatchspecError):
    exit_code = 2


class InputError(BatchspecError):
    exit_code = 2


class CheckpointError(BatchspecError):
    exit_code = 2


class OutputError(BatchspecError):
    exit_code = 2


class CapacityError(BatchspecError):
    exit_code = 2


class TooManyErrors(BatchspecError):
    exit_code = 3


class StorageError(BatchspecError):
    exit_code = 74


class Interrupted(BatchspecError):
    exit_code = 75
