"""Google Cloud Storage (gs://) and Azure Blob Storage (az://, abfs://, abfss://): URLs, clients, and what their errors mean.

obstore talks to both. It takes credentials from the environment, from gcloud's and az's log-in, or from the machine's identity;
they are not stored here. Its error texts are never shown, because they quote URLs, which may be signed. Its own retries are off:
`retried` retries, so that each request ends within the same time on every store.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from batchspec.data.storage import retry
from batchspec.errors import ConfigError

GCS, AZURE = ("gs", "gcs"), ("az", "azure", "abfs", "abfss")
SCHEMES = GCS + AZURE
LOG_IN = {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or gcloud's login (public: GOOGLE_SKIP_SIGNATURE=true), and the bucket's permissions",
    "az": "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_USE_AZURE_CLI=true (public: AZURE_SKIP_SIGNATURE=true), "
    "and the container's permissions",
}
ENDPOINT = {
    "gs": "the endpoint (GOOGLE_BASE_URL where it is set)",
    "az": "the account's name, the endpoint (AZURE_STORAGE_ENDPOINT where it is set)",
}
NO_BUCKET_CODES = ("NoSuchBucket", "ContainerNotFound")
TRIES = 3
"""Maximum number of tries after an error that a retry rarely cures."""
SENT_AGAIN = (408, 409, 429)
SLOWEST_BYTES_S = 256 << 10
"""Bytes/s: a request's time limit grows by the time that its body would take on a line this slow."""
SMALL_BYTES = 4 << 20
KINDS = {"Timeout": "no answer in time", "Connect": "no connection", "Interrupted": "the connection was cut"}


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket of Google's or a container of Azure's."""

    cloud: str
    """`gs` or `az`."""
    name: str
    account: str = ""
    endpoint: str = ""
    """Azure's endpoint, if the URL has one."""

    def client(self, send_bytes: int = 0) -> Any:
        """obstore's client, with time to send `send_bytes`. Raises ConfigError without obstore or for unusable settings."""
        size = 0 if send_bytes <= SMALL_BYTES else 1 << math.ceil(math.log2(send_bytes))
        environ = tuple(sorted(item for item in os.environ.items() if item[0].startswith(("GOOGLE_", "AZURE_"))))
        return _made(self, environ, retry.CONNECT_S, retry.REQUEST_S + size / SLOWEST_BYTES_S)


def bucket_of(url: str, key: str) -> tuple[Bucket, str, str]:
    """(bucket, authority as written in the URL, path in the bucket).

    `key` is the configuration key of the URL. Raises ConfigError for a URL without a bucket.
    """
    scheme, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    if scheme in GCS:
        if not authority or "@" in authority:
            raise ConfigError(f"{key} {url} must be gs://BUCKET/...; name a bucket")
        return Bucket("gs", authority), authority, path
    container, at, host = authority.partition("@")
    if not container or (at and not re.fullmatch(r"[\w-]+(\.[\w-]+)+", host)):
        raise ConfigError(f"{key} {url} must be abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/... or az://CONTAINER/...")
    if at:
        return Bucket("az", container, host.partition(".")[0], f"https://{host.replace('.dfs.', '.blob.', 1)}"), authority, path
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME") or os.environ.get("AZURE_STORAGE_ACCOUNT") or ""
    if not account:
        raise ConfigError(
            f"{key} {url} does not tell the storage account; set AZURE_STORAGE_ACCOUNT_NAME, or name it as in "
            f"abfss://{container}@ACCOUNT.dfs.core.windows.net/{path}"
        )
    return Bucket("az", container, account), authority, path


