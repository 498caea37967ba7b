"""Claims: leases on shards, so that runs of one job do not compute the same shard twice. Claims save work; commits decide.

_batchspec/claims/00042.json   {"owner": attempt, "counter": n, "host", "space", "pid", "started", "task", "restart"}

A claim is a lease. A run renews its claims: it writes them again with a higher counter. A thread does so, because an operation of
a store may take seconds, but only when the engine's thread asks for it: a run that hangs renews nothing, and loses its shards.

A claim is stale, and anyone may take the shard, when it has not changed for `stale_s` seconds of the observer's own clock; no
clock of another machine is trusted. It is stale at once when the observer can see that its owner is gone: its process does
not exist on this machine any more (process ids of other containers are ignored), or the owner was an earlier start of the
observer's own batch task. If a run is suspended, or could not renew a claim in time, and continues after its claim was taken
over, at worst its commit is refused; nothing is written twice.

A run that ends by itself, also by an error, releases its claims (owner ""). A stale claim with an owner means that its run
crashed or was killed.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Container, Mapping, Set
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from batchspec.data.runstate.in_thread import in_thread
from batchspec.data.storage.store import Store, for_each
from batchspec.errors import StorageError

FOLDER = "_batchspec/claims"
STALE_S = 150.0
"""More than twice the time for which an NFS client may show old attributes (60 s), and five renewals."""
REMOTE_STALE_S = 300.0
"""On S3 a renewal may be retried for two minutes, and so may the one before it."""
RENEW_S = 30.0
NAME = re.compile(r"[0-9]{5,18}\.json")
FIELDS: dict[str, Any] = {
    "owner": "", "counter": 0, "host": "", "space": "", "pid": 0, "started": "", "task": "", "restart": 0,
}
"""The fields of a claim, each with a default value of its type."""


class Claims:
    """The claims of one job, as the run `attempt` reads and writes them.

    stale_s  seconds without a change after which a claim is stale
    """

    def __init__(
        self, store: Store, attempt: str, *, stale_s: float = STALE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self.attempt, self.stale_s, self._clock = store, attempt, stale_s, clock
        self.crashed_owners: dict[int, str] = {}
        """Shard -> attempt of the crashed run from which this run took it over."""
        self.inherited = False
        """Whether a shard that this run took had an earlier owner, whose rows may be in the journal."""
        self._held: dict[int, int] = {}
        """Shard -> counter. Three threads change it, under the lock: one takes shards, one renews claims, one is the engine's."""
        self._lock = threading.Lock()
        self._renewal: Future[None] | None = None
        """The renewal that is under way, or has ended since the last call of `renew`."""
        self._stopped = False
        """Whether the renewal that is under way is to end before it reads or writes another claim."""
        self._seen: dict[int, tuple[tuple[str, int], float]] = {}
        self._renewed_at = clock()
        self._process = this_process()

    def take(self, shard: int) -> bool:
        """Claim a shard; returns whether this run holds it now. Raises StorageError."""
        if shard in self._held:
            return True
        name = _name(shard)
        if self._store.put_if_absent(name, self._claim(0)):
            self._hold(shard)
            return True
        before = self._read(name)
        if not self._is_stale(shard, before):
            return False
        # Two runs may take over at once: the last writer holds the shard, and the other one notices at its next renewal.
        self._store.put(name, self._claim(0))
        if self._read(name).get("owner") != self.attempt:
            return False
        self._hold(shard)
        self.inherited = True
        if re.fullmatch(r"\w{1,64}", before.get("owner", "")):
            self.crashed_owners[shard] = before["owner"]
        return True

    @property
    def own(self) -> list[int]:
        """Shards that this run holds."""
        with self._lock:
            return sorted(self._held)

    def release(self) -> None:
        """Release all claims of this run, so that other runs can take the shards at once. Raises StorageError.

        Ends a renewal that is under way, and waits for it. It could write a claim again that is already released, and the shard
        would look as if its owner had crashed.
        """
        self.stop_renewal()
        self.settle()
        for shard in self.own:
            self.forget(shard)
            if self._read(_name(shard)).get("owner") == self.attempt:
                self._store.put(_name(shard), json.dumps({"owner": ""}).encode())

    def held(self, shards: Set[int]) -> set[int]:
        """Those of these shards for which another run has a claim that is not stale. Raises StorageError."""
        claims = self.owners(shards - set(self.own))
        return {shard for shard, claim in claims.items() if not self._is_stale(shard, claim)}

    def living(self, shards: Container[int]) -> list[tuple[int, dict[str, Any], float]]:
        """Claims on these shards that do not look stale at a single reading: (shard, claim, seconds since it was written, by the
        store's own clock). Raises StorageError.
        """
        owned = [(shard, claim) for shard, claim in self.owners(shards).items() if claim.get("owner")]
        claims = [(shard, claim) for shard, claim in owned if not owner_is_gone(claim, self._process)]
        ages = self._store.ages_s([_name(shard) for shard, _ in claims])
        return [(shard, claim, age) for (shard, claim), age in zip(claims, ages, strict=True) if age < self.stale_s]

    def owners(self, shards: Container[int]) -> dict[int, dict[str, Any]]:
        """The claims on these shards, stale or not. Raises StorageError."""
        claimed = [int(name.removesuffix(".json")) for name in self._store.list(FOLDER) if NAME.fullmatch(name)]
        wanted = [shard for shard in claimed if shard in shards]
        return dict(zip(wanted, for_each(self._store, [*map(_name, wanted)], self._read), strict=True))

    def renew(self) -> None:
        """Begin to renew the claims in a thread, at most every RENEW_S seconds; those that another run took over are dropped.

        Does not wait for the store. Raises the StorageError of the previous renewal.
        """
        if self._renewal is not None:
            if not self._renewal.done():
                return
            ended, self._renewal = self._renewal, None
            ended.result()
        if self._clock() - self._renewed_at >= RENEW_S:
            self._renewed_at = self._clock()
            self._renewal = in_thread(self._renew, "claims")

    def stop_renewal(self) -> None:
        """Let a renewal that is under way end before its next read or write. Does not wait; `settle` must follow."""
        self._stopped = True

    def settle(self) -> None:
        """Wait until no renewal is under way. The next call of `renew` raises its error, and begins at once with the claims that
        a stopped renewal left out.
        """
        if self._renewal is not None:
            wait([self._renewal])
            if self._stopped:
                self._renewed_at = -math.inf
        self._stopped = False

    def forget(self, shard: int) -> None:
        """Stop renewing the claim of a committed shard."""
        with self._lock:
            self._held.pop(shard, None)

    def _hold(self, shard: int) -> None:
        with self._lock:
            self._held[shard] = 0

    def _renew(self) -> None:
        with self._lock:
            before = dict(self._held)  # shards that are taken meanwhile stay as they are
        for _ in for_each(self._store, [*before], lambda shard: self._renew_one(shard, before[shard] + 1)):
            pass

    def _renew_one(self, shard: int, counter: int) -> None:
        if self._stopped:
            return
        is_ours = self._read(_name(shard)).get("owner") == self.attempt
        with self._lock:
            if not is_ours:
                self._held.pop(shard, None)
            if shard not in self._held or self._stopped:  # it may have been committed meanwhile
                return
            self._held[shard] = counter
        self._store.put(_name(shard), self._claim(counter))

    def _read(self, name: str) -> dict[str, Any]:
        """A claim; {} if it was deleted: the run that completes the job deletes them all."""
        try:
            return _parse(self._store.read(name))
        except StorageError:
            if self._store.exists(name):
                raise
            return {}

    def _is_stale(self, shard: int, claim: Mapping[str, Any]) -> bool:
        if claim.get("owner") == "" or owner_is_gone(claim, self._process):
            return True
        state = claim.get("owner", ""), claim.get("counter", 0)
        known, since = self._seen.get(shard, (None, 0.0))
        if known != state:
            self._seen[shard] = (state, self._clock())
            return False
        return self._clock() - since >= self.stale_s

    def _claim(self, counter: int) -> bytes:
        return json.dumps({"owner": self.attempt, "counter": counter, **self._process}).encode()


