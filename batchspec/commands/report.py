"""`batchspec report OUT`: write report.html of a job anew, as far as it is."""

from __future__ import annotations

from collections.abc import Sequence

from batchspec import terminal
from batchspec.arguments import ArgumentParser
from batchspec.report.page import write_report
from batchspec.runstate.output_folder import OutputFolder


def main(argv: Sequence[str] | None = None) -> int:
    """Raises OutputError where there is nothing to show, ConfigError without the extra `report`."""
    parser = ArgumentParser(prog="batchspec report", description="Write OUT/report.html: a job in pictures.")
    parser.add_argument("out", metavar="OUT", help="the job's output.dir")
    parser.add_argument("--by", metavar="COLUMN", help="acceptance by the values of this output column too")
    args = parser.parse_args(argv)
    output = OutputFolder(args.out)
    write_report(output, args.by)
    terminal.show_line(f"{output.path}/report.html")
    return 0
