"""The process that decodes and resizes images, with limits on CPU time and memory, because they are input. It imports no torch.

It reads pickles from its input and answers with pickles: first ((file descriptor, number of blocks) of the `SharedBlocks`, memory
in bytes, CPU seconds), then (encoded image or `PdfPage`, `Fit`, blocks). It writes the pixels to the blocks and answers None, or
code, message and `retryable` of a `BadImage`.
"""

from __future__ import annotations

import os
import pickle
import resource
import sys

from batchspec.images.decode import decode
from batchspec.images.header import BadImage
from batchspec.images.shared_blocks import BLOCK, SharedBlocks
from batchspec.process.child_process import limit_cpu
from batchspec.process.limited_process import OUT_OF_MEMORY
from batchspec.process.machine import lower_limit

NICE = 5
"""Added to its niceness: what launches work on the device goes first."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    read, write = sys.stdin.buffer, sys.stdout.buffer
    (fd, num_blocks), memory_bytes, cpu_s = pickle.load(read)
    memory = SharedBlocks(fd, num_blocks)
    lower_limit(resource.RLIMIT_AS, memory_bytes + num_blocks * BLOCK)
    while True:
        try:
            data, fit, blocks = pickle.load(read)
            limit_cpu(cpu_s)
            try:
                memory.write(blocks, decode(data, fit).reshape(-1))
                answer = None
            except BadImage as error:
                if isinstance(error.__cause__, MemoryError):
                    os._exit(OUT_OF_MEMORY)
                answer = (error.code, str(error), error.retryable)
            pickle.dump(answer, write)
            write.flush()
        except EOFError:
            return
        except MemoryError:
            os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
