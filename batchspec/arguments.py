"""argparse for the commands; a wrong argument is a ConfigError of one line, like any other error."""

from __future__ import annotations

import argparse
from typing import NoReturn

from batchspec.errors import ConfigError


class ArgumentParser(argparse.ArgumentParser):
    """`prog` is the command as a user types it, such as `batchspec stats`. Wrong arguments raise ConfigError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{' '.join(message.split())}; `{self.prog} --help` lists its arguments")
