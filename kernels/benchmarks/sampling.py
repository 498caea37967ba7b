"""Kernels over logits. Bytes are those of reading the logits once."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from batchspec.kernels.benchmarks.case import Benchmark, Case, copies, into, noise, unwritten
from batchspec.kernels.sampling.argmax import argmax, argmax_reference
from batchspec.kernels.sampling.sample import sample, sample_reference
from batchspec.kernels.sampling.top_candidates import top_candidates, top_candidates_reference

logits = partial(noise, dtype=torch.float32)


def argmax_case(rows: int, vocab: int) -> Case:
    inputs = copies(lambda: logits(rows, vocab))
    out, expected = (unwritten(torch.empty(rows, dtype=torch.int32)) for _ in range(2))
    return Case(
        calls=[into(out, partial(argmax, x, out_ids=out)) for x in inputs],
        reference=into(expected, partial(argmax_reference, inputs[0], out_ids=expected)), num_bytes=inputs[0].nbytes,
    )


def sample_case(rows: int, vocab: int, draws: str) -> Case:
    """draws: `few` ids are above the cutoff, `all` are, or `greedy`."""
    inputs = copies(lambda: logits(rows, vocab, scale=4.0))
    ids, positions, keys = torch.arange(rows, dtype=torch.int32), torch.full((rows,), 512), torch.arange(rows)
    temperature = torch.full((rows,), 0.0 if draws == "greedy" else 1.0)
    rest = (ids, positions, keys, temperature, torch.full((rows,), 14.0 if draws == "few" else -torch.inf))
    out, expected = unwritten(ids), unwritten(ids)
    return Case(
        calls=[into(out, partial(sample, x, *rest, out_ids=out)) for x in inputs],
        reference=into(expected, partial(sample_reference, inputs[0], *rest, out_ids=expected)), num_bytes=inputs[0].nbytes,
    )


def candidates_case(rows: int, vocab: int, count: int) -> Case:
    """rows: positions of all blocks of a round."""
    inputs = copies(lambda: logits(rows, vocab))
    values, expected = (unwritten(torch.empty(rows, count)) for _ in range(2))
    ids = torch.empty(rows, count, dtype=torch.int64)
    wanted = partial(top_candidates_reference, inputs[0], count, out_values=expected, out_ids=ids.clone())
    return Case(
        calls=[into(values, partial(top_candidates, x, count, out_values=values, out_ids=ids)) for x in inputs],
        reference=into(expected, wanted), num_bytes=inputs[0].nbytes,
        compare={"torch.topk": [partial(_topk, x, count) for x in inputs]},
    )


def _topk(x: Tensor, count: int) -> Tensor:
    return x.topk(count, dim=1).values


SAMPLING = (
    Benchmark("argmax", argmax_case, "rows vocab", ((64, 49152), (1024, 49152), (256, 128256)), (3, 300)),
    Benchmark(
        "sample", sample_case, "rows vocab draws",
        tuple(
            (*size, draws)
            for size in ((16, 49152), (64, 49152), (1024, 49152), (256, 128256)) for draws in ("greedy", "all", "few")
        ),
        (3, 300, "all"),
    ),
    Benchmark(
        "top_candidates", candidates_case, "rows vocab count",
        ((192, 32000, 16), (192, 151936, 16), (768, 32000, 16), (768, 49152, 16), (768, 151936, 16)), (3, 300, 16),
    ),
)
