"""When the features of a row examine its tokens next: as soon as the first of their watches is due."""

from __future__ import annotations

import pytest

from batchspec.engine.slots.request_state import NEVER, Watch


@pytest.mark.parametrize(
    ("watches", "first"),
    [
        ([], None),
        ([Watch(7, 3)], Watch(7, 3)),
        ([Watch(7), Watch(5)], Watch(5)),
        ([Watch(7, 3), Watch(5)], Watch(5, 3)),
        ([Watch(NEVER, 3), Watch(NEVER, 3)], Watch(NEVER, 3)),
        ([Watch(7, 3), Watch(9, 4)], Watch(0)),  # a slot has room for one token: look after every result
    ],
)
def test_the_first_of_several_watches(watches: list[Watch], first: Watch | None) -> None:
    assert Watch.first(iter(watches)) == first
