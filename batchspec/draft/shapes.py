"""What a round verifies of a row: a chain of K draft tokens, or a tree of them. Plain numbers: plans need no weights."""

from __future__ import annotations

from dataclasses import dataclass

from batchspec.kernels.tree.prepare_tree_inputs import MAX_NODES

USUAL_NODES = 60
"""As in EAGLE-2: many paths per row, and a forward pass over so few tokens is still bound by reading the weights."""


@dataclass(frozen=True, slots=True)
class ChainShape:
    """Up to `draft_len` tokens, each drafted after the one before; 0: plain decoding."""

    draft_len: int
    """K, which is also the longest path that a round can accept."""

    @property
    def draft_lens(self) -> tuple[int, ...]:
        """The draft lengths of which a round may take one."""
        return candidates(self.draft_len)

    @property
    def num_verified(self) -> int:
        """Maximum number of a row's draft tokens that the target reads in a round."""
        return self.draft_len

    @property
    def verified_counts(self) -> tuple[int, ...]:
        """That number for each of `draft_lens`."""
        return self.draft_lens

    @property
    def kv_per_round(self) -> int:
        """K/V slots of a row, from its newest token on, that a round writes."""
        return self.draft_len + 1

    @property
    def num_lookahead_slots(self) -> int:
        """K/V slots past a row's length limit that its last rounds may write: none, because drafts are cut at the limit."""
        return 0

    def __str__(self) -> str:
        return f"K={self.draft_len}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """The shape of trees: topk branches a node, depth levels, nodes verified (without the root).

    Raises ValueError for a shape that a mask of 64 bits cannot describe, and for more nodes than grow.
    """

    topk: int
    depth: int
    nodes: int

    def __post_init__(self) -> None:
        if self.topk < 2 or self.depth < 1:
            raise ValueError(f"TreeShape: topk={self.topk}, depth={self.depth}; a tree has at least 2 branches and 1 level")
        if self.num_drafted > MAX_NODES:
            raise ValueError(
                f"TreeShape: topk={self.topk} at {self.depth - 1} levels are {self.num_drafted} places; at most {MAX_NODES}"
            )
        if not 1 <= self.nodes <= min(MAX_NODES - 1, self.num_candidates):
            raise ValueError(
                f"TreeShape: nodes={self.nodes} must be in 1 .. {min(MAX_NODES - 1, self.num_candidates)}: topk={self.topk} and "
                f"depth={self.depth} grow {self.num_candidates}, and at most {MAX_NODES - 1} are verified"
            )

    @property
    def draft_len(self) -> int:
        """The longest path that a round can accept: the depth."""
        return self.depth

    @property
    def draft_lens(self) -> tuple[int, ...]:
        """The draft lengths of which a round may take one: it drafts the whole tree or nothing."""
        return 0, self.depth

    @property
    def num_verified(self) -> int:
        """Maximum number of a row's draft tokens that the target reads in a round: the nodes."""
        return self.nodes

    @property
    def verified_counts(self) -> tuple[int, ...]:
        """That number for each of `draft_lens`."""
        return 0, self.nodes

    @property
    def num_candidates(self) -> int:
        """C: number of nodes that grow, of which the best are verified."""
        return num_grown(self.topk, self.depth)

    @property
    def num_drafted(self) -> int:
        """Number of nodes that go through the drafter, topk a level; each needs a slot of its K/V. Those of the last level do
        not."""
        return (self.depth - 1) * self.topk

    @property
    def kv_per_round(self) -> int:
        """K/V slots of a row, from its newest token on, that a round writes: of the target's nodes or of the drafter's."""
        return max(self.nodes + 1, self.num_drafted)

    @property
    def num_lookahead_slots(self) -> int:
        """K/V slots past a row's length limit that its last rounds may write.

        A live row lacks at least one token of its limit, and its newest token takes the first slot: hence 2 fewer.
        """
        return max(0, self.kv_per_round - 2)

    def __str__(self) -> str:
        return f"trees of {self.nodes} nodes, {self.depth} levels"


def candidates(draft_len: int) -> tuple[int, ...]:
    """Draft lengths of chains that are worth a graph: 0 to 4, then each half as large again as the one before, and draft_len."""
    steps = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    return (*(k for k in steps if k < draft_len), draft_len)


def num_grown(topk: int, depth: int) -> int:
    """Number of nodes that a tree with this many levels has before the best are selected."""
    return topk + (depth - 1) * topk**2 if depth else 0


def default_nodes(topk: int, depth: int) -> int:
    """Number of verified nodes unless the config gives one."""
    return min(USUAL_NODES, num_grown(topk, depth))
