"""PeerCollectives: exchanges through memory that all ranks map, against those over gloo.

Processes on the CPU map one file, and Triton interprets the kernels: barriers, counters and both halves of the buffers work as on
GPUs, with ranks that really run concurrently. What this cannot show: the order in which GPUs see each other's writes, launches
that overlap, CUDA graphs, and NCCL. `python -m tests.kernels.exchange_checks 2` shows that.
"""

from __future__ import annotations

import math
import random
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchspec.cluster import worker
from batchspec.config.schema import ClusterConfig, RunConfig
from batchspec.distributed import group
from batchspec.distributed.collectives import Collectives
from batchspec.distributed.group import check_reach
from batchspec.distributed.peer import Lane, PeerCollectives
from batchspec.distributed.seat import Seat
from batchspec.errors import ConfigError, RankLost
from batchspec.job.supervise import watchdog
from batchspec.kernels.distributed.peer_memory import PeerMemory, buffer_bytes, peer_memory
from batchspec.kernels.gemm.fp8_tokens import Fp8Form
from batchspec.model.layers.base import Shard
from batchspec.packing.memory import reserve_bytes
from batchspec.tuning import exchange
from tests.helpers.engines import tiny_spec
from tests.helpers.ranks import Table, ThreadCollectives, bits, on_ranks, start_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")

CPU = torch.device("cpu")
ROUND_BYTES = 1 << 14
EPS = 1e-6


class MappedCollectives(PeerCollectives):
    """A file in place of the GPUs' memory."""

    def __init__(self, host: Collectives, folder: Path, *, wait_s: float = 1.0) -> None:
        """wait_s: a poll takes a hundred times as long in the interpreter."""
        super().__init__(host, CPU, wait_s=wait_s, nccl_s=60)
        self._folder, self._files = folder, 0

    def _connect(self, num_bytes: int) -> PeerMemory:
        self._files += 1
        size = buffer_bytes(self.ranks, num_bytes)
        path = str(self._folder / f"memory {self._files}")
        mapped = torch.from_file(path, shared=True, size=size * self.ranks, dtype=torch.uint8)
        addresses = torch.tensor([mapped.data_ptr() + rank * size for rank in range(self.ranks)])
        return peer_memory(self.rank, self.ranks, num_bytes, addresses, limit_s=self._wait_s, buffer=mapped)

    def lanes(self) -> tuple[Lane, Lane]:
        return self._rounds, self._passes


def test_gpus_that_do_not_reach_each_other_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[int, int]] = set()

    def reaches(gpu: int, other: int) -> bool:
        asked.add((gpu, other))
        return (gpu, other) != (6, 5)

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    check_reach(range(4, 5))
    check_reach(range(4))
    assert len(asked) == 12
    with pytest.raises(ConfigError, match=r"^GPU 6 cannot read the memory of GPU 5, .* set cluster\.tensor_parallel=1$"):
        check_reach(range(4, 8))


def noise(seed: int, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + rank)) * 10).to(dtype)


def dawdle(rank: int, seed: int) -> None:
    """Ranks come at different moments."""
    time.sleep(random.Random(10 * seed + rank).choice((0.0, 0.0, 0.002, 0.01)))


