"""argparse for the commands; a wrong argument is a ConfigError of one line, like any other error."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from batchspec.errors import ConfigError


class ArgumentParser(argparse.ArgumentParser):
    """`prog` is the command as a user types it, such as `batchspec stats`. Wrong arguments raise ConfigError."""

    def error(self, message: str) -> NoReturn:
        advice = ""
        if lacks := re.fullmatch(r"argument (--[\w-]+): expected (one|at least one) argument", message):
            advice = f" (a value that begins with - follows =, as in '{lacks[1]}=-...')"
        raise ConfigError(f"{' '.join(message.split())}{advice}; `{self.prog} --help` lists its arguments")

    def refuse(self, args: argparse.Namespace, names: Sequence[str], why: str) -> None:
        """Raises ConfigError if one of these options was given although the other arguments leave it without effect.

        names  options without their dashes
        why    what follows the option and its value in the message: "is read only with --open"
        """
        for name in names:
            if (value := getattr(args, name)) != self.get_default(name):
                shown = "" if value is True else f" {','.join(value) if isinstance(value, list) else value}"
                self.error(f"--{name.replace('_', '-')}{shown} {why}; remove it")


def asks_for_help(words: Iterable[str]) -> bool:
    """Whether the arguments of a command ask for its help."""
    return bool({"-h", "--help"} & set(words))
