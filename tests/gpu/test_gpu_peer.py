"""Exchanges between GPUs against those of the same tensors over gloo, in a CUDA graph and through NCCL.

On a machine with one GPU two ranks share it: then large tensors go through main memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from batchspec.distributed.collectives import Collectives
from batchspec.distributed.peer import PeerCollectives
from batchspec.kernels.gemm.fp8_tokens import Fp8Form
from batchspec.kernels.norm_rope.norm import add_norm
from batchspec.kernels.norm_rope.norm_fp8 import norm_fp8
from tests.helpers.ranks import bits, start_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROUND_BYTES = 1 << 21
WIDTH, EPS = 4096, 1e-5


def noise(seed: int, rank: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(*shape, generator=generator).to(dtype).cuda()


def joined(host: Collectives) -> PeerCollectives:
    index = host.rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    ranks = PeerCollectives(host, torch.device("cuda", index), wait_s=60, nccl_s=60)
    ranks.reserve(ROUND_BYTES)
    return ranks


def exchange_all(host: Collectives, folder: Path) -> None:
    ranks = joined(host)
    for tokens in (1, 10_000):
        ranks.broadcast(given := noise(tokens, host.rank, tokens, WIDTH))
        assert torch.equal(given, noise(tokens, 0, tokens, WIDTH))
    for prefilling in (False, True):
        for tokens in (1, 16, 200, 1000, 10_000):  # the last two are larger than the buffers of rounds, the last than all
            x = noise(tokens, host.rank, tokens, WIDTH)
            kept = x.clone()
            if prefilling:
                with ranks.prefilling():
                    total = ranks.sum(x)
            else:
                total = ranks.sum(x)
            assert torch.equal(total.cpu(), host.sum(x.cpu())), (prefilling, tokens)
            assert torch.equal(x, kept)
        for tokens, form in ((37, Fp8Form(whole=False)), (200, Fp8Form(whole=True)), (1000, Fp8Form(whole=False))):
            partial, residual, weight = noise(1, host.rank, tokens, WIDTH), noise(2, 50, tokens, WIDTH), noise(3, 50, WIDTH)
            stream, aux, total = residual.clone(), torch.empty_like(residual), host.sum(partial.cpu()).cuda()
            own = ranks.add_norm_fp8(partial, stream, weight, EPS, form, out_aux=aux).rows
            expected = norm_fp8(total, residual, weight, EPS, form).rows
            assert torch.equal(stream, residual)
            assert torch.equal(aux, residual)
            assert torch.equal(*(rows.values[:tokens].view(torch.uint8) for rows in (own, expected))), (tokens, form)
            assert torch.equal(own.scales[:, :tokens], expected.scales[:, :tokens])
        few = noise(5, host.rank, 300, 2, dtype=torch.float32)
        assert torch.equal(ranks.sum(few).cpu(), host.sum(few.cpu()))
        assert bits(ranks.gather(few).cpu()) == bits(host.gather(few.cpu()))
        for tokens in (1, 200, 10_000):
            qkv, q_norm, k_norm = noise(6, host.rank, tokens, 3072 + 1024), noise(7, host.rank, 3072), noise(8, host.rank, 512)
            by_host = qkv.cpu()
            host.norm_heads(by_host, q_norm.cpu(), k_norm.cpu(), EPS)
            ranks.norm_heads(qkv, q_norm, k_norm, EPS)
            torch.testing.assert_close(qkv.cpu(), by_host, rtol=2**-6, atol=2**-7)
        scores, ids = few[:, 0].round().contiguous(), torch.arange(300, dtype=torch.int32).cuda() + 1000 * host.rank
        assert torch.equal(ranks.best(scores, ids).cpu(), host.best(scores.cpu(), ids.cpu()))
    assert int(ranks.gather(torch.tensor([host.rank])).sum()) == sum(range(host.ranks)), "tensors on the CPU are exchanged too"
    ranks.check()


def replay(host: Collectives, folder: Path) -> None:
    """Layers of a round in a graph, with new data at each replay."""
    ranks = joined(host)
    partial, residual, weight = (torch.empty(64, WIDTH, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    out, aux = torch.empty_like(partial), torch.empty_like(partial)
    weight = noise(0, 99, WIDTH)

    def layers() -> None:
        for _ in range(5):
            ranks.add_norm(partial, residual, weight, EPS, out=out, out_aux=aux)
            partial.copy_(out)

    layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        layers()
    for seed in range(20):
        partial.copy_(noise(seed, host.rank, 64, WIDTH))
        residual.copy_(noise(seed, 50, 64, WIDTH))
        expected, stream = partial.clone().cpu(), residual.clone()
        graph.replay()
        for _ in range(5):
            total = host.sum(expected).cuda()
            normed = torch.empty_like(total)
            add_norm(total, stream, weight, EPS, out=normed)
            expected = normed.cpu()
        assert torch.equal(residual, stream), seed
        assert torch.equal(aux, stream)
        assert torch.equal(out.cpu(), expected)
    ranks.check()


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("call", [exchange_all, replay])
def test_exchanges_between_gpus_are_those_over_gloo(
    call: Callable[[Collectives, Path], None], count: int, tmp_path: Path
) -> None:
    if count > max(2, torch.cuda.device_count()):
        pytest.skip(f"{count} GPUs")
    start_ranks(count, call, tmp_path, fork=False)
