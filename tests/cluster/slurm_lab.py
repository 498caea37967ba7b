"""A real Slurm on this machine, for tests: munge, slurmctld and slurmd daemons of our own in a temporary folder.

Every node is a slurmd in its own UTS namespace: tasks see another host name on each, as on a cluster. No accounting, no control
groups. What is installed on the machine is used, nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "munged", "unshare")


def lacking() -> str:
    """Why this machine cannot run a Slurm of its own, or an empty string."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"no {', '.join(missing)} here; on Debian: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "slurmd has to be started by root"


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def free_ports(count: int) -> list[int]:
    with tempfile.TemporaryDirectory():
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Raises TimeoutError."""
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.05)


class Lab:
    """A running cluster: nodes n1, n2, ... and partitions batch (default), grace (preempted with 20 s of grace) and urgent."""

    def __init__(self, folder: Path, nodes: int, cpus: int) -> None:
        self.folder, self.nodes, self.cpus = folder, nodes, cpus
        self.env = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
        self._ports = free_ports(nodes + 1)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._spaces: set[str] = set()
        for name in ("munge", "state", "spool", "log", "run"):
            (folder / name).mkdir()

    # -- daemons

    def start(self) -> None:
        (self.folder / "munge").chmod(0o700)
        key = self.folder / "munge/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        munge = [f"--{name}={self.folder / where}" for name, where in (
            ("socket", "run/munge.sock"), ("key-file", "munge/key"), ("pid-file", "run/munged.pid"),
            ("seed-file", "munge/seed"), ("log-file", "log/munged.log"),
        )]
        self._spawn("munged", ["munged", "--foreground", "--force", *munge])
        wait_for((self.folder / "run/munge.sock").exists, 60, "munged's socket")
        (self.folder / "slurm.conf").write_text(self._conf(), encoding="ascii")
        self._spawn("slurmctld", ["slurmctld", "-D"])
        for node in self.node_names:
            self.start_node(node)
        wait_for(lambda: self.usable() == self.nodes, 120, "the start of all nodes")

    @property
    def node_names(self) -> list[str]:
        return [f"n{i + 1}" for i in range(self.nodes)]

    def start_node(self, node: str) -> None:
        (self.folder / "spool" / node).mkdir(exist_ok=True)
        self._spawn(node, ["unshare", "--uts", "sh", "-c", f"hostname {node} && exec slurmd -D -N {node}"])

    def kill_daemon(self, node: str) -> None:
        """SIGKILL to a node's slurmd alone: its jobs live on."""
        self._spaces.add(_space(self._daemons[node].pid))
        self._daemons[node].kill()
        self._daemons[node].wait()

    def kill_node(self, node: str) -> None:
        """SIGKILL to everything that runs on a node, as a power failure would: slurmd, its step managers, their jobs."""
        _kill_in({_space(self._daemons[node].pid)})
        self._daemons[node].wait()

    def usable(self) -> int:
        states = self.run("sinfo", "-h", "-p", "batch", "-N", "-o", "%T").split()
        return sum(state in ("idle", "mixed", "allocated", "completing") for state in states)

    def stop(self) -> None:
        with suppress(subprocess.SubprocessError):
            self.run("scancel", "-f", "--user=root")
            wait_for(lambda: not self.run("squeue", "-h"), 10, "the end of all jobs")
        _kill_in(self._spaces)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self.folder / f"log/{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(command, env=self.env, stdout=out, stderr=out, start_new_session=True)

    # -- commands

    def run(self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """A client command's output. They hang where the controller is gone: hence the time-out."""
        done = subprocess.run(
            command, env={**self.env, **(env or {})}, cwd=cwd, check=True, capture_output=True, text=True, timeout=120
        )
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What scontrol says of a job or a task of an array, key by key."""
        said = self.run("scontrol", "show", "job", "-o", job).splitlines()
        return dict(word.partition("=")[::2] for word in said[0].split() if "=" in word)

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def restarts(self, job: str) -> int:
        return int(self.job(job)["Restarts"])

    def release(self, job: str, last_node: str) -> None:
        """Let a requeued job start at once. On its last node it may not: Slurm waits because that would take its old credential
        for the new one's and drain the job."""
        self.run("scontrol", "update", f"jobid={job}", "StartTime=now", f"ExcNodeList={last_node}")

    def _conf(self) -> str:
        control, *ports = self._ports
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus} Boards=1 "
            f"SocketsPerBoard=1 CoresPerSocket={self.cpus} ThreadsPerCore=1 RealMemory=8000 State=UNKNOWN"
            for name, port in zip(self.node_names, ports, strict=True)
        )
        return f"""ClusterName=lab
SlurmctldHost={socket.gethostname()}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# The credential's life is also how long a requeued job waits: below 5 s it is taken for 120 s.
AuthInfo=socket={self.folder}/run/munge.sock,cred_expire=5
StateSaveLocation={self.folder}/state
SlurmctldPidFile={self.folder}/run/slurmctld.pid
SlurmctldLogFile={self.folder}/log/slurmctld.log
SlurmdPidFile={self.folder}/run/slurmd.%n.pid
SlurmdLogFile={self.folder}/log/slurmd.%n.log
SlurmdSpoolDir={self.folder}/spool/%n
DebugFlags=NO_CONF_HASH
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1,preempt_youngest_first
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={self.folder}/log/jobcomp.txt
KillWait=5
InactiveLimit=0
MinJobAge=600
SlurmctldTimeout=10
SlurmdTimeout=10
BatchStartTimeout=10
MessageTimeout=10
Waittime=0
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10:00 State=UP PriorityTier=1
PartitionName=grace Nodes=ALL MaxTime=INFINITE DefaultTime=10:00 State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE DefaultTime=10:00 State=UP PriorityTier=10 PreemptMode=OFF
"""


@contextmanager
def running_slurm(nodes: int = 2, cpus: int = 2) -> Iterator[Lab]:
    """A cluster of `nodes` nodes that claim `cpus` CPUs each; it goes with everything that runs on it."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket's path has 108 characters at most
    folder.chmod(0o755)
    lab = Lab(folder, nodes, cpus)
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _space(pid: int) -> str:
    """The name space that tells a node's processes from all others; empty where the process is gone."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/uts")
    return ""


def _kill_in(spaces: set[str]) -> None:
    for name in os.listdir("/proc"):
        if name.isdigit() and _space(int(name)) in spaces - {"", _space(os.getpid())}:
            with suppress(ProcessLookupError):
                os.kill(int(name), signal.SIGKILL)
