"""Routing of tokens to experts: the whole, or one of its two parts. Random logits, so that experts have about equally many pairs.

Bytes are those of the logits, for lists alone of the chosen ids, and of what is written; these kernels are bound by latency or
instructions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from batchspec.kernels.benchmarks.case import Benchmark, Case, copies, noise
from batchspec.kernels.common.graph_clock import Call
from batchspec.kernels.moe.list_pairs import launch_lists
from batchspec.kernels.moe.route import launch_choice, route, route_reference
from batchspec.kernels.moe.units import Routing


def route_case(tokens: int, top_k: int, experts: int, scores: str, part: str) -> Case:
    """scores: `biased`, of a sigmoid, or `softmax`; part: `both`, `experts` (and weights) or `lists`."""
    unit_pairs, bias = 16 if tokens <= 1024 else 128, torch.rand(experts) if scores == "biased" else None
    options: dict[str, Any] = {"norm_topk": True, "unit_pairs": unit_pairs, "largest_first": unit_pairs > 16, "bias": bias}
    options["scoring"] = "softmax" if bias is None else "sigmoid"
    inputs = copies(lambda: noise(tokens, experts, dtype=torch.float32))
    wanted = route_reference(inputs[0], top_k, **options)
    chosen, listed = (sum(own.nbytes for own in tensors) for tensors in (wanted[:2], wanted[2:6]))
    if part == "both":
        return Case(
            calls=[lambda x=x: route(x, top_k, **options).weights for x in inputs],  # type: ignore[misc]
            reference=lambda: wanted.weights, num_bytes=inputs[0].nbytes + chosen + listed,
        )
    routings = [route(x, top_k, **options) for x in inputs]
    if part == "experts":
        return Case(
            calls=[partial(choose, x, bias, routing) for x, routing in zip(inputs, routings, strict=True)],
            reference=lambda: wanted.weights, num_bytes=inputs[0].nbytes + chosen,
        )
    return Case(
        calls=[partial(make_lists, routing, experts, unit_pairs > 16, wanted) for routing in routings],
        reference=lambda: torch.ones(1), num_bytes=wanted.expert_ids.nbytes + listed,
    )


def choose(logits: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    launch_choice(
        logits, bias, None, None, routing, sigmoid=bias is not None, norm_topk=True, sum_eps=0.0, scale=1.0, groups=(1, 1)
    )
    return routing.weights


def make_lists(routing: Routing, experts: int, largest_first: bool, wanted: Routing) -> Call:
    launch_lists(routing, experts, None, largest_first=largest_first, dead=False)
    return partial(equal, routing, wanted)


def equal(found: Routing, wanted: Routing) -> Tensor:
    """1 if all lists are, 0 if one differs."""
    names = ("pairs", "places", "offsets", "units")
    return torch.tensor([float(all(torch.equal(getattr(found, name), getattr(wanted, name)) for name in names))])


ROUTING = (
    Benchmark(
        "route", route_case, "tokens top_k experts scores part",
        tuple(
            (*sizes, part)
            for sizes in (
                (64, 8, 128, "softmax"), (256, 8, 128, "softmax"), (256, 8, 256, "softmax"), (256, 6, 128, "biased"),
                (256, 4, 64, "softmax"), (256, 22, 512, "biased"), (1024, 4, 32, "softmax"), (1024, 8, 256, "softmax"),
                (16384, 8, 256, "softmax"),
            )
            for part in ("both", "experts", "lists")
        ),
        (20, 3, 10, "biased", "lists"),
    ),
)
