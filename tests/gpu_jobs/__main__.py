"""python -m tests.gpu_jobs FIRST END [--seconds 400] [--workers 6] [--ranks 2]

Runs random jobs FIRST .. END - 1 and compares them with reference runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several workers share the cores

SHOWN = 2500
"""Characters of a failure that are printed."""


def main() -> int:
    if sys.argv[1:2] == ["--work"]:
        from tests.gpu_jobs.workers import work

        work(Path(sys.argv[2]), gpu=sys.argv[3] == "cuda", ranks=int(sys.argv[4]))
        return 0
    from tests.gpu_jobs.cases import GROUP

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int)
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--workers", type=int, help="processes that share the GPU; on a CPU, and of ranks, one")
    parser.add_argument("--ranks", type=int, default=1, help="1, 2, 4 or 8 GPUs, or processes on a CPU, compute each case")
    parser.add_argument("--each", type=int, default=GROUP, help=f"cases to run of each group of {GROUP}; fewer run more models")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "batchspec-gpu-jobs", help="models and logs")
    parser.add_argument("--report", type=Path, help="file that gets each failure in full")
    args = parser.parse_args()
    import torch

    from tests.gpu_jobs.workers import hunt

    gpu = torch.cuda.is_available()
    many = gpu and args.ranks == 1  # ranks wait for each other on the GPUs, which programs that share them make very slow
    workers = args.workers or (min(8, max(1, (os.cpu_count() or 2) // 2)) if many else 1)
    cases = [case for case in range(args.first, args.end) if case % GROUP < args.each]
    with args.report.open("w") if args.report else nullcontext() as report:

        def show(text: str) -> None:
            print(text if len(text) < SHOWN else f"{text[:SHOWN]} ...", flush=True)
            if report is not None:
                print(text, file=report, flush=True)

        summary = hunt(cases, seconds=args.seconds, workers=workers, folder=args.folder, gpu=gpu, ranks=args.ranks, show=show)
    print(summary)
    return 1 if summary.failures or not summary.rows else 0


if __name__ == "__main__":
    sys.exit(main())
