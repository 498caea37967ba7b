"""`python -m batchspec.commands.ranks`: cluster.tensor_parallel=auto, decided in a process of its own before a run starts.

It reads the configuration from standard input and prints the number of GPUs for each copy of the model. The parent of a run's
processes does not load torch's CUDA; this process ends, and leaves the GPUs free.
"""

from __future__ import annotations

import sys

from batchspec.commands.plan import layouts_of
from batchspec.config.compose import reported
from batchspec.config.typed import from_json
from batchspec.packing.cost import device_rates
from batchspec.packing.replicas import best
from batchspec.prepare import open_job, survey_first
from batchspec.terminal import show_line


def main(text: str, num_gpus: int) -> int:
    """Print the number; returns the exit code."""

    def choose() -> None:
        job = open_job(from_json(text), fetch=False)
        found = layouts_of(job, survey_first(job), device_rates(job.device, job.dtype, fp8=job.spec.formats.quantises), num_gpus)
        show_line(best(found).ranks if found else 1)  # with too few GPUs for its workers the run says so itself

    return reported(choose)


if __name__ == "__main__":
    sys.exit(main(sys.stdin.read(), int(sys.argv[1])))
