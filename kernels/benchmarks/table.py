"""The benchmarks of all kernels, by name."""

from __future__ import annotations

from batchspec.kernels.benchmarks.attention import ATTENTION
from batchspec.kernels.benchmarks.experts import EXPERTS
from batchspec.kernels.benchmarks.gated_delta import GATED_DELTA
from batchspec.kernels.benchmarks.latents import LATENTS
from batchspec.kernels.benchmarks.mamba2 import MAMBA2
from batchspec.kernels.benchmarks.products import PRODUCTS
from batchspec.kernels.benchmarks.routing import ROUTING
from batchspec.kernels.benchmarks.sampling import SAMPLING
from batchspec.kernels.benchmarks.vision import VISION

TABLE = {
    benchmark.name: benchmark
    for benchmark in (*SAMPLING, *PRODUCTS, *EXPERTS, *ROUTING, *ATTENTION, *LATENTS, *GATED_DELTA, *MAMBA2, *VISION)
}
