"""Random trees for the tests of tree kernels, as lists."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def random_parents(rng: random.Random, num_nodes: int, max_depth: int) -> list[int]:
    """Parent of each of `num_nodes` nodes, with a lower id than the node; -1 for node 0. No node is deeper than max_depth."""
    parents, depths = [-1], [0]
    for _ in range(num_nodes - 1):
        parent = rng.choice([node for node, depth in enumerate(depths) if depth < max_depth])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def path_to_root(parents: list[int], node: int) -> list[int]:
    """The node, its parent and so on up to the root."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


def ints(values: object, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
