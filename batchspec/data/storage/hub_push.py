"""Pushes files to a dataset of the Hugging Face hub in one commit: readers see the old files, or all of the new ones.

Contents are uploaded first, several at a time, and the commit that names them comes last. A request that fails is repeated alone.
What the hub has already is not sent again: a push that was killed continues where it ended, and a push of unchanged files does
nothing. The token is huggingface_hub's: HF_TOKEN, or the one of `hf auth login`.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from batchspec.console.text import counted
from batchspec.data.storage import retry
from batchspec.data.storage.hub_files import HubFiles, may_pass, reason_of
from batchspec.data.storage.remote_files import Stamp
from batchspec.errors import ConfigError, OutputError, StorageError

REPO = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", re.ASCII)
PRECONDITION_FAILED = 412
"""The hub's answer to a commit whose parent is not the newest commit."""
AT_ONCE, IN_MEMORY = 16, 4
"""Number of files that are uploaded together, and how many of these may be held in memory because they have no local path."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedFile:
    """One file: its name in the dataset, and its content."""

    name: str
    content: Path | Callable[[], bytes]
    """A path on this machine, or a function that reads the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What a push did."""

    url: str
    num_sent: int
    """Files that the hub did not have."""
    num_deleted: int
    stays_private: bool
    """A public dataset was asked for, and the one that is there is private."""

    def line(self) -> str:
        """One line about it for the terminal."""
        private = "; the dataset was private and stays so: make it public on its page" if self.stays_private else ""
        if not (self.num_sent or self.num_deleted):
            return f"{self.url}: has all of it already{private}"
        deleted = f", {self.num_deleted:,} old ones deleted" if self.num_deleted else ""
        return f"{self.url}: {counted(self.num_sent, 'file')} sent{deleted}{private}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """What a dataset holds."""

    files: Mapping[str, Stamp]
    commit: str
    """The newest commit."""
    is_private: bool
    read: Callable[[str, int | None], bytes]
    """Of a file the content, or so many bytes at its end; with retries."""


Refusal = Callable[[Present], str | None]
"""Says why the files of a dataset must not be replaced; None: they may be."""


def check_push(repo: str) -> None:
    """Raises ConfigError for an invalid dataset name, without a token, and if huggingface_hub is offline."""
    from huggingface_hub import constants, get_token

    if not REPO.fullmatch(repo) or ".." in repo or "--" in repo:
        raise ConfigError(f"{repo!r} is not the name of a dataset; give ORG/NAME, or USER/NAME")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{repo}: HF_HUB_OFFLINE is set, and a push needs the hub; unset it")
    if get_token() is None:
        raise ConfigError(f"{repo}: a push needs a token that may write; set HF_TOKEN, or log in (hf auth login)")


def check_target(repo: str, *, private: bool, refusal: Refusal | None) -> Present | None:
    """What the dataset holds; None if there is no such dataset. Only reads; raises as `push` with the same arguments."""
    present = _Hub(repo).present_if_there()
    if present is None:
        return None
    if private and not present.is_private:
        raise ConfigError(f"{repo} is public on the hub; make it private there, or push to it as public")
    if refusal is not None and (why := refusal(present)) is not None:
        raise OutputError(f"{repo}: {why}")
    return present


def push(
    repo: str,
    files: Sequence[PushedFile],
    *,
    private: bool,
    refusal: Refusal | None,
    deletes: Callable[[str], bool],
    message: str,
) -> Pushed:
    """Create the dataset if it does not exist, and give it these files.

    private  whether a new dataset is private; an existing one must not be public then
    refusal  says why the present files must not be replaced, if so; None: any may be
    deletes  whether a present file that is not among `files` is deleted
    Raises ConfigError and OutputError for errors that a retry cannot cure, StorageError for others. A refusal comes before
    anything is sent.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, errors

    hub, api = _Hub(repo), HfApi()
    # Each call is to be one request, which is repeated alone. create_commit would ask to check the card first: the hub checks it
    # again, and a failure of the check would repeat the commit.
    api._validate_yaml = lambda *_, **__: None  # type: ignore[method-assign]
    present = check_target(repo, private=private, refusal=refusal)
    if present is None:
        hub.tried("making", lambda: api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True))
        present = hub.tried("listing", hub.present)
    there = present.files
    names = {file.name for file in files}
    stale = [name for name in there if name not in names and deletes(name)]
    operations: list[Any] = [CommitOperationDelete(name) for name in stale]
    with_xet = functools.cache(hub.has_xet)
    for group in _groups(files):
        new = []
        for file in group:
            content = _content(file)
            if not _same(there.get(file.name), content):
                new.append(CommitOperationAdd(file.name, content))
        if new:
            with nullcontext() if with_xet() else _without_xet():
                hub.tried("sending files to", lambda new=new: api.preupload_lfs_files(repo, new, repo_type="dataset"))  # type: ignore[misc]
        operations += new
    if operations:

        def landed() -> bool:
            now = hub.tried("listing", hub.present).files
            return not now.keys() & {*stale} and all(_same(now.get(file.name), _content(file)) for file in files)

        def commit() -> None:
            """The hub makes the commit once, after the one that was listed. If the answer is lost, it refuses the next try."""
            try:
                api.create_commit(
                    repo, operations, commit_message=message, repo_type="dataset", parent_commit=present.commit
                )
            except errors.HfHubHTTPError as error:
                if error.response.status_code != PRECONDITION_FAILED:
                    raise
                if not landed():
                    raise StorageError(
                        f"{repo}: it was changed on the hub while files were sent; run the same command again"
                    ) from error

        hub.tried("committing to", commit)
    return Pushed(
        url=f"{api.endpoint}/datasets/{repo}", num_sent=len(operations) - len(stale), num_deleted=len(stale),
        stays_private=present.is_private and not private,
    )