def this_process() -> dict[str, Any]:
    """The fields of a claim that identify its owner's process: machine, process namespace, process, and the batch task with the
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


def owner_is_gone(claim: Mapping[str, Any], observer: Mapping[str, Any]) -> bool:
    """Whether `observer` (see `this_process`) can see that the claim's owner does not run any more."""
    same = claim.get("host") == observer["host"] and claim.get("space") == observer["space"] != ""
    if same and claim.get("pid") and claim.get("started"):
        return bool(_started(claim["pid"]) != claim["started"])
    same_task = bool(observer["task"]) and claim.get("task") == observer["task"]
    return same_task and bool(claim.get("restart", 0) < observer["restart"])


def _started(pid: int) -> str:
    """When a process began, in clock ticks since the boot; empty if it does not run or /proc is missing."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return "" if facts[0] in "ZX" else facts[19]
    except (OSError, IndexError):
        return ""


def _space() -> str:
    """The namespace in which a process number is unique: boot id and pid namespace, from /proc; empty if /proc is missing or
    shows another namespace than this process's.
    """
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
    """A claim; fields of the wrong type are dropped, and bytes that are not a JSON object give {}."""
    try:
        claim = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(claim, dict):
        return {}
    return {key: claim[key] for key, example in FIELDS.items() if type(claim.get(key)) is type(example)}
