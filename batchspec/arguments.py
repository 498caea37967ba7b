"""argparse for the commands; a mistake on the command line is an error of one line, like any other."""

from __future__ import annotations

import argparse
from typing import NoReturn

from batchspec.errors import ConfigError


class ArgumentParser(argparse.ArgumentParser):
    """`prog` is the command as a user types it, such as `batchspec stats`. A mistake raises ConfigError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{' '.join(message.split())}; `{self.prog} --help` lists what it takes")
