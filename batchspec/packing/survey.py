"""The survey: prompt and output lengths of the first rows (or all), from which the shape of the batch is chosen."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from batchspec.images.prepared_images import MOST_IMAGES_KEPT, MOST_KEPT
from batchspec.packed_batch import ExpectedRows
from batchspec.packing.planner import Demand
from batchspec.records import Completion, Ids, Request
from batchspec.tasks.base import Task
from batchspec.tasks.registry import GENERATE

PREFIX_TOKENS = 128
"""Rounds read a prefix of at least 8 pages of 16 tokens once for all rows that share it (engine/slots/prefix_groups.py)."""
PREFIX_ROWS = 1024
"""Number of requests whose prefixes are compared."""


@dataclass(slots=True)
class Survey:
    """Lengths and error counts of admitted rows; 12 bytes a request."""

    num_rows: int = 0
    prompt_tokens: array[int] = field(default_factory=lambda: array("i"))
    max_new_tokens: array[int] = field(default_factory=lambda: array("i"))
    predicted_tokens: array[int] = field(default_factory=lambda: array("i"))
    num_opened: int = 0
    """Number of requests whose prompt ends inside a thought, because the chat template begins one."""
    num_images: int = 0
    image_tokens: int = 0
    """Images of the requests, and their tokens in all."""
    image_pixels: array[int] = field(default_factory=lambda: array("i"))
    """Pixels of each image after resizing; an image of several samples of a row is there once."""
    encoded_pixels: int = 0
    """Pixels of the same images before."""
    shares_prefix: bool = False
    """Whether two requests of the same adapter, of different rows or of one, begin with the same PREFIX_TOKENS tokens."""
    prefixes: set[tuple[int, bytes]] = field(default_factory=set)
    """Adapter and first PREFIX_TOKENS tokens of some requests."""
    common: Ids | None = None
    """int32: longest common prefix of the first PREFIX_ROWS prompts; None before the first."""
    finished: Collection[int] = ()
    """Shards that need no work, whose requests are not in `first_with_images`."""
    first_with_images: list[Request] = field(default_factory=list)
    """The first requests with images, as many as `PreparedImages` keeps the pixels of before their run begins."""
    first_images: int = 0
    first_bytes: int = 0
    """Number of their images, and bytes: of the pixels, or of an encoded image that is larger."""
    bad: dict[str, tuple[int, str]] = field(default_factory=dict)
    """code -> (number of rows, message of the first)"""
    num_errors: int = 0
    """Number of them that are error rows; input.on_overlong=skip makes skipped ones."""

    def add(self, num_rows: int, admitted: Iterable[Request | Completion]) -> None:
        """Count `num_rows` input rows, given their requests and completions from admission."""
        self.num_rows += num_rows
        for item in admitted:
            if isinstance(item, Request):
                # The prompt of choices is computed once: they share its pages.
                self.prompt_tokens.append(len(item.prompt_ids) + max((len(one.token_ids) for one in item.choices), default=0))
                self.max_new_tokens.append(item.max_new_tokens)
                self.predicted_tokens.append(item.predicted_tokens)
                self._compare_prefix(item)
                self.num_images += len(item.images)
                self.image_tokens += sum(piece.length for piece in item.images)
                if item.images and not item.sample_index:
                    if item.shard not in self.finished:
                        self._keep_first(item)
                    self.image_pixels.extend(piece.height * piece.width for piece in item.images)
                    self.encoded_pixels += sum(piece.encoded_pixels for piece in item.images)
                self.num_opened += item.thinking is not None and item.thinking.opened is True
            else:
                assert item.error is not None
                count, example = self.bad.get(item.error.code, (0, item.error.message))
                self.bad[item.error.code] = (count + 1, example)
                self.num_errors += item.status == "error"

    def _keep_first(self, request: Request) -> None:
        self.first_images += len(request.images)
        self.first_bytes += sum(max(piece.num_bytes, piece.encoded_bytes) for piece in request.images)
        if self.first_bytes <= MOST_KEPT and self.first_images <= MOST_IMAGES_KEPT:
            self.first_with_images.append(request)

    def take_first(self) -> list[Request]:
        """`first_with_images`, which hold the encoded images, once."""
        found, self.first_with_images = self.first_with_images, []
        return found

    def _compare_prefix(self, request: Request) -> None:
        if len(self.prompt_tokens) > PREFIX_ROWS:
            return
        ids = request.grouping_ids
        known = ids if self.common is None else self.common
        known = known[: len(ids)]
        differs = np.flatnonzero(known != ids[: len(known)])
        self.common = known[: differs[0]] if len(differs) else known
        if len(ids) >= PREFIX_TOKENS:
            prefix = (request.adapter, ids[:PREFIX_TOKENS].tobytes())
            self.shares_prefix = self.shares_prefix or prefix in self.prefixes
            self.prefixes.add(prefix)

    def lengths(self, name: str) -> Ids:
        """One of the three lists as int32 [requests]."""
        return np.frombuffer(getattr(self, name), dtype=np.int32)

    @property
    def num_bad(self) -> int:
        return sum(count for count, _ in self.bad.values())

    @property
    def mean_output(self) -> float:
        """Mean predicted output tokens of a request."""
        return float(self.lengths("predicted_tokens").mean()) if self.predicted_tokens else 1.0

    def num_outputs(self, num_rows: int) -> int:
        """Expected output rows for `num_rows` input rows: one for each sample, one for a bad row."""
        return round((len(self.prompt_tokens) + self.num_bad) * num_rows / self.num_rows)

    def expected_rows(self, num_rows: int, window_rows: int) -> ExpectedRows | None:
        """What to expect of `num_rows` such input rows; None if no request was surveyed.

        window_rows  number of input rows that are ordered together, by predicted output, the longest first (packing/order.py)
        """
        prompts, outputs = self.lengths("prompt_tokens"), self.lengths("predicted_tokens")
        if not len(prompts) or self.common is None:
            return None
        window = np.arange(len(prompts)) * self.num_rows // (len(prompts) * window_rows)
        order = np.lexsort((-outputs, window))
        return ExpectedRows(
            prompt_lens=prompts[order],
            common_tokens=len(self.common),
            output_tokens=self.mean_output,
            num_rows=round(len(prompts) * num_rows / self.num_rows),
        )

    def demand(self, num_rows: int, max_len: int, task: Task = GENERATE) -> Demand:
        """The demand of a job of `num_rows` such rows. Its max_tokens is the longest surveyed row only if all rows were
        surveyed. task: the one for which they were admitted."""
        prompts, caps = self.lengths("prompt_tokens"), self.lengths("max_new_tokens")
        if not len(prompts):
            return Demand(num_completions=0, prompt_tokens=1.0, output_tokens=1.0, max_tokens=2)
        longest_row = int((prompts + caps).max())
        return Demand(
            num_completions=round(len(prompts) * num_rows / self.num_rows),
            prompt_tokens=float(prompts.mean()),
            output_tokens=self.mean_output,
            equal_outputs=bool((self.lengths("predicted_tokens") == caps[0]).all()),
            max_tokens=longest_row if self.num_rows == num_rows else max_len,
            longest_prompt=int(prompts.max()),
            longest_row=longest_row,
            shares_prefix=self.shares_prefix,
            scores=task.reads.all_logits,
        )
