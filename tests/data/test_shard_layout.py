"""Which rows each shard holds: every row is in one shard, and an extension moves none of the rows before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.data.dataset.shard_layout import ShardLayout

STEPS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 7)), min_size=1, max_size=5)
"""(rows that are added, rows a shard)"""


def layouts(steps: list[tuple[int, int]]) -> list[ShardLayout]:
    first, *later = steps
    made = [ShardLayout.even(*first)]
    for num_rows, shard_rows in later:
        made.append(made[-1].extended(made[-1].num_rows + num_rows, shard_rows))
    return made


@given(STEPS)
def test_every_row_is_in_one_shard_and_shards_are_in_the_order_of_the_rows(steps: list[tuple[int, int]]) -> None:
    for layout in layouts(steps):
        shards = [layout.rows_of(shard) for shard in range(layout.num_shards)]
        assert all(shards)
        assert [row for rows in shards for row in rows] == [*range(layout.num_rows)]
        assert [layout.shard_of(row) for rows in shards for row in rows] == [i for i, rows in enumerate(shards) for _ in rows]
        assert layout.num_rows_of(range(layout.num_shards)) == layout.num_rows
        assert all(len(rows) <= layout.most_rows([shard]) for shard, rows in enumerate(shards))


@given(STEPS)
def test_an_extension_keeps_every_shard_as_it_was(steps: list[tuple[int, int]]) -> None:
    made = layouts(steps)
    for before, (num_rows, shard_rows), after in zip(made[:-1], steps[1:], made[1:], strict=True):
        old = range(before.num_shards)
        assert [after.rows_of(shard) for shard in old] == [before.rows_of(shard) for shard in old]
        new = [len(after.rows_of(shard)) for shard in range(before.num_shards, after.num_shards)]
        assert new == [min(shard_rows, num_rows - first) for first in range(0, num_rows, shard_rows)]


@given(st.integers(0, 40), st.integers(1, 9))
def test_a_layout_without_extensions_has_equal_shards(num_rows: int, shard_rows: int) -> None:
    layout = ShardLayout.even(num_rows, shard_rows)
    assert layout.num_shards == -(-num_rows // shard_rows)
    assert [layout.shard_of(row) for row in range(num_rows)] == [row // shard_rows for row in range(num_rows)]
    assert layout.last_shard_rows == shard_rows


def test_rows_are_never_taken_away() -> None:
    with pytest.raises(ValueError, match="5 rows cannot be extended to 4"):
        ShardLayout.even(5, 2).extended(4, 2)
