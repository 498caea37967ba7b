"""Random trees for the tests of tree kernels, as lists."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def random_parents(rng: random.Random, num_nodes: int, max_depth: int) -> list[int]:
    """The node above each of `num_nodes`, which has a lower number; -1 of node 0. No node is deeper than max_depth."""
    parents, depths = [-1], [0]
    for _ in range(num_nodes - 1):
        above = rng.choice([node for node, depth in enumerate(depths) if depth < max_depth])
        parents.append(above)
        depths.append(depths[above] + 1)
    return parents


def way_up(parents: list[int], node: int) -> list[int]:
    """The node, the one above it and so on to the root."""
    way = [node]
    while parents[way[-1]] >= 0:
        way.append(parents[way[-1]])
    return way


def ints(values: object, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
