"""Hashes of pages with images: rows share a page only if its tokens, its parts of images and the next token are the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.cache.pages import prefix_hashes
from batchspec.records import ImagePiece
from tests.helpers.engines import request

PAD = 301
PIECE = partial(ImagePiece, advance=1, encoded_pixels=0, rows=1, cols=1, height=0, width=0, source=b"")


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.sampled_from([b"a", b"b"])), max_size=3), st.data())
def test_hashes_are_equal_exactly_where_tokens_images_and_the_next_token_are(
    places: list[tuple[int, int, bytes]], data: Any
) -> None:
    def made(places: Sequence[tuple[int, int, bytes]]) -> tuple[list[bytes], list[Any]]:
        pieces, begin = list[ImagePiece](), 0
        for gap, length, digest in places:
            pieces.append(PIECE(begin=begin + gap, length=length, digest=digest))
            begin += gap + length
        ids, seen = np.full(40, 5, np.int32), [(5, b"", 0)] * 40
        for piece in pieces:
            for place in range(piece.begin, min(40, piece.begin + piece.length)):
                ids[place], seen[place] = PAD, (PAD, piece.digest, place - piece.begin)
        return prefix_hashes(ids, 4, images=[piece for piece in pieces if piece.begin < 40]), seen

    longer = [(gap, length % 9 + 1, digest) for gap, length, digest in places]
    others = [places, [*places[:1], *places[2:]], [(gap, length, b"b") for gap, length, _ in places], longer]
    other = data.draw(st.sampled_from(others))
    (ours, seen), (found, expected) = made(places), made(other)
    assert len(ours) == 9
    for page, (own, their) in enumerate(zip(ours, found, strict=True)):
        assert (own == their) == (seen[: 4 * page + 5] == expected[: 4 * page + 5])


def test_hashes_of_a_text_are_what_they_were() -> None:
    assert [one.hex() for one in prefix_hashes(np.arange(9, dtype=np.int32), 4)] == TEXT_HASHES
    assert request(0, [1, 2], cap=1).grouping_ids.tolist() == [1, 2]


TEXT_HASHES = ["35cbdbc42e7b5dfd3ea794c304e2dca0", "2ea6315c1abdc207a401821fe023bca0"]