def exchange_all(host: Collectives, folder: Path) -> None:
    """Exchanges of all kinds, sizes and algorithms, one after the other."""
    exchange.ONE_SHOT_BYTES[host.ranks] = 5000
    ranks, rank = MappedCollectives(host, folder), host.rank
    ranks.reserve(ROUND_BYTES)
    for seed in range(3):
        for shape, dtype in (
            ((3, 300), torch.float32),
            ((2, 1500), torch.float32),
            ((5, 2), torch.float32),
            ((7,), torch.float64),
        ):
            x = noise(seed, rank, *shape, dtype=dtype)
            dawdle(rank, seed)
            assert bits(ranks.sum(x)) == bits(host.sum(x)), (seed, shape)
        for shape in ((3, 300), (9, 400)):
            partial, residual, weight = noise(seed, rank, *shape), noise(seed, 50, *shape), noise(seed, 60, shape[1])
            found = [(residual.clone(), torch.empty(shape), torch.empty(shape)) for _ in range(2)]
            dawdle(rank, seed)
            for by, (stream, out, aux) in zip((ranks, host), found, strict=True):
                by.add_norm(partial, stream, weight, EPS, out=out, out_aux=aux)
            assert bits(torch.stack(found[0][::2])) == bits(torch.stack(found[1][::2]))
            torch.testing.assert_close(found[0][1], found[1][1])
            assert len({str(bits(norm)) for norm in host.gather(found[0][1])}) == 1
        for form, shape in ((Fp8Form(whole=False), (3, 300)), (Fp8Form(whole=True), (4, 400))) if seed == 0 else ():
            partial, residual, weight = noise(seed, rank, *shape), noise(seed, 50, *shape), noise(seed, 60, shape[1])
            streams, auxes = (torch.stack((residual, residual)) for _ in range(2))
            dawdle(rank, seed)
            own, other = (
                by.add_norm_fp8(partial, stream, weight, EPS, form, out_aux=aux).rows
                for by, stream, aux in zip((ranks, host), streams, auxes, strict=True)
            )
            count = shape[0]
            assert bits(own.values[:count]) == bits(other.values[:count])
            assert bits(own.scales[:, :count]) == bits(other.scales[:, :count])
            assert bits(streams[0]) == bits(auxes[0]) == bits(streams[1]) == bits(auxes[1]) != bits(residual)
        scores, ids = noise(seed, rank, 20).round(), torch.arange(20, dtype=torch.int32) + 100 * (1 - rank)
        assert bits(ranks.best(scores, ids)) == bits(host.best(scores, ids))
        assert bits(ranks.gather(ids)) == bits(host.gather(ids))
        assert bits(ranks.gather(ids[:0])) == bits(host.gather(ids[:0]))
    ranks.check()
    peers = ranks.lanes()[0].peers
    assert peers is not None
    assert int(peers.epochs[0]) == 3 * 8 + 2, "all went through the kernels"


@pytest.mark.second
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_exchanges_are_those_over_gloo_bit_for_bit(count: int, tmp_path: Path) -> None:
    start_ranks(count, exchange_all, tmp_path)


