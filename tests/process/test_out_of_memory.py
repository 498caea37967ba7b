"""What a line says of a GPU whose memory ran out."""

from __future__ import annotations

import torch

from batchspec.console.text import ERROR_CHARS
from batchspec.job.load.memory import rank_out_of_memory
from batchspec.process.out_of_memory import OutOfMemoryGuard

OF_TORCH = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has a total capacity of 139.81 GiB of which 1.00 GiB is free. "
    "Process 4012 has 138.00 GiB memory in use. Including non-PyTorch memory, this process has 812.00 MiB memory in use. Of the "
    "allocated memory 100.00 MiB is allocated by PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def test_the_size_the_gpu_the_other_program_and_the_advice_fit_a_line() -> None:
    with OutOfMemoryGuard() as guard:
        raise torch.OutOfMemoryError(OF_TORCH)
    said = str(rank_out_of_memory(1, guard.message))
    assert said == (
        "rank 1: out of memory (CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has 139.81 GiB of which 1.00 GiB is free. "
        "Process 4012 has 138.00 GiB memory in use.); free memory or lower packing.memory_gb, max_num_seqs or "
        "max_num_batched_tokens, and run the same command again"
    )
    assert len(said) <= ERROR_CHARS
