"""What every rank but the first does: it executes what the leader sends (`ranks/lead.py`), until the leader ends the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.distributed.channel import Channel
from batchspec.engine.loop.executor import Executor
from batchspec.engine.ranks.lead import Digest
from batchspec.engine.ranks.messages import Begin, Calibrate, End, NewWeights, Prepare, Scales, Step, decode
from batchspec.errors import DivergedError
from batchspec.model.kv_calibration import calibrate
from batchspec.model.target import Target


class Following(Protocol):
    """What a follower needs of an engine."""

    executor: Executor
    target: Target

    def prepare(self, mode: SamplingMode, *, shared: bool = False) -> None:
        """See `Engine`."""


class Beats(Protocol):
    """A watchdog."""

    def beat(self) -> None:
        """Work begins."""

    def pause(self) -> None:
        """It is done, and the rank waits for more."""

    def begin_loading(self) -> None:
        """The rank compiles kernels, captures graphs or reads weights."""


@torch.inference_mode()
def follow(
    channel: Channel,
    engine: Following,
    watchdog: Beats | None = None,
    *,
    new_weights: Callable[[NewWeights], object] | None = None,
) -> None:
    """Execute what the leader sends until it ends the run.

    Raises RankLost; DivergedError if a step does not have the next number, because this rank has missed a step or got one twice.

    new_weights  executes these messages; None: the leader never sends them
    """
    digest, num_steps = Digest(), 0
    while True:
        if watchdog is not None:
            watchdog.pause()
        message = decode(channel.receive())
        if watchdog is not None:
            (watchdog.beat if isinstance(message, Step) else watchdog.begin_loading)()
        match message:
            case Step(step, number):
                num_steps += 1
                if number != num_steps:
                    raise DivergedError(
                        f"rank {channel.rank} received step {number} instead of step {num_steps}; run the same command again"
                    )
                engine.executor.execute(step)
                for _ in range(step.num_reads):
                    digest.add(engine.executor.read())
                    channel.send_digest(digest.number, digest.value)
                    if watchdog is not None:  # the passes of one step may take longer than the limit
                        watchdog.beat()
            case NewWeights():
                assert new_weights is not None
                engine.executor.synchronise()
                new_weights(message)
                engine.executor.forget_acceptance()
                engine.executor.synchronise()
            case Calibrate(prompts):
                calibrate(engine.target, prompts)
            case Begin(number):
                digest.begin(number)
                num_steps = 0
                engine.executor.clear()
            case Scales(values):
                engine.target.use_kv_scales(torch.tensor(values, dtype=torch.float32))
            case Prepare(mode, shared):
                engine.prepare(mode, shared=shared)
            case End():
                return
            case _:
                raise AssertionError(message)
