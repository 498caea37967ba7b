"""What images take besides the prefill of their tokens: seconds of the device that encodes them, and of processes that decode and
resize them meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchspec.images.prepared_images import num_processes
from batchspec.model.vision.spec import VisionSpec
from batchspec.packing.rates import Rates
from batchspec.packing.survey import Survey

PREPARE_S = 1.5e-8
"""Seconds of a process for a pixel of an encoded image: 11.5 ms to decode and 44 ms to resize a JPEG page of 1654 x 2339 with
Pillow 13 on one core (`python -m batchspec.bench.image_preparation`). PNG takes up to twice as long."""

ENCODER_SLOWDOWN = 1.6
"""Time of encoding relative to that of its operations at the rate of large products: pages of 1216 x 1728 with the encoder of
Qwen3-VL-8B, where attention takes over half of it (H200, 360 TFLOP/s, 2026-11)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTimes:
    """Of all images of a job; zero without images."""

    encoder_s: float = 0.0
    """Seconds of the device."""
    worker_s: float = 0.0
    """Seconds of all processes together."""
    num_processes: int = 1

    def with_rest(self, device_s: float) -> float:
        """Seconds of the whole job, whose other work takes the device so long: processes work meanwhile."""
        return max(device_s + self.encoder_s, self.worker_s / self.num_processes)


NO_IMAGES = ImageTimes()


def image_times(
    vision: VisionSpec | None, survey: Survey, num_rows: int, rates: Rates, workers: int = 1, ranks: int = 1
) -> ImageTimes:
    """The times of `num_rows` rows like those of the survey. An image counts once for all samples of its row, and for each of
    several rows that have it. workers: copies of the model on the machine, which share its CPUs; ranks: of a copy, which
    divide its images between them."""
    if vision is None or not survey.num_rows:
        return NO_IMAGES
    pixels, counts = np.unique(np.frombuffer(survey.image_pixels, np.int32), return_counts=True)
    flop = sum(count * vision.flop(int(size) // vision.processor.patch**2) for size, count in zip(pixels, counts, strict=True))
    scale = num_rows / survey.num_rows
    return ImageTimes(
        encoder_s=ENCODER_SLOWDOWN * scale * float(flop) / rates.full_flop_s / ranks,
        worker_s=scale * PREPARE_S * survey.encoded_pixels,
        num_processes=num_processes(workers),
    )