@cache  # a client keeps its connections; any number of threads may share it
def _made(bucket: Bucket, environ: tuple[tuple[str, str], ...], connect_s: float, request_s: float) -> Any:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import AzureStore, GCSStore
    except ImportError:
        raise ConfigError("gs:// and az:// paths need the package obstore, which is not installed; pip install obstore") from None
    given = dict(environ)
    if bucket.cloud == "gs":
        plain = given.get("GOOGLE_BASE_URL", "").startswith("http://")
    else:
        own = given.get("AZURE_STORAGE_ENDPOINT") or given.get("AZURE_ENDPOINT") or ""
        plain = own.startswith("http://")
    options: Any = {
        "allow_http": plain,
        "connect_timeout": timedelta(seconds=connect_s),
        "read_timeout": timedelta(seconds=request_s),  # until the first byte of the answer, and between two of them
        "timeout": timedelta(days=1),  # of the whole request: a large body takes as long as it moves
    }
    tries: Any = {"max_retries": 0}
    try:
        if bucket.cloud == "gs":
            return GCSStore(bucket.name, client_options=options, retry_config=tries)
        place: Any = {"endpoint": bucket.endpoint} if bucket.endpoint and not own else {}
        return AzureStore(bucket.name, account_name=bucket.account, client_options=options, retry_config=tries, **place)
    except (BaseError, ValueError) as error:
        what = f"{bucket.cloud}://{bucket.name}: the settings cannot be used ({_setting(error)})"
        raise ConfigError(f"{what}; check {LOG_IN[bucket.cloud]}") from error


def _setting(error: Exception) -> str:
    """What obstore rejects, without the value, which may be a key."""
    if found := re.search(r"Unable to (open|decode) service account file(?: from (\S+))?", str(error)):
        return f"no credentials file {found[2]}" if found[1] == "open" else "a credentials file of an unknown form"
    return type(error).__name__


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of obstore, parsed: obstore has few error types and a long text."""

    status: int | None
    """HTTP status, if the store answered."""
    code: str
    """The store's error code."""
    kind: str
    """obstore's word for a missing or incomplete answer, or `Dns`."""
    log_in: bool
    """Whether getting credentials failed, before the store was asked."""
    host: str

    @property
    def no_bucket(self) -> bool:
        return self.code in NO_BUCKET_CODES

    @property
    def passes(self) -> bool:
        return self.status in SENT_AGAIN or (self.status or 0) >= 500 or bool(self.kind)

    @property
    def hardly_passes(self) -> bool:
        """Whether the machine has no identity, or the host does not exist."""
        return self.log_in or self.kind == "Dns"


def failure(error: Exception) -> Failure:
    said, _, debug = str(error).partition("\n\nDebug source")
    status, code = re.search(r"status code: (\d{3})", said), re.search(r"<Code>(\w+)</Code>", said)
    kind = re.search(r"HttpError \{\s*kind: (\w+)", debug)
    url = re.search(r"Error performing [A-Z]+ (\S+?)(?: in |$)", said)
    return Failure(
        status=int(status[1]) if status else None,
        code=code[1] if code else "",
        kind="" if not kind else "Dns" if "dns error" in debug else kind[1],
        log_in=re.search(r"token re(quest|sponse)|get-access-token|Azure CLI", said, re.IGNORECASE) is not None,
        host=(urlsplit(url[1]).hostname or "") if url else "",
    )


ANSWERED: set[Bucket] = set()
"""Buckets that have answered this process: later errors of theirs are probably temporary."""


@dataclass(slots=True)
class Passing:
    """Tells whether an error of obstore may be temporary, for the tries of one request.

    Missing credentials and unknown hosts are mistakes in the settings and are reported soon, until the bucket has answered once.
    """

    bucket: Bucket
    hard: int = field(default=0)

    def __call__(self, error: Exception) -> bool:
        if isinstance(error, CutAnswer):
            return True
        if not isinstance(error, errors()):
            return False
        found = failure(error)
        if not found.hardly_passes:
            return found.passes
        self.hard += 1
        return self.bucket in ANSWERED or self.hard < TRIES


class CutAnswer(Exception):
    """Fewer bytes arrived than were requested."""


def errors() -> tuple[type[Exception], ...]:
    """What a request of obstore raises, except FileNotFoundError."""
    from obstore.exceptions import BaseError

    return BaseError, CutAnswer, ValueError


def explain(cloud: str, error: Exception) -> str:
    """What is wrong and what to check, in one line; never obstore's own text, which may quote signed URLs."""
    found = failure(error)
    if found.log_in:
        return f"no credentials were found or accepted; check {LOG_IN[cloud]}"
    if found.status in (401, 403):
        return f"access denied ({found.code or found.status}); check {LOG_IN[cloud]}"
    if found.kind:
        what = f"no host {found.host}" if found.kind == "Dns" else KINDS.get(found.kind, "no complete answer")
        return f"{what}; check {ENDPOINT[cloud]} and the network"
    what = found.code or (f"HTTP status {found.status}" if found.status else type(error).__name__)
    return f"{what}; check {ENDPOINT[cloud]} and the store's health"
