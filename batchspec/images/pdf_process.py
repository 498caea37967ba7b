"""The process that lists the pages of PDFs, with limits on CPU time and memory, because they are input. It imports no torch.

It reads pickles from its input and answers with pickles: first (None, memory in bytes, CPU seconds), then the path of each PDF.
The answer is the sizes of its pages (`sizes_of`), text that says why it cannot be read, or the OSError with
which it could not be opened.
"""

from __future__ import annotations

import os
import pickle
import resource
import sys

import numpy as np
from numpy.typing import NDArray

from batchspec.images.pdf import BadPdf, sizes_of
from batchspec.process.child_process import limit_cpu
from batchspec.process.limited_process import OUT_OF_MEMORY
from batchspec.process.machine import lower_limit


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    read, write = sys.stdin.buffer, sys.stdout.buffer
    _, memory_bytes, cpu_s = pickle.load(read)
    lower_limit(resource.RLIMIT_AS, memory_bytes)
    while True:
        try:
            path = pickle.load(read)
            limit_cpu(cpu_s)
            pickle.dump(_answer(path), write)
            write.flush()
        except EOFError:
            return
        except MemoryError:
            os._exit(OUT_OF_MEMORY)


def _answer(path: str) -> NDArray[np.float32] | str | OSError:
    try:
        return sizes_of(path)
    except BadPdf as error:
        if isinstance(error.__cause__, MemoryError):
            os._exit(OUT_OF_MEMORY)
        return error.__cause__ if isinstance(error.__cause__, OSError) else str(error)


if __name__ == "__main__":
    main()
