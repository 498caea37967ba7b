"""Which run works on which shard, so that tasks of an array do not compute the same twice. Claims save work; commits decide.

_batchspec/claims/00042.json   {"owner": attempt, "counter": n, "host", "space", "pid", "started", "task", "restart"}

A run beats: it writes its claims again with a higher counter. A claim that has not changed for `stale_s` seconds of the
observer's own clock has no owner any more, and no clock of another machine is trusted for that. Sooner, where the observer can
tell: its process is gone from this machine (other containers on it have process numbers of their own, and tell nothing), or it
belongs to an earlier start of this very task of the batch system. A run that was stopped and comes back after its claim was taken
loses at the commit, at worst; nothing is written twice.

A run that ends in any way of its own gives its claims back (owner ""). One that is found without its owner tells of a death.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Container, Mapping, Set
from pathlib import Path
from typing import Any

from batchspec.errors import StorageError
from batchspec.storage.store import Store, for_each

FOLDER = "_batchspec/claims"
STALE_S = 150.0
"""More than twice as long as an NFS client may show old attributes (60 s), and five beats."""
REMOTE_STALE_S = 300.0
"""On S3 a beat may be tried again for two minutes, and the one before it for as long."""
BEAT_S = 30.0
NAME = re.compile(r"[0-9]{5,18}\.json")
LIKE: dict[str, Any] = {
    "owner": "", "counter": 0, "host": "", "space": "", "pid": 0, "started": "", "task": "", "restart": 0,
}  # fmt: skip
"""What a claim says, and of which type."""


class Claims:
    """The claims of one job as one run sees them."""

    def __init__(
        self, store: Store, attempt: str, *, stale_s: float = STALE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self.attempt, self.stale_s, self._clock = store, attempt, stale_s, clock
        self.died: dict[int, str] = {}
        """Shards of ours whose last owner died with them, and its attempt."""
        self.inherited = False
        """A shard of ours had an owner before, whose rows may be in the journal by now."""
        self._held: dict[int, int] = {}
        self._seen: dict[int, tuple[tuple[str, int], float]] = {}
        self._beaten_at = clock()
        self._who = whoami()

    def take(self, shard: int) -> bool:
        """Claim a shard: True where it is ours now. Raises StorageError."""
        if shard in self._held:
            return True
        name = _name(shard)
        if self._store.put_if_absent(name, self._claim(0)):
            self._held[shard] = 0
            return True
        before = self._read(name)
        if not self._is_stale(shard, before):
            return False
        # Two runs may take over at once: the one that stands there afterwards has it, the other one sees that at its next beat.
        self._store.put(name, self._claim(0))
        if self._read(name).get("owner") != self.attempt:
            return False
        self._held[shard] = 0
        self.inherited = True
        if re.fullmatch(r"\w{1,64}", before.get("owner", "")):
            self.died[shard] = before["owner"]
        return True

    @property
    def own(self) -> list[int]:
        """Shards that this run works on."""
        return sorted(self._held)

    def release(self) -> None:
        """The run ends: what it holds is free at once, for anyone. Raises StorageError."""
        for shard in self.own:
            del self._held[shard]
            if self._read(_name(shard)).get("owner") == self.attempt:
                self._store.put(_name(shard), json.dumps({"owner": ""}).encode())

    def held(self, shards: Set[int]) -> set[int]:
        """Of these shards those that other runs work on, as far as anyone can tell. Raises StorageError."""
        claims = self.owners(shards - self._held.keys())
        return {shard for shard, claim in claims.items() if not self._is_stale(shard, claim)}

    def living(self, shards: Container[int]) -> list[tuple[int, dict[str, Any], float]]:
        """Claims on these shards whose owners live as far as one look can tell, each with the seconds since it was written, by
        the store's own clock. Raises StorageError.
        """
        claims = [(n, claim) for n, claim in self.owners(shards).items() if claim.get("owner") and not is_gone(claim, self._who)]
        ages = self._store.ages_s([_name(shard) for shard, _ in claims])
        return [(shard, claim, age) for (shard, claim), age in zip(claims, ages, strict=True) if age < self.stale_s]

    def owners(self, shards: Container[int]) -> dict[int, dict[str, Any]]:
        """The claims on these shards, whoever holds them. Raises StorageError."""
        claimed = [int(name.removesuffix(".json")) for name in self._store.list(FOLDER) if NAME.fullmatch(name)]
        wanted = [shard for shard in claimed if shard in shards]
        return dict(zip(wanted, for_each(self._store, [*map(_name, wanted)], self._read), strict=True))

    def beat(self) -> None:
        """Show that the run lives, at most every BEAT_S seconds. Shards that another run took over are no longer ours."""
        if self._clock() - self._beaten_at < BEAT_S:
            return
        self._beaten_at = self._clock()
        ours = [shard for shard, claim in self.owners(self._held).items() if claim.get("owner") == self.attempt]
        self._held = {shard: self._held[shard] + 1 for shard in ours}
        for _ in for_each(self._store, ours, lambda shard: self._store.put(_name(shard), self._claim(self._held[shard]))):
            pass

    def forget(self, shard: int) -> None:
        """The shard is committed: its claim means nothing any more."""
        self._held.pop(shard, None)

    def _read(self, name: str) -> dict[str, Any]:
        """A claim; an empty one where it is gone: the run that completed the job deletes them all."""
        try:
            return _parse(self._store.read(name))
        except StorageError:
            if self._store.exists(name):
                raise
            return {}

    def _is_stale(self, shard: int, claim: Mapping[str, Any]) -> bool:
        if claim.get("owner") == "" or is_gone(claim, self._who):
            return True
        state = claim.get("owner", ""), claim.get("counter", 0)
        known, since = self._seen.get(shard, (None, 0.0))
        if known != state:
            self._seen[shard] = (state, self._clock())
            return False
        return self._clock() - since >= self.stale_s

    def _claim(self, counter: int) -> bytes:
        return json.dumps({"owner": self.attempt, "counter": counter, **self._who}).encode()


def whoami() -> dict[str, Any]:
    """This process, as its claims name it: machine, space of process numbers, process, and the task of a batch system with the
    number of its start."""
    task = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID")]
    return {
        "host": socket.gethostname(),
        "space": _space(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "task": "/".join(task) if task[0] else "",
        "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    }


def is_gone(claim: Mapping[str, Any], who: Mapping[str, Any]) -> bool:
    """Whether this process can tell that the claim's owner does not run any more."""
    same = claim.get("host") == who["host"] and claim.get("space") == who["space"] != ""
    if same and claim.get("pid") and claim.get("started"):
        return bool(_started(claim["pid"]) != claim["started"])
    return bool(who["task"]) and claim.get("task") == who["task"] and bool(claim.get("restart", 0) < who["restart"])


def _started(pid: int) -> str:
    """When a process began, in clock ticks since the machine did; empty where there is none, or it has ended, or nobody says."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return "" if facts[0] in "ZX" else facts[19]
    except (OSError, IndexError):
        return ""


def _space() -> str:
    """Where a process number means one process: a boot of a machine and a namespace of it, as /proc shows them; empty where it
    does not, or shows another namespace than ours."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _name(shard: int) -> str:
    return f"{FOLDER}/{shard:05d}.json"


def _parse(data: bytes) -> dict[str, Any]:
    """A claim without what is of another type; an empty one, of nobody that beats, where the bytes are none."""
    try:
        claim = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(claim, dict):
        return {}
    return {key: claim[key] for key, like in LIKE.items() if type(claim.get(key)) is type(like)}
