"""Pushes the rows and the card of a job to the Hugging Face hub, as a dataset (`data/storage/hub_push.py` sends the files)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from functools import partial

from batchspec.config.schema import OutputConfig
from batchspec.console.text import counted, for_shell, for_terminal
from batchspec.data.runstate.footers import DamagedFooter, part_name, read_footer
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.storage.hub_push import Present, Pushed, PushedFile, check_push, check_target, push
from batchspec.data.storage.store import Tail
from batchspec.errors import OutputError
from batchspec.job.report.card import dataset_card
from batchspec.job.report.stats import job_stats

_PART = re.compile(r"data/part-(\d{5,18})\.parquet")
_TAG = b"\n- batchspec\n"
_CARD_LINES = (r"^# (Completions by .+)$", r"^\| Completions \| (.+) \|$")
"""Of a job's card: the model, and the number of rows by status."""
_REPLACES = "replaces all of data/ and the card; or give another name"


def check_push_key(output: OutputConfig) -> None:
    """Check output.push_to_hub, if it is given. Raises ConfigError where no push could succeed, as `check_push`."""
    if output.push_to_hub is not None:
        check_push(output.push_to_hub)


def check_target_key(output: OutputConfig, job: str) -> None:
    """Ask the hub whether output.push_to_hub, if it is given, may be replaced by the job of this id.

    job  empty for a job that has no id yet: no dataset is its own
    Raises as `push_output` would at the end of the job.
    """
    repo = output.push_to_hub
    if repo is None:
        return
    refusal = None if output.push_overwrite else partial(_refusal, job=job, instead=f"output.push_overwrite=true {_REPLACES}")
    check_target(repo, private=output.push_private, refusal=refusal)


def push_output(
    output: OutputFolder, repo: str, *, private: bool = True, incomplete: bool = False, overwrite: bool = False
) -> Pushed:
    """Push data/ and the card. The same call does nothing where the hub has all of it.

    incomplete  push the shards that are there
    overwrite   replace whatever the dataset holds in data/, and its card
    Raises OutputError for a job that is not complete, and without `overwrite` for a dataset that holds other data than this
    job's; otherwise as `push`.
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
    instead = f"batchspec push with --overwrite {_REPLACES}"
    refusal = partial(_refusal, job=output.manifest.job, names=names, instead=instead)
    return push(
        repo, files, private=private, refusal=None if overwrite else refusal,
        message=f"Push {len(names):,} files of a job",
        deletes=lambda name: name.startswith("data/"),
    )


def push_command(out: str, repo: str, *options: str, private: bool) -> str:
    """The command that pushes the job in this folder."""
    return " ".join(["batchspec push", for_shell(out), *map(shlex.quote, (repo, *options)), *["--public"] * (not private)])


def card_for(repo: str, card: bytes) -> bytes:
    """The card with the dataset's name in place of the folder's."""
    return card.replace(b'load_dataset("FOLDER"', f'load_dataset("{repo}"'.encode()).replace(
        b'split="train")  # this folder: its', b'split="train")  # its').replace(
        b'polars.read_parquet("FOLDER/data")', f'polars.read_parquet("hf://datasets/{repo}/data/*.parquet")'.encode()
    )


def _card(output: OutputFolder) -> bytes:
    return dataset_card(output.manifest, job_stats(output.path)).encode()


def _refusal(present: Present, *, job: str, instead: str, names: Collection[str] | None = None) -> str | None:
    """Why the dataset's present files must not be replaced; None: each of them is a file that the job of this id made, or it
    holds none.

    names    the files of data/ that the push sends; None: they are not known before the job has run
    instead  what replaces them all the same
    """
    card = present.read("README.md", None) if "README.md" in present.files else b""
    data = [name for name in present.files if name.startswith("data/")]
    other = next((name for name in data if not _PART.fullmatch(name)), None)
    if other is None and card and _TAG not in card:
        other = "README.md"
    if other is not None:
        return f"it holds {other}, which no job of batchspec made; {instead}"
    for name in _ends(data):
        found = _job_of(name, present)
        if not found:
            return f"it holds {name}, which names no job and may be of another one{_described(card)}; {instead}"
        if found != job:
            own = f"this one is {job[:8]}" if job else "this one is new"
            return f"it holds the rows of another job, {for_terminal(found[:8])}{_described(card)}; {own}; {instead}"
    lost = [name for name in data if names is not None and name not in names]
    if lost:
        return f"it holds {counted(len(lost), 'file')} of this job that this folder lacks, such as {lost[0]}; {instead}"
    return None


def _ends(names: Sequence[str]) -> list[str]:
    """The first and the last of the files: a push replaces all of them in one commit, so these name the job of all."""
    ordered = sorted(names, key=lambda name: (len(name), name))
    return [*dict.fromkeys([*ordered[:1], *ordered[-1:]])]


def _job_of(name: str, present: Present) -> str | None:
    """The id of the job in the footer of a file; None where there is none."""
    try:
        file = read_footer(lambda count: Tail(present.read(name, count), ""))
    except DamagedFooter:
        return None
    return None if file is None else file.job


def _described(card: bytes) -> str:
    """What the card of the dataset says of it, for a message."""
    text = card.decode("utf-8", "replace")
    said = [found[1] for line in _CARD_LINES if (found := re.search(line, text, re.MULTILINE))]
    return f" ({for_terminal(': '.join(said))[:200]})" if said else ""
