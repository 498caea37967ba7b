"""Kernels over logits. Bytes are those of reading the logits once, and of writing those that change."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from batchspec.kernels.benchmarks.case import Benchmark, Case, copies, into, noise, unwritten
from batchspec.kernels.sampling.argmax import argmax, argmax_reference
from batchspec.kernels.sampling.constrain import constrain_logits
from batchspec.kernels.sampling.cutoff import cutoff, cutoff_reference
from batchspec.kernels.sampling.log_normaliser import log_normaliser, log_normaliser_reference
from batchspec.kernels.sampling.sample import sample, sample_reference
from batchspec.kernels.sampling.softcap import softcap, softcap_reference

logits = partial(noise, dtype=torch.float32)


def argmax_case(rows: int, vocab: int) -> Case:
    inputs = copies(lambda: logits(rows, vocab))
    out, expected = (unwritten(torch.empty(rows, dtype=torch.int32)) for _ in range(2))
    return Case(
        calls=[into(out, partial(argmax, x, out_ids=out)) for x in inputs],
        reference=into(expected, partial(argmax_reference, inputs[0], out_ids=expected)), num_bytes=inputs[0].nbytes,
    )


def log_normaliser_case(rows: int, vocab: int) -> Case:
    inputs = copies(lambda: logits(rows, vocab))
    out, expected = (unwritten(torch.empty(rows)) for _ in range(2))
    return Case(
        calls=[into(out, partial(log_normaliser, x, out=out)) for x in inputs],
        reference=into(expected, partial(log_normaliser_reference, inputs[0], out=expected)), num_bytes=inputs[0].nbytes,
    )


def softcap_case(rows: int, vocab: int) -> Case:
    inputs = copies(lambda: logits(rows, vocab, scale=30.0))
    expected = inputs[0].clone()
    return Case(
        calls=[into(x, partial(softcap, x, 30.0)) for x in inputs],
        reference=into(expected, partial(softcap_reference, expected, 30.0)), num_bytes=2 * inputs[0].nbytes,
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


def cutoff_case(rows: int, vocab: int, scale: float, top_k: int, top_p: float) -> Case:
    """scale: of the logits; a larger one makes fewer tokens likely. The reference adds up in another order, so that the end of a
    nucleus of many tokens may differ by a token or two."""
    inputs = copies(lambda: logits(rows, vocab, scale=scale))
    ids = torch.arange(rows, dtype=torch.int32)
    temperature, least, min_p = (torch.full((rows,), value) for value in (0.9, top_p, 0.0))
    rest = (ids, temperature, torch.full_like(ids, top_k), least, min_p)
    out, expected = torch.full((2, rows), torch.nan)
    return Case(
        calls=[into(out, partial(cutoff, x, *rest, out_cutoff=out)) for x in inputs],
        reference=into(expected, partial(cutoff_reference, inputs[0], *rest, out_cutoff=expected)), num_bytes=inputs[0].nbytes,
    )


def constrain_case(rows: int, drafts: int, vocab: int, allowed: str) -> Case:
    """The automaton allows `every` token, as inside a string, or `one`, as before a key. The reference walks token by token."""
    positions = rows * (drafts + 1)
    tables = torch.zeros(1024, dtype=torch.int32)  # a class map of zeros at 1, and a state at 300 that stays what it is
    tables[302] = 300
    masks = torch.full((1, -(-vocab // 32)), -1 if allowed == "every" else 0, dtype=torch.int32)
    masks[0, 0] |= 2
    states, ones = torch.full((rows,), 300, dtype=torch.int32), torch.ones(rows, dtype=torch.int32)
    symbols, starts = torch.zeros(5 * vocab, dtype=torch.int32), 5 * torch.arange(vocab + 1, dtype=torch.int32)
    rest = (torch.arange(positions, dtype=torch.int32) // (drafts + 1), states, ones, tables, masks, symbols, starts)
    drafted: dict[str, Any] = {
        "drafts": torch.randint(vocab, (rows, max(drafts, 1))).int(), "num_drafted": torch.arange(positions) % (drafts + 1),
    }
    inputs = copies(lambda: logits(positions, vocab))
    return Case(
        calls=[into(x, partial(constrain_logits, x, *rest, **drafted)) for x in inputs], reference=None,
        num_bytes=(allowed == "one") * inputs[0].nbytes + masks.nbytes,
    )


SAMPLING = (
    Benchmark("argmax", argmax_case, "rows vocab", ((64, 49152), (1024, 49152), (256, 128256)), (3, 300)),
    Benchmark("log_normaliser", log_normaliser_case, "rows vocab", ((64, 49152), (1024, 49152), (256, 128256)), (3, 300)),
    Benchmark("softcap", softcap_case, "rows vocab", ((64, 262144), (256, 262144), (64, 32000)), (3, 300)),
    Benchmark(
        "sample", sample_case, "rows vocab draws",
        tuple(
            (*size, draws)
            for size in ((16, 49152), (64, 49152), (1024, 49152), (256, 128256)) for draws in ("greedy", "all", "few")
        ),
        (3, 300, "all"),
    ),
    Benchmark(
        "cutoff", cutoff_case, "rows vocab scale top_k top_p",
        tuple(
            (*size, *limits)
            for size in ((64, 128256), (256, 128256), (256, 49152))
            for limits in ((4.0, 0, 0.95), (1.0, 0, 0.95), (4.0, 50, 1.0), (4.0, 50, 0.9))
        ),
        (2, 300, 4.0, 20, 0.9),
    ),
    Benchmark(
        "constrain", constrain_case, "rows drafts vocab allowed",
        tuple(
            (*size, allowed)
            for size in ((256, 3, 49152), (256, 3, 151936), (256, 0, 151936), (16, 3, 151936)) for allowed in ("every", "one")
        ),
        (2, 1, 300, "one"),
    ),
)
