"""output.overwrite=true: which process deletes the old job, and how a run notices that its own job was deleted.

_batchspec/manifest.json          every job has a new id `job`; a run that does not find its own id here publishes nothing
_batchspec/overwrite/<key>.json   a process of the command <key> has been elected to delete the old job

A job is deleted between two writes of the manifest. The first says `ready: false`: from then on no run of the old job commits.
Then the old job's files are deleted. The second write begins the new job. If the process dies in between, only another run with
output.overwrite=true can use the folder.

Tasks of an array, processes of one node and a requeued task are one command: the first of them deletes the old job, the others
join the new one.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
import uuid
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from batchspec.data.runstate.claims import Claims
from batchspec.data.runstate.manifest import MANIFEST, Manifest
from batchspec.data.storage.store import Store
from batchspec.errors import OutputError, StorageError

CREW = "BATCHSPEC_CREW"
"""Environment variable with the same value in all processes of a command: those that one run starts, and all tasks of a job of
Kubernetes or SkyPilot, whose files in jobs/manifests set it."""
FOLDER = "_batchspec/overwrite"
WAIT_S = 150.0
"""If another process of the command takes longer than this to delete the old job, it counts as dead."""
POLL_S = 0.2
READS, AGAIN_S = 3, 0.05
"""Readings of a manifest before it counts as damaged, and the seconds between them."""


class Begun(Protocol):
    """A job, or a retry of one."""

    @property
    def began(self) -> tuple[str, ...]:
        """Names of the command that began it."""


@dataclass(frozen=True, slots=True)
class Command:
    """The command that this process belongs to."""

    key: str
    """The same in every process of the command; empty if this process is the only one."""
    names: tuple[str, ...]
    """Names of the command that a later start of the same task has too."""

    def began(self, found: Begun) -> bool:
        """Whether a process of this command began the job, or the retry."""
        return bool(self.key) and self.key in found.began

    def new_job(self) -> str:
        return (uuid.uuid5(uuid.NAMESPACE_OID, self.key) if self.key else uuid.uuid4()).hex


def this_command(env: Mapping[str, str] | None = None) -> Command:
    """The command, from environment variables. A single Slurm task may run several commands in its allocation; only a restart of
    the task is known to run the same command again.
    """
    env = os.environ if env is None else env
    crew, job = env.get(CREW, ""), env.get("SLURM_ARRAY_JOB_ID") or env.get("SLURM_JOB_ID", "")
    step = f".{env.get('SLURM_STEP_ID')}" if int(env.get("SLURM_STEP_NUM_TASKS") or 1) > 1 else ""
    slurm = f"slurm {env.get('SLURM_CLUSTER_NAME', '')} {job}{step}" if job else ""
    shared = "SLURM_ARRAY_JOB_ID" in env or step or int(env.get("SLURM_RESTART_COUNT") or 0) > 0
    return Command(slurm if slurm and shared else crew, tuple(name for name in (crew, slurm) if name))


def read_manifest(store: Store) -> Manifest | None:
    """The folder's manifest; None if there is none. It is read up to READS times if it is damaged or unreadable.

    Raises OutputError if it is damaged, StorageError if it cannot be read.
    """
    for turn in itertools.count(1):
        try:
            return Manifest.from_json(store.read(MANIFEST), f"{store.where}/{MANIFEST}")
        except StorageError:
            if not store.exists(MANIFEST):
                return None
            if turn == READS:
                raise
        except OutputError:
            if turn == READS:
                raise
        time.sleep(AGAIN_S)
    raise AssertionError


def present(store: Store) -> Manifest | None:
    """As `read_manifest`, but None for a damaged manifest too."""
    try:
        return read_manifest(store)
    except OutputError:
        return None


def settled(store: Store, command: Command) -> Manifest | None:
    """`present`, after waiting for another process of the command that is deleting the old job."""
    until = time.monotonic() + WAIT_S
    while (found := present(store)) is not None and not found.ready and command.began(found) and time.monotonic() < until:
        time.sleep(POLL_S)
    return found


def elected(store: Store, command: Command) -> bool:
    """Whether this process deletes the old job; False if another process of the command has begun the new one."""
    if not command.key or store.put_if_absent(f"{FOLDER}/{hashlib.sha256(command.key.encode()).hexdigest()}.json", b"{}"):
        return True
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        found = present(store)
        if found is not None and found.ready and command.began(found):
            return False
        time.sleep(POLL_S)
    return True


def refuse_living(where: str, claims: Claims, shards: Container[int]) -> None:
    """Raise OutputError if a claim on these shards does not look stale at a single reading; StorageError."""
    found = sorted(claims.living(shards), key=lambda one: one[2])
    if not found:
        return
    shard, claim, age_s = found[0]
    others = len({str(other.get("owner")) for _, other, _ in found}) - 1
    raise OutputError(
        f"{where} is not deleted: {_run(claim)} works on it and renewed its claim on shard {shard} {age_s:.0f} s ago"
        f"{f', and {others} more runs do' if others else ''}; end it and run this again, or use another output.dir (a run that "
        f"died counts as gone after {claims.stale_s:.0f} s)"
    )


def _run(claim: Mapping[str, Any]) -> str:
    task = f", Slurm task {claim['task']}" if claim.get("task") else ""
    said = f"run {str(claim.get('owner'))[:8]} on {claim.get('host', '?')} (process {claim.get('pid', '?')}{task})"
    return " ".join(said.split())


def check_own(store: Store, job: str) -> None:
    """Read the manifest; raise OutputError if two readings show that the folder no longer holds this job; StorageError."""
    for again in (False, True):
        try:
            found = read_manifest(store)
        except OutputError as error:
            raise StorageError(str(error)) from error
        if found is not None and found.job == job:
            return
        if not again:
            time.sleep(AGAIN_S)
            continue
        raise OutputError(
            f"the job in {store.where} was {'deleted' if found is None else 'overwritten'} while this run worked on it; the run "
            "ends and publishes nothing more; take another output.dir if both jobs are wanted"
        )
