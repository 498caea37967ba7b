"""`python -m batchspec.kernels.benchmarks NAME...`: times kernels on a GPU.

    python -m batchspec.kernels.benchmarks argmax verify_attention
    python -m batchspec.kernels.benchmarks experts --only 'model=gpt-oss-20b tokens=256' --sweep
    python -m batchspec.kernels.benchmarks reduce --ranks 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from batchspec.kernels.benchmarks.exchange import NAMES, start_ranks, time_exchanges
from batchspec.kernels.benchmarks.runner import Runner
from batchspec.kernels.benchmarks.table import TABLE
from batchspec.kernels.common.graph_clock import GraphClock


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m batchspec.kernels.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(TABLE)}; by default all")
    parser.add_argument("--only", default="", metavar="WORDS", help="shapes that have all these words, as the table prints them")
    parser.add_argument("--sweep", action="store_true", help="time other tiles too, and print the fastest")
    parser.add_argument("--ranks", type=int, help=f"time exchanges between so many GPUs: {', '.join(NAMES)}")
    args = parser.parse_args(argv)
    known = NAMES if args.ranks else tuple(TABLE)
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no benchmark {', '.join(unknown)}; choose from {', '.join(known)}")
    if args.ranks and args.sweep:
        parser.error("--ranks times exchanges, to which --sweep does not apply")
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if torch.cuda.device_count() < (args.ranks or 1):
        print(f"this machine has {torch.cuda.device_count()} GPUs; {args.ranks or 1} needed")
        return 2
    if args.ranks:
        start_ranks(args.ranks, time_exchanges, args.names, args.only)
        return 0
    device = torch.device("cuda")
    runner = Runner(GraphClock(device), device, sweep=args.sweep)
    runner.run_all([TABLE[name] for name in args.names or TABLE], args.only)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
