"""The `batchspec` command and its subcommands; the module of a subcommand is imported only when it is called."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from batchspec.console import terminal
from batchspec.console.arguments import ArgumentParser, asks_for_help
from batchspec.console.text import MESSAGE_CHARS, one_line
from batchspec.errors import BatchspecError, ConfigError, Interrupted
from batchspec.process.bytecode import keep_bytecode
from batchspec.process.first_signals import in_batch_task
from batchspec.process.preflight import check_address_space, check_machine
from batchspec.process.program import begin_program, drop_unwritable, end_program
from batchspec.process.refusals import is_panic, refusal
from batchspec.process.signals import program, program_does
from batchspec.version import __version__

Found = TypeVar("Found")

COMMANDS = {
    "run": ("batchspec.run", "run a job: Hydra overrides, e.g. +job=demo"),
    "plan": (
        "batchspec.commands.plan",
        "what a run would do, without running it: the overrides of run, --full for every row, --card NAME, --json",
    ),
    "status": ("batchspec.commands.status", "OUT [--watch] [--json]: progress of a job over all of its runs"),
    "stats": ("batchspec.commands.stats", "OUT [--by COLUMN] [--json]: is the data good; speed and acceptance"),
    "verify": (
        "batchspec.commands.verify",
        "OUT: decode rows again without speculation and compare the tokens; --files: compare checksums",
    ),
    "bench": ("batchspec.bench.command", "OUT.jsonl NAME --shape SHAPE ...: measure speed with random weights"),
    "doctor": (
        "batchspec.commands.doctor",
        "[MODEL]: what this machine has and lacks, or a card (--card); --tune times MODEL's matrix products",
    ),
    "families": ("batchspec.commands.families", "the model families, and what a job of each can use"),
    "report": ("batchspec.commands.report", "OUT: write report.html again, charts of the job"),
    "inspect": ("batchspec.commands.inspect", "OUT ID [--sample N]: one request in full"),
    "export": ("batchspec.commands.export", "OUT --to FORMAT FILE, or --from-openai FILE.jsonl OUT.parquet"),
    "compact": ("batchspec.commands.compact", "OUT FOLDER: write the rows of a finished job as a few large Parquet files"),
    "push": ("batchspec.commands.push", "OUT ORG/NAME: the rows and the card of a finished job as a dataset of the hub"),
    "prompts": ("batchspec.heads.prompts", "--open MODEL | --from OUT FILE.parquet: let a chat model write prompts itself"),
    "submit": ("batchspec.commands.submit", "run a job as a Slurm array: prints sbatch, --go runs it; --to: other systems"),
    "probe": ("batchspec.heads.probe_command", "MODEL HEAD [PROMPTS]: which hidden states a draft head was trained with"),
    "train": (
        "batchspec.heads.command",
        "draft=eagle3|parallel model.path= input.path= output.dir=: train a draft head on a job's completions",
    ),
}


TAKE_KEYS = ("run", "plan", "submit", "train")
"""Commands that take keys: their help lists them, and is shown without the imports of the command."""


IMPORT_TORCH = ("plan", "verify", "bench", "doctor", "probe", "train")
"""Commands that import torch; `run` sees to its bytecode itself."""


def guarded(command: Callable[[], int], *, requeues: bool = False) -> int:
    """Run a command as the whole process and return its exit code: a signal is one line, a closed pipe none.

    requeues  a signal does not end the command in a task of Slurm, which requeues itself

    Signals are handled if `begin_program` was called; afterwards they do nothing.
    """
    try:
        if not (requeues and in_batch_task()):
            program_does("during start-up" if requeues else "")
        check_machine()
        code = command()
        terminal.flush()
        return code
    except KeyboardInterrupt:
        terminal.fail(program.line() if program.name else "interrupted; run the same command again")
        return Interrupted.exit_code
    except BrokenPipeError:
        drop_unwritable(sys.stdout)
        return 1
    except BatchspecError as error:
        drop_unwritable(sys.stdout)
        terminal.fail(error)
        return error.exit_code
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if (refused := refusal(error)) is not None:
            terminal.fail(refused)
            return refused.exit_code
        # the interpreter would print the traceback with unescaped data
        terminal.print_traceback(traceback.format_exc())
        return 1
    finally:
        program.end()
        drop_unwritable(sys.stderr)


def script(run: Callable[[Sequence[str]], Found], explanation: str | None) -> Found:
    """What the function of a script returns for the words of its command line. The scripts in jobs/examples use it.

    --help prints the explanation and ends the process; an error of batchspec, or Ctrl-C, ends it with one line.
    """
    words = sys.argv[1:]
    if "--help" in words:
        terminal.show(explanation or "")
        sys.exit()
    try:
        return run(words)
    except BatchspecError as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {one_line(error, MESSAGE_CHARS)}")
    except KeyboardInterrupt:
        sys.exit(f"{os.path.basename(sys.argv[0])}: interrupted")


def console() -> NoReturn:
    """The `batchspec` command."""
    begin_program()
    end_program(guarded(main, requeues=sys.argv[1:2] == ["run"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Pass the arguments after the command to its module; returns the exit code. With --json an error is on stdout too."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(arguments)
    except BatchspecError as error:
        (terminal.fail_json if "--json" in arguments else terminal.fail)(error)
        return error.exit_code


def _command(arguments: list[str]) -> int:
    if arguments and arguments[0] in TAKE_KEYS and asks_for_help(arguments[1:]):
        from batchspec.commands.reference import help_text

        terminal.show(help_text(arguments[0]))
        return 0
    if arguments and arguments[0] in COMMANDS:
        if arguments[0] in IMPORT_TORCH:
            check_address_space()
            keep_bytecode()
        module, _ = COMMANDS[arguments[0]]
        code: int = importlib.import_module(module).main(arguments[1:])
        return code
    if arguments and not arguments[0].startswith("-"):
        swapped = [name for name in COMMANDS if sorted(name) == sorted(arguments[0])]  # stauts is nearer to stats by difflib
        close = swapped or difflib.get_close_matches(arguments[0], COMMANDS, 1)
        hint = f"did you mean {close[0]}?" if close else f"commands: {', '.join(COMMANDS)}"
        raise ConfigError(f"{arguments[0]} is not a command; {hint}")
    lines = "\n".join(f"  {name:<9}{description}" for name, (_, description) in COMMANDS.items())
    parser = ArgumentParser(
        prog="batchspec",
        usage="batchspec COMMAND ...",
        description=f"Offline batch inference: Parquet in, Parquet out.\n\ncommands:\n{lines}",
        epilog="`batchspec run --help` lists the groups and keys of a job, `batchspec COMMAND --help` the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"batchspec {__version__}")
    parser.parse_args(arguments)
    parser.print_help()
    return 0


if __name__ == "__main__":
    console()
