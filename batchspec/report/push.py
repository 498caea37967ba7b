"""Pushes the rows and the card of a job to the Hugging Face hub, as a dataset (`storage/hub_push.py` sends the files)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

from batchspec.config.schema import OutputConfig
from batchspec.errors import OutputError
from batchspec.report.card import dataset_card
from batchspec.report.stats import job_stats
from batchspec.runstate.footers import part_name
from batchspec.runstate.output_folder import OutputFolder
from batchspec.storage.hub_push import Pushed, PushedFile, check_push, push
from batchspec.storage.remote_files import Stamp

_PART = re.compile(r"data/part-\d{5,18}\.parquet")
_TAG = b"\n- batchspec\n"


def check_push_key(output: OutputConfig) -> None:
    """Check output.push_to_hub, if it is given. Raises ConfigError where no push could succeed, as `check_push`."""
    if output.push_to_hub is not None:
        check_push(output.push_to_hub)


def push_output(
    output: OutputFolder, repo: str, *, private: bool = True, incomplete: bool = False, overwrite: bool = False
) -> Pushed:
    """Push data/ and the card. The same call does nothing where the hub has all of it.

    incomplete  push the shards that are there
    overwrite   replace a dataset that no job of batchspec made, data/ and card
    Raises OutputError for a job that is not complete and for another dataset of that name; otherwise as `push`.
    """
    missing = output.missing()
    check_push(repo)
    if missing and not incomplete:
        raise OutputError(
            f"{output.path}: {len(missing):,} of {output.num_shards:,} shards are missing; run the job to its end, or push what "
            "is there with --incomplete"
        )
    names = [f"data/{part_name(index)}" for index in sorted(output.committed())]
    if not names:
        raise OutputError(f"{output.path} has no committed shard yet; run the job first")
    card = card_for(repo, output.card() if output.has_card() and not missing else _card(output))
    files = [PushedFile(name=name, content=content) for name, content in output.contents(names)]
    files.append(PushedFile(name="README.md", content=lambda: card))
    return push(
        repo, files, private=private, refusal=partial(_refusal, overwrite=overwrite),
        message=f"Push {len(names):,} files of a job",
        deletes=lambda name: _PART.fullmatch(name) is not None or (overwrite and name.startswith("data/")),
    )  # fmt: skip


def card_for(repo: str, card: bytes) -> bytes:
    """The card with the dataset's name in place of the folder's."""
    return card.replace(b'datasets.load_dataset("FOLDER", split="train")  # this folder; or polars.read_parquet("FOLDER/data")',
        f'datasets.load_dataset("{repo}", split="train")  # or polars.read_parquet("hf://datasets/{repo}/data/*.parquet")'.encode(),
    )  # fmt: skip


def _card(output: OutputFolder) -> bytes:
    return dataset_card(output.manifest, job_stats(output.path)).encode()


def _refusal(there: Mapping[str, Stamp], read: Callable[[str], bytes], *, overwrite: bool) -> str | None:
    """Why the dataset's present files must not be replaced: no job of batchspec made them. None: they may be."""
    if overwrite:
        return None
    other = next((name for name in there if name.startswith("data/") and not _PART.fullmatch(name)), None)
    if other is None and "README.md" in there and _TAG not in read("README.md"):
        other = "README.md"
    if other is None:
        return None
    return f"it holds {other}, which no job of batchspec made; give another name, or replace data/ and the card with --overwrite"