def exchange_apart(host: Collectives, folder: Path) -> None:
    ranks, x = MappedCollectives(host, folder), noise(0, host.rank, 9)
    ranks.reserve(ROUND_BYTES)
    rounds, passes = (lane.peers for lane in ranks.lanes())
    assert rounds is not None
    assert passes is not None
    ranks.sum(x)
    with ranks.prefilling():
        assert bits(ranks.sum(x)) == bits(host.sum(x))
        ranks.gather(x)
    assert (int(rounds.epochs[0]), int(passes.epochs[0])) == (1, 2)
    ranks.reserve(ROUND_BYTES // 2)
    assert ranks.lanes()[0].peers is rounds, "captured rounds keep their buffers"


@pytest.mark.second
def test_prefill_has_buffers_of_its_own(tmp_path: Path) -> None:
    start_ranks(2, exchange_apart, tmp_path)


def exchange_large(host: Collectives, folder: Path) -> None:
    """gloo in place of NCCL."""
    ranks = MappedCollectives(host, folder)
    ranks.reserve(ROUND_BYTES)
    for with_library in (False, True):
        ranks.lanes()[0].group = dist.group.WORLD if with_library else None
        for shape in ((9, 1000), (4099,), (0,)):
            x = noise(1, host.rank, *shape)
            kept = x.clone()
            for by in (ranks, host):
                by.broadcast(given := x.clone())
                assert bits(given) == bits(noise(1, 0, *shape))
            assert bits(ranks.sum(x)) == bits(host.sum(x)), (with_library, shape)
            assert bits(ranks.gather(x)) == bits(host.gather(x))
            assert torch.equal(x, kept)
        partial, streams, weight = noise(1, host.rank, 9, 1000), noise(2, 50, 2, 9, 1000), noise(1, 60, 1000)
        streams[1] = streams[0]
        outs = torch.empty(2, 9, 1000)
        for by, stream, out in zip((ranks, host), streams, outs, strict=True):
            by.add_norm(partial, stream, weight, EPS, out=out, out_aux=None)
        assert torch.equal(streams[0], streams[1])
        assert torch.equal(outs[0], outs[1])
        heads = noise(3, host.rank, ROUND_BYTES // 8 + 1, 12).repeat(2, 1, 1)  # two fp32 numbers of each row are exchanged
        for by, qkv in zip((ranks, host), heads, strict=True):
            by.norm_heads(qkv, noise(4, host.rank, 4), noise(5, host.rank, 4), EPS)
        assert torch.equal(heads[0], heads[1])
    peers = ranks.lanes()[0].peers
    assert peers is not None
    assert int(peers.epochs[0]) == 0


@pytest.mark.second
@pytest.mark.parametrize("count", [2, 4])
def test_tensors_larger_than_the_buffers_go_through_the_process_group_with_the_same_bits(count: int, tmp_path: Path) -> None:
    start_ranks(count, exchange_large, tmp_path)


def lose_a_rank(host: Collectives, folder: Path) -> None:
    ranks, x = MappedCollectives(host, folder, wait_s=1e-3), noise(0, host.rank, 9)
    ranks.reserve(ROUND_BYTES)
    if host.rank != 1:
        ranks.check()
        ranks.sum(x)
        with pytest.raises(RankLost, match="rank 0: rank 1 of its group did not come to an exchange within"):
            ranks.check()
        ranks.sum(x)  # of no use, and it does not wait
    host.gather(x)
    if host.rank == 1:
        ranks.sum(x)
        with pytest.raises(RankLost, match="rank 1: rank 0 of its group did not come"):
            ranks.check()


@pytest.mark.second
def test_a_rank_that_does_not_arrive_is_reported_and_learns_of_it(tmp_path: Path) -> None:
    start_ranks(2, lose_a_rank, tmp_path)


def test_the_plan_leaves_memory_for_the_buffers_of_prefill() -> None:
    sizes: dict[str, Any] = {"slots": 0, "num_buckets": 1, "num_verified": 3, "prefill_tokens": 0, "max_len": 9}
    whole, part = tiny_spec(), tiny_spec().sharded(Shard(0, 2))
    held = reserve_bytes(part, dtype=torch.bfloat16, **sizes) - reserve_bytes(whole, dtype=torch.bfloat16, **sizes)
    assert held == 4 * max(exchange.LIBRARY_BYTES.values())


def test_both_groups_of_nccl_get_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "new_group", lambda **options: asked.append(options))
    on_ranks(2, lambda host: PeerCollectives(host, torch.device("cuda", host.rank), nccl_s=1380.5))
    assert asked == [{"backend": "nccl", "timeout": timedelta(seconds=1380.5)}] * 4  # 2 groups of each of 2 ranks


@given(st.floats(1e-3, 1e7))
def test_the_watchdog_has_time_to_save_before_torch_aborts_a_hanging_exchange(limit: float) -> None:
    """The exchange may have been launched a whole limit before the last finished round, from which the watchdog counts."""
    found_late = limit + limit / watchdog.NUM_CHECKS
    assert watchdog.nccl_s(limit) >= found_late + watchdog.SAVE_S
    assert watchdog.nccl_s(limit) >= 600


@pytest.mark.parametrize(("own", "expected"), [(1000.0, 2180.0), (20.0, 600.0), (0.0, math.inf), (None, 2 * 3600.0 + 180.0)])
def test_ranks_of_a_job_tell_nccl_the_limit_of_their_watchdog(
    own: float | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []

    def joined(seat: Seat, *, gpu: bool, nccl_s: float) -> None:
        assert (seat.rank, gpu) == (1, False)
        told.append(nccl_s)
        raise RankLost("enough")

    monkeypatch.setattr(group, "joined", joined)
    channel = SimpleNamespace(
        start_liveness_thread=lambda: told.append(-1),
        is_lost=lambda: True,
        tell_load_progress=lambda number: None,
        load_progress=lambda: [0, 0],
    )
    monkeypatch.setattr(Seat, "channel", lambda seat: channel)
    assert worker.run(RunConfig(cluster=ClusterConfig(watchdog_s=own)), Seat(1, 2, 9, 10)) == 75
    assert told == [-1, expected], "it shows life before it joins"


def test_a_job_without_a_watchdog_has_the_longest_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []
    monkeypatch.setattr(Seat, "channel", lambda seat: SimpleNamespace(waiting=nullcontext, meet=lambda: None))
    monkeypatch.setattr(group, "GlooCollectives", lambda *_, **__: None)
    monkeypatch.setattr(group, "PeerCollectives", lambda *_, nccl_s: made.append(nccl_s))
    for name, value in (("device_count", 1), ("set_device", None), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for limit in (math.inf, 1380.0):
        with group.joined(Seat(0, 2, 9, 10), gpu=True, nccl_s=limit):
            pass
    assert made == [group.EXCHANGE_S, 1380.0]


def test_three_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.tensor_parallel=3 on GPUs: must be one of \[2, 4, 8\]"):
        PeerCollectives(ThreadCollectives(0, Table(3)), CPU, nccl_s=60)


def test_two_ranks_take_one_shot_and_more_take_two_for_large_sums() -> None:
    assert not exchange.takes_two_shots(2, 8 << 20)
    assert [exchange.takes_two_shots(4, kilobytes << 10) for kilobytes in (64, 384, 385, 8192)] == [False, False, True, True]
