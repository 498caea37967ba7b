"""Small pictures of the images of some rows of a job, for its report: made again from the input, as no output holds pixels.

The job is opened without its weights, and only the rows that are shown are admitted. Each image is compared with the digest in
the output, and decoded in a process with limits. What is not there any more, or not on this machine, has a line in place of a
picture.
"""

from __future__ import annotations

import importlib
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, replace

from batchspec.config.draft_schema import DraftConfig
from batchspec.config.schema import CacheConfig, RunConfig
from batchspec.config.typed import from_dict
from batchspec.data.dataset.shard_layout import ShardLayout
from batchspec.data.runstate.manifest import default_shard_rows
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.errors import BatchspecError
from batchspec.images.decode import Rgb
from batchspec.images.header import BadImage, pillow
from batchspec.images.prepared_images import PreparedImages
from batchspec.job.prepare import Job, open_job
from batchspec.job.report.texts import Shown
from batchspec.job.report.thumbnails import Picture, RowImages, Thumbnails
from batchspec.records import Completion, ImagePiece, Request

SIDE, QUALITY = 192, 75
"""Longest side in pixels, and quality of the JPEG."""
MOST_IMAGES, MOST_BYTES = 4, 512 << 10
"""Images of a row, and bytes of all pictures of a page."""
MOST_S = 60.0
"""Seconds after which no further image is awaited."""
_DIGEST = 32
"""Digits of each image in the column of digests."""


def thumbnails_of(output: OutputFolder, rows: Sequence[Shown], job: Job | None = None) -> Thumbnails:
    """The images of these rows of an output.

    job  the job of this output, if it is open; None: it is opened
    Raises nothing of what is wrong with the input, the model or an image: the page says it.
    """
    digests = {row.row_index: row.image_digest for row in rows if row.image_digest}
    if not digests:
        return Thumbnails()
    try:
        config = from_dict(output.manifest.config) if job is None else job.config
        if remote := next((where for where in _places(config) if "://" in where), None):
            return Thumbnails(note=f"Their images are not shown: {remote} is in a store, which a report does not read.")
        pillow()
        return Thumbnails(of_row=_made(job or _opened(config), digests))
    except (BatchspecError, OSError) as error:  # OSError: of the system, which starts no process, or of Pillow without JPEG
        return Thumbnails(note=f"Their images are not shown: {error}")


def _places(config: RunConfig) -> Iterator[str]:
    """Where the job's rows and images come from."""
    paths = config.input.path or ()
    yield from [paths] if isinstance(paths, str) else paths
    yield from filter(None, (config.input.image_root, config.input.from_job))


def _opened(config: RunConfig) -> Job:
    """The job without what admission of rows does not need: weights, a drafter, a device."""
    config.model.load_format, config.model.adapter = "dummy", None
    config.draft, config.cache, config.decode.deterministic = DraftConfig(name="none"), CacheConfig(), False
    return open_job(config, fetch=False, on_this_machine=False)


def _made(job: Job, digests: Mapping[int, str]) -> dict[int, RowImages]:
    """digests: of the rows, as in the output."""
    small, asked, found = _Small(), dict[int, list[ImagePiece | str]](), dict[int, RowImages]()
    for row, digest in digests.items():
        asked[row] = ["the input does not have its row any more"] * (len(digest) // _DIGEST)
    for row, entry in _admitted(job, sorted(digests)):
        written = [digests[row][at : at + _DIGEST] for at in range(0, len(digests[row]), _DIGEST)]
        asked[row] = [_asked(entry, number, digest) for number, digest in enumerate(written)]
        asked[row][:MOST_IMAGES] = [small.ask(one) for one in asked[row][:MOST_IMAGES]]
    for row, images in asked.items():
        shown = [one if isinstance(one, str) else small.take(one) for one in images[:MOST_IMAGES]]
        found[row] = RowImages(shown=shown, count=len(images))
    return found


def _admitted(job: Job, rows: Sequence[int]) -> Iterator[tuple[int, Request | Completion]]:
    """Of each of these rows of the input what admission makes of it now."""
    layout = ShardLayout.even(job.source.num_rows, default_shard_rows(job.source.num_rows))
    there = [row for row in rows if row < job.source.num_rows]
    wanted = {layout.shard_of(row) for row in there}
    for shard in job.source.shards(layout, set(range(layout.num_shards)) - wanted):
        for row in (row for row in there if layout.shard_of(row) == shard.index):
            yield row, next(iter(job.admission.admit(shard.only(row))))


def _asked(entry: Request | Completion, number: int, digest: str) -> ImagePiece | str:
    """The image of this number, from 0, of a row whose output has this digest of it; or why there is none."""
    if isinstance(entry, Completion):
        return "the row is refused now" if entry.error is None else f"{entry.error.code}: {entry.error.message}"
    if number < len(entry.images) and (piece := entry.images[number]).digest.hex() == digest:
        return piece
    return "it has changed since the row was computed"


@dataclass(slots=True)
class _Small:
    """Makes images small, in a process, and counts their time and bytes."""

    _prepared: PreparedImages | None = None
    _until: float = 0.0
    _num_bytes: int = 0

    def ask(self, piece: ImagePiece | str) -> ImagePiece | str:
        """The image at the size of a picture, which will be taken."""
        if isinstance(piece, str):
            return piece
        if self._prepared is None:
            self._prepared, self._until = PreparedImages(num=1), time.monotonic() + MOST_S
        scale = min(1.0, SIDE / max(piece.height, piece.width))
        height, width = (max(1, round(side * scale)) for side in (piece.height, piece.width))
        small = replace(piece, height=height, width=width)
        self._prepared.ask(piece.digest, [small])
        return small

    def take(self, piece: ImagePiece) -> Picture | str:
        """The picture of an image that was asked for, or why there is none. An image may be taken twice."""
        assert self._prepared is not None
        self._prepared.ask(piece.digest, [piece])  # nothing, unless it was taken before
        try:
            while (pixels := self._prepared.take(piece.digest)) is None:
                if (left := self._until - time.monotonic()) <= 0:
                    return f"left out, because decoding the images of this page took {MOST_S:g} s"
                self._prepared.check()
                wait(list(self._prepared.pending()), min(left, 1.0), FIRST_COMPLETED)
        except BadImage as error:
            return str(error).removeprefix("image 1 of 1: ")
        jpeg = _jpeg(pixels[0])
        self._num_bytes += len(jpeg)
        if self._num_bytes > MOST_BYTES:
            return f"left out, because the pictures of this page reached {MOST_BYTES >> 10} KiB"
        return Picture(jpeg=jpeg, height=piece.height, width=piece.width)


def _jpeg(pixels: Rgb) -> bytes:
    encoded = io.BytesIO()
    importlib.import_module("PIL.JpegImagePlugin")
    pillow().fromarray(pixels).save(encoded, "JPEG", quality=QUALITY)
    return encoded.getvalue()
