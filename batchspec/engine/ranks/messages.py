"""What the leader of a group sends to the other ranks: every rank executes each message, in order.

`distributed/wire.py` encodes a message; for a round it has about 340 bytes and takes 10 us. Of requests, the ranks get only
what `DeviceBatch.begin` reads (`Request.on_device`).
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from batchspec.batch.row_commands import RuleVocabulary
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.distributed.wire import Codec
from batchspec.engine.step import ScheduledStep
from batchspec.packed_batch import PackedBatch
from batchspec.tuning.table import Table


class Load(msgspec.Struct, frozen=True, tag=True):
    """The model's files are here: load the weights."""

    device: str
    """The leader's hardware and software: every rank must have the same, because all ranks compute parts of one model."""
    tuned: Table
    """How the leader computes matrix products (`batchspec.tuning.table`): all ranks must do the same, whatever their own files
    say."""
    files: str = ""
    """`WeightFiles.state` of the leader: every rank must load the files that the leader does; empty: not compared."""
    vision: bool = False
    """Load the vision encoder too: rows may have images. The leader finds that by the columns of the input."""


class Calibrate(msgspec.Struct, frozen=True, tag=True):
    """Calibrate the scales of an e4m3 cache with these prompts."""

    prompts: list[list[int]]


class Scales(msgspec.Struct, frozen=True, tag=True):
    """Use these scales, [L, 2, KVH] of the whole model."""

    values: list[list[list[float]]]


class Build(msgspec.Struct, frozen=True, tag=True):
    """Make the engine."""

    batch: PackedBatch
    vocabulary: RuleVocabulary | None = None
    """Set if rules of logits need it: ranks get what else these read by `RowCommands` of their steps."""
    num_top: int | None = None
    """output.logprobs: the leader sets it by the column `num_logprobs` of the input."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Call `Engine.prepare`: the launches are the same on every rank; only the leader uses their times."""

    mode: SamplingMode
    shared: bool


class Begin(msgspec.Struct, frozen=True, tag=True):
    """A run of the engine starts: followers reset their state as `Engine.run` does."""

    number: int
    """The number from which results are counted."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """Execute the step (`Executor.execute`) and read as many results as it says."""

    step: ScheduledStep
    number: int
    """1 for the first step of a run, one more for each later step. A rank executes only the step with the next number."""


class NewWeights(msgspec.Struct, frozen=True, tag=True):
    """Replace the target's weights by those of this folder, which has the same config.json."""

    folder: str


class End(msgspec.Struct, frozen=True, tag=True):
    """The run is over."""


Message = Load | Calibrate | Scales | Build | Prepare | Begin | Step | NewWeights | End
_CODEC = Codec[Message](Message)


def encode(message: Message) -> bytes:
    if isinstance(message, Step):
        refills = tuple(replace(refill, request=refill.request.on_device()) for refill in message.step.refills)
        message = Step(replace(message.step, refills=refills), message.number)
    return _CODEC.encode(message)


def decode(data: bytes) -> Message:
    return _CODEC.decode(data)
