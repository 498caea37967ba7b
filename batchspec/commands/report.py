"""`batchspec report OUT`: write report.html of a job again, with what is committed so far."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from batchspec.console import terminal
from batchspec.console.arguments import ArgumentParser
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.job.report.page import write_report
from batchspec.job.thumbnails import thumbnails_of


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report. Raises OutputError if there is nothing to show, ConfigError without the extra `report`."""
    parser = ArgumentParser(prog="batchspec report", description="Write OUT/report.html: charts of a job.")
    parser.add_argument("out", metavar="OUT", help="the job's output.dir")
    args = parser.parse_args(argv)
    output = OutputFolder(args.out)
    write_report(output, partial(thumbnails_of, output))
    terminal.show_line(f"{output.path}/report.html")
    return 0
