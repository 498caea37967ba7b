"""`python -m batchspec.commands.ranks`: resolves cluster.tensor_parallel=auto in its own process before a run starts.

It reads the configuration from standard input and prints the number of GPUs for each copy of the model. The parent of a run's
processes must not use CUDA; this process does, and leaves the GPUs free when it ends.
"""

from __future__ import annotations

import sys

from batchspec.commands.planning import layouts_of
from batchspec.config.compose import reported
from batchspec.config.typed import from_json
from batchspec.console.terminal import show_line
from batchspec.job.prepare import open_job, survey_first
from batchspec.packing.rates import device_rates
from batchspec.packing.replicas import best


def main(text: str, num_gpus: int) -> int:
    """Print the number; returns the exit code."""

    def choose() -> None:
        config = from_json(text)
        job = open_job(config, fetch=False)
        found = layouts_of(job, survey_first(job), device_rates(job.device, job.dtype, fp8=job.spec.formats.quantises), num_gpus)
        show_line(best(found).ranks if found else 1)  # with too few GPUs for its workers the run says so itself

    return reported(choose)


if __name__ == "__main__":
    sys.exit(main(sys.stdin.read(), int(sys.argv[1])))
