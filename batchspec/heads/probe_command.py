"""`batchspec probe MODEL HEAD [PROMPTS]`: which of the model's hidden states a draft head was trained with, by acceptance."""

from __future__ import annotations

import argparse
import re

import torch

from batchspec.checkpoint.hub import find_model, resolve_model
from batchspec.console import terminal
from batchspec.console.arguments import ArgumentParser
from batchspec.draft.weights import open_head
from batchspec.errors import ConfigError
from batchspec.heads.probe import CONTEXTS, lines_of, probe
from batchspec.model.weights import judge_model


def main(argv: list[str]) -> int:
    """Print the findings. Raises ConfigError for wrong arguments, CheckpointError if MODEL or HEAD is none."""
    args = _parse(argv)
    contexts = _contexts(args.contexts)
    spec = judge_model(find_model(args.model, key="MODEL"))
    open_head(find_model(args.head, key="HEAD"), spec)
    folders = (resolve_model(args.model, key="MODEL"), resolve_model(args.head, key="HEAD"))
    found = probe(args.model, folders, args.prompts, num_rows=args.rows, num_tokens=args.tokens, contexts=contexts)
    terminal.show("\n".join(lines_of(found)))
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="batchspec probe", description=__doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or hub id")
    add("head", metavar="HEAD", help="folder or hub id of an EAGLE-3 head trained for MODEL")
    add("prompts", metavar="PROMPTS", nargs="?", default="pkg://demo", help="any input of a job; default: the demo's prompts")
    add("--rows", type=int, default=64, help="maximum number of prompts; default %(default)s")
    add("--tokens", type=int, default=64, help="tokens of each answer; default %(default)s")
    add("--contexts", help=f"also these prompt lengths; default {','.join(map(str, CONTEXTS))} on a GPU, else none")
    args = parser.parse_args(argv)
    for name, least in (("rows", 1), ("tokens", 4)):
        if (value := getattr(args, name)) < least:
            raise ConfigError(f"probe --{name} {value} must be at least {least}; 64 is usual")
    return args


def _contexts(given: str | None) -> tuple[int, ...]:
    """--contexts in tokens, ascending."""
    if given is None:
        return CONTEXTS if torch.cuda.is_available() else ()
    if not re.fullmatch(r"\d+(,\d+)*", given):
        raise ConfigError(f"probe --contexts {given} must be lengths in tokens, such as 1024,4096")
    return tuple(sorted(map(int, given.split(","))))
