"""Pages without an owner hold NaN: a row that reads one emits no token, or drafts something else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from batchspec.cache.pages import SCRATCH_PAGE, PagePool
from batchspec.engine.loop.engine import Engine


def poison_freed_pages(patch: pytest.MonkeyPatch, engines: Sequence[Engine]) -> None:
    """From now on, in these engines and in those that the caller adds to the list.

    A page that its last owner gives back is NaN at once, unless a hash still finds it. One that is taken holds NaN keys, and
    values that are finite, as every page with an owner does.
    """
    take, release = PagePool.take, PagePool.release

    def fill(pool: PagePool, pages: Sequence[int], key: float, value: float) -> None:
        for engine in engines:
            cache, group = engine.executor.cache, next((i for i, one in enumerate(engine.pools.pools) if one is pool), None)
            target_groups = cache.groups.target_layers
            groups = [*target_groups, *[cache.groups.draft_group] * (len(cache.layers) - len(target_groups))]
            for layer, own in zip(cache.layers, groups, strict=True):
                if own == group:
                    layer.pages[0, list(pages)] = key
                    layer.pages[1, list(pages)] = min(value, torch.finfo(layer.pages.dtype).max)

    def taking(pool: PagePool, count: int) -> list[int]:
        pages = take(pool, count)
        fill(pool, pages, float("nan"), 1e4)  # what another row left
        return pages

    def releasing(pool: PagePool, pages: Sequence[int]) -> None:
        pages = list(pages)
        assert SCRATCH_PAGE not in pages
        release(pool, pages)
        fill(pool, [page for page in pages if not pool._refs[page] and page not in pool._idle], float("nan"), float("nan"))

    patch.setattr(PagePool, "take", taking)
    patch.setattr(PagePool, "release", releasing)
