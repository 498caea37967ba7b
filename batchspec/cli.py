"""The `batchspec` command: one line a subcommand; each is imported when it is called."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from batchspec import __version__, terminal
from batchspec.arguments import ArgumentParser
from batchspec.errors import BatchspecError, ConfigError, Interrupted

COMMANDS = {
    "run": ("batchspec.run", "run a job: Hydra overrides, e.g. +job=demo"),
    "plan": ("batchspec.commands.plan", "what a run would do, without running it: the overrides of run, --full for every row"),
    "status": ("batchspec.commands.status", "OUT [--watch] [--json]: how far a job is, over all of its runs"),
    "stats": ("batchspec.commands.stats", "OUT [--by COLUMN] [--json]: acceptance and speed of a finished job"),
    "verify": (
        "batchspec.commands.verify",
        "OUT: rows again without speculation, the first difference; --files: checksums",
    ),
    "bench": ("batchspec.commands.bench", "OUT.jsonl NAME --shape SHAPE ...: measure speed with random weights"),
    "doctor": (
        "batchspec.commands.doctor",
        "[MODEL]: what this machine has and lacks; --tune MODEL times its products, --probe tries a head",
    ),
    "report": ("batchspec.commands.report", "OUT [--by COLUMN]: write report.html anew, the job in pictures"),
    "inspect": ("batchspec.commands.inspect", "OUT ID [--sample N]: one request in full"),
    "export": ("batchspec.commands.export", "OUT --to FORMAT FILE, or --from-openai FILE.jsonl OUT.parquet"),
    "compact": ("batchspec.commands.compact", "OUT FOLDER: the rows of a finished job in few large Parquet files"),
    "prompts": ("batchspec.commands.prompts", "--open MODEL | --from OUT FILE.parquet: prompts that a chat model writes itself"),
    "submit": ("batchspec.commands.submit", "a job as a Slurm array: prints the sbatch line, --go runs it; the overrides of run"),
    "train": (
        "batchspec.commands.train",
        "draft=eagle3|parallel model.path= input.path= output.dir=: a head from a job's completions",
    ),
}


TAKE_KEYS = ("run", "plan", "submit", "train")
"""Commands that take keys: their help lists them, and is shown without the imports of the command."""


def guarded(command: Callable[[], int]) -> int:
    """The exit code of a whole process: one line at Ctrl-C before a job has begun, silence when the reader of a pipe leaves."""
    try:
        return command()
    except KeyboardInterrupt:
        terminal.fail("interrupted before anything was computed; run the same command again")
        return Interrupted.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains once more as it ends
        return 1
    except Exception:  # what the interpreter would print holds data as it is
        terminal.print_traceback(traceback.format_exc())
        return 1


def console() -> int:
    """The `batchspec` command."""
    return guarded(main)


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the words behind the command to its module; returns the exit code."""
    try:
        return _command(list(sys.argv[1:] if argv is None else argv))
    except BatchspecError as error:
        terminal.fail(error)
        return error.exit_code


def _command(words: list[str]) -> int:
    if words and words[0] in TAKE_KEYS:
        from batchspec.commands.reference import asks_for_help, help_text

        if asks_for_help(words[1:]):
            terminal.show(help_text(words[0]))
            return 0
    if words and words[0] in COMMANDS:
        module, _ = COMMANDS[words[0]]
        code: int = importlib.import_module(module).main(words[1:])
        return code
    if words and not words[0].startswith("-"):
        close = difflib.get_close_matches(words[0], COMMANDS, 1)
        hint = f"did you mean {close[0]}?" if close else f"commands: {', '.join(COMMANDS)}"
        raise ConfigError(f"{words[0]} is no command; {hint}")
    lines = "\n".join(f"  {name:<8}{said}" for name, (_, said) in COMMANDS.items())
    parser = ArgumentParser(
        prog="batchspec",
        usage="batchspec COMMAND ...",
        description=f"Offline batch inference: Parquet in, Parquet out.\n\ncommands:\n{lines}",
        epilog="`batchspec run --help` lists the groups and keys of a job, `batchspec COMMAND --help` the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"batchspec {__version__}")
    parser.parse_args(words)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(console())
