"""`batchspec push OUT ORG/NAME`: the rows and the card of a finished job as a dataset of the Hugging Face hub.

The dataset is made if it is not there, private unless --public is given. All files come in one commit. After a kill or a failure
the same command goes on: what the hub has is not sent again. A push replaces only what the same job pushed and deletes nothing; a
dataset with other data is refused, and --overwrite replaces it.
The token is HF_TOKEN, or that of `hf auth login`. `output.push_to_hub=ORG/NAME` does the same at the end of a job.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from batchspec.console import terminal
from batchspec.console.arguments import ArgumentParser
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.job.report.push import push_output


def main(argv: Sequence[str] | None = None) -> int:
    """Push and print where it is. Raises as `push_output`."""
    parser = ArgumentParser(prog="batchspec push", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", help="the output.dir of a finished job")
    parser.add_argument("repo", metavar="ORG/NAME", help="the dataset")
    parser.add_argument("--public", action="store_true", help="make a public dataset, or push to one")
    parser.add_argument("--incomplete", action="store_true", help="push the shards of an unfinished job that are there")
    parser.add_argument("--overwrite", action="store_true", help="replace data/ and the card whatever they hold")
    args = parser.parse_args(argv)
    pushed = push_output(
        OutputFolder(args.out), args.repo, private=not args.public, incomplete=args.incomplete, overwrite=args.overwrite
    )
    terminal.show_line(pushed.line())
    return 0