def _groups(files: Sequence[PushedFile]) -> Iterator[list[PushedFile]]:
    """Groups of at most AT_ONCE files, at most IN_MEMORY of them without a path."""
    group: list[PushedFile] = []
    for file in files:
        group.append(file)
        if len(group) == AT_ONCE or sum(not isinstance(one.content, Path) for one in group) == IN_MEMORY:
            yield group
            group = []
    if group:
        yield group


def _content(file: PushedFile) -> Path | bytes:
    return file.content if isinstance(file.content, Path) else file.content()


def _same(there: Stamp | None, content: Path | bytes) -> bool:
    """Whether the hub has this content: it knows large files by their sha256, small ones by git's sha1."""
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    if there is None or there.size_bytes != size:
        return False
    digest = hashlib.sha256() if len(there.mark) == 64 else hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    if isinstance(content, bytes):
        digest.update(content)
    else:
        with content.open("rb") as file:
            while part := file.read(1 << 22):
                digest.update(part)
    return digest.hexdigest() == there.mark


@contextmanager
def _quiet() -> Iterator[None]:
    """Within this block huggingface_hub shows no progress bars."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()


@contextmanager
def _in_time() -> Iterator[None]:
    """Within this block a request ends after REQUEST_S without a byte: huggingface_hub waits for most answers without limit."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    session: Any = get_session()
    before = getattr(session, "timeout", None)
    session.timeout = retry.REQUEST_S
    try:
        yield
    finally:
        session.timeout = before


@contextmanager
def _without_xet() -> Iterator[None]:
    """Within this block huggingface_hub uploads by LFS. To a server without Xet it would send nothing, and be silent about it for
    minutes: hf_xet repeats its own request for a token, whatever the answer.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before


class _Hub:
    """Requests about one dataset, with retries."""

    def __init__(self, repo: str) -> None:
        self._repo = repo

    def tried(self, doing: str, act: Callable[[], T]) -> T:
        what = f"{doing} hf://datasets/{self._repo}"
        try:
            with _quiet(), _in_time():
                return retry.retried(
                    what, act, lambda error: may_pass(_cause(error)), lambda error: reason_of(_cause(error)), notice_s=0.0
                )
        except (StorageError, ConfigError, OutputError):
            raise
        except Exception as error:  # huggingface_hub raises many kinds
            raise _refused(self._repo, what, _cause(error)) from error

    def has_xet(self) -> bool:
        """Whether the server gives tokens for Xet, the protocol by which huggingface_hub uploads; a mirror may have none."""
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

        if constants.HF_HUB_DISABLE_XET:
            return False
        url = f"{constants.ENDPOINT}/api/datasets/{self._repo}/xet-write-token/main"

        def asked() -> bool:
            answer: Any = get_session().get(url, headers=build_hf_headers(), timeout=retry.REQUEST_S)
            if answer.status_code in (404, 405, 501):
                return False
            hf_raise_for_status(answer)
            return "X-Xet-Cas-Url" in answer.headers or b'"casUrl"' in answer.content

        return self.tried("asking for a token of Xet for", asked)

    def present_if_there(self) -> Present | None:
        """What the dataset holds now; None if there is no such dataset. With retries."""
        from huggingface_hub import errors

        def listed() -> Present | None:
            try:
                return self.present()
            except errors.RepositoryNotFoundError as error:
                if error.response.status_code == 404:
                    return None
                raise

        return self.tried("listing", listed)

    def present(self) -> Present:
        """What the dataset holds now, in a single try."""
        root = f"datasets/{self._repo}"
        hub = HubFiles(root, self._repo, None)
        files = {entry.path.removeprefix(f"{root}/"): hub.stamp(entry.path) for entry in hub.walk(root)}

        def read(name: str, last: int | None = None) -> bytes:
            file = hub.open(f"{root}/{name}")
            count = file.size() if last is None else min(last, file.size())
            return self.tried("reading", lambda: file.read_at(count, file.size() - count)) if count else b""

        return Present(files=files, commit=hub.commit, is_private=hub.is_private, read=read)


def _cause(error: Exception) -> Exception:
    """The underlying error of a file that was uploaded in a thread of huggingface_hub."""
    return error.__cause__ if type(error) is RuntimeError and isinstance(error.__cause__, Exception) else error


def _refused(repo: str, what: str, error: Exception) -> Exception:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404):
        return ConfigError(
            f"{what}: refused (HTTP status {status}); check the name, and that the token (HF_TOKEN, or hf auth "
            "login) may write there"
        )
    said = " ".join(str(error).split())[:200] or type(error).__name__
    return StorageError(f"{what} failed ({said}); run the same command again after that is mended")
