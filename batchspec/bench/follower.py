"""`python -m batchspec.bench.follower SEAT ...`: one of the processes that `batchspec bench --tensor-parallel` starts.

SEAT is the process's place in the group (`distributed/seat.py`); the words after it are the leader's command line. It
makes the same variants and takes the same turns: in each it executes what the leader sends until the leader closes the variant.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import sys

from batchspec.bench import rounds
from batchspec.bench.arguments import device_of, parse
from batchspec.bench.engines import Bench
from batchspec.bench.ranks import EXCHANGE_S
from batchspec.bench.variants import EngineVariant, engine_variants
from batchspec.bench.workloads import make_workload
from batchspec.config.compose import reported
from batchspec.console import terminal
from batchspec.distributed.group import Group, joined
from batchspec.distributed.seat import Seat
from batchspec.engine.loop.follower import follow
from batchspec.engine.ranks.messages import Load, decode
from batchspec.errors import BatchspecError, RankLost
from batchspec.job.runner.follower import compute_as_leader
from batchspec.process.child_process import act_when_parent_ends
from batchspec.process.program import end_program


def main() -> int:
    """Follow until the leader is done; returns the exit code."""
    faulthandler.enable()
    act_when_parent_ends(lambda: os._exit(RankLost.exit_code))
    seat, words = Seat.of(sys.argv[1:])
    return reported(lambda: _run(seat, parse(words)))


def _run(seat: Seat, args: argparse.Namespace) -> int:
    try:
        with joined(seat, gpu=device_of(args).type == "cuda", limit_s=EXCHANGE_S, nccl_s=EXCHANGE_S) as group:
            follow_bench(args, group)
    except RankLost as error:
        return error.exit_code  # the leader says which one
    except BatchspecError as error:
        terminal.fail(f"rank {seat.rank}: {error}")
        return error.exit_code
    return 0


def follow_bench(args: argparse.Namespace, group: Group) -> None:
    """Load this rank's part once the leader has checked everything, and take part in what it measures. Raises RankLost."""
    device, message = device_of(args), decode(group.channel.receive())
    assert isinstance(message, Load), message
    compute_as_leader(message, device, group.rank)
    bench = Bench(args, make_workload(args, device, group), device, group)
    if args.rounds is not None:
        rounds.time_rounds(bench)
        return
    variants = engine_variants(bench)
    for _ in range(args.runs):
        for variant in variants:
            _take_turn(variant, group)


def _take_turn(variant: EngineVariant, group: Group) -> None:
    loaded = variant.build()
    gc.freeze()  # a collection that traverses all of torch's objects would keep the other ranks waiting
    follow(group.channel, loaded.engine)
    if not variant.keeps:
        del loaded
        gc.unfreeze()
    variant.close()


if __name__ == "__main__":
    end_program(main())
