"""A process that computes a part of the model and decides nothing: it executes what the leader of its group sends."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import torch

from batchspec.checkpoint.weight_files import weight_files
from batchspec.config.schema import RunConfig
from batchspec.distributed.group import Group
from batchspec.engine.loop.follower import follow
from batchspec.engine.ranks.messages import Build, Calibrate, End, Load, Scales, decode
from batchspec.errors import CheckpointError, ConfigError
from batchspec.job.load.build import build_engine, device_facts, load_weights, rewrite_weights
from batchspec.job.load.memory import check_memory, free_bytes, rank_out_of_memory
from batchspec.job.prepare import JobModel, open_model
from batchspec.job.supervise.watchdog import Watchdog
from batchspec.model.kv_calibration import calibrate
from batchspec.model.target import Target
from batchspec.process.out_of_memory import OutOfMemoryGuard
from batchspec.tuning.table import adopt


def run_follower(config: RunConfig, group: Group, watchdog: Watchdog) -> None:
    """Load this rank's part and execute until the leader ends the run.

    The model's files are opened when the leader has them, because it downloads and checks them for all ranks. Raises what
    `open_model` raises, CapacityError when memory runs out, and RankLost.

    watchdog  watches this process; it expects loading at first
    """
    with OutOfMemoryGuard() as guard:
        _follow(config, group, watchdog)
    if guard.message:
        raise rank_out_of_memory(group.rank, guard.message)


def _follow(config: RunConfig, group: Group, watchdog: Watchdog) -> None:
    message = decode(group.channel.receive())
    if isinstance(message, End):
        return
    assert isinstance(message, Load), message
    model = open_model(replace(config, model=replace(config.model, vision=message.vision)), group=group)
    compute_as_leader(message, model.device, group.rank)
    if message.files and weight_files(model.folder).state != message.files:
        raise CheckpointError(
            f"{model.folder}: rank {group.rank} finds other weight files than rank 0: they were written or replaced while the "
            "ranks started; run the same command again when that is over"
        )
    check_memory(model)
    target, weights = load_weights(model)
    if model.spec.has_kv_scales:
        message = decode(group.channel.receive())
        if isinstance(message, Calibrate):
            calibrate(target, message.prompts)
            message = decode(group.channel.receive())
        if isinstance(message, End):
            return
        assert isinstance(message, Scales), message
        target.use_kv_scales(torch.tensor(message.values, dtype=torch.float32))
    free_bytes(model, loaded=True)  # the leader plans with the minimum over all ranks
    message = decode(group.channel.receive())
    if isinstance(message, End):
        return
    assert isinstance(message, Build), message
    drafter = model.drafter.build(weights, target, slots=message.batch.num_slots)
    config = replace(model.config, output=replace(model.config.output, logprobs=message.num_top))
    engine = build_engine(config, target, drafter, message.batch, vocabulary=message.vocabulary, token_ids=model.token_ids)
    gc.freeze()  # a collection that traverses all of torch's objects would keep the other ranks waiting
    follow(group.channel, engine, watchdog, new_weights=lambda message: _rewrite(model, target, Path(message.folder)))


def _rewrite(model: JobModel, target: Target, folder: Path) -> None:
    rewrite_weights(model, target, folder)
    assert model.group is not None
    model.group.least(0)  # the leader waits until all have read the folder


def compute_as_leader(message: Load, device: torch.device, rank: int) -> None:
    """Use the leader's choices for computation. Raises ConfigError unless this rank's device and software are the leader's."""
    if (own := device_facts(device)) != message.device:
        raise ConfigError(
            f"rank {rank} has {own}, rank 0 has {message.device}: ranks of a model need equal devices; choose them by "
            "CUDA_VISIBLE_DEVICES or set cluster.tensor_parallel=1"
        )
    adopt(message.tuned, device)
