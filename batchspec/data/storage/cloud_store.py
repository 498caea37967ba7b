"""Output on Google Cloud Storage or Azure Blob Storage, by obstore; object_store.py explains how a name is published exactly
once."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.fs as pafs

from batchspec.data.storage.arrow_view import arrow_view
from batchspec.data.storage.cloud_client import ANSWERED, GCS, Passing, bucket_of, errors, explain, failure
from batchspec.data.storage.cloud_files import CloudFiles, is_folder_mark
from batchspec.data.storage.object_store import ABSENT, NO_VERSION, Head, InFlightError, ObjectStore, RefusedError
from batchspec.data.storage.retry import retried
from batchspec.data.storage.s3_client import NO_BUCKET
from batchspec.data.storage.store import Tail, for_each, storage_errors
from batchspec.errors import ConfigError, OutputError, StorageError

ATTEMPT = "batchspec_attempt"
"""Azure accepts only such names."""
LISTED_AT_ONCE = 1000
T = TypeVar("T")


@storage_errors
class CloudStore(ObjectStore):
    """A version is an ETag without its quotes, which listings of Azure do not have.

    Cloud Storage compares generations on PUT, and its listings do not contain them: a replacement looks up the generation that
    has the ETag, and makes it the condition.
    """

    keep_them = "Google Cloud Storage and Azure Blob Storage do"

    def __init__(self, root: str) -> None:
        """root is gs://bucket/prefix or abfss://container@host/prefix; raises ConfigError for another form or without obstore."""
        bucket, authority, prefix = bucket_of(root.rstrip("/"), "output.dir")
        if not prefix:
            raise ConfigError(f"output.dir={root} names no folder of a bucket; write {root.rstrip('/')}/FOLDER")
        scheme = root.partition("://")[0]
        super().__init__(f"{scheme}://{authority}/{prefix}", authority, prefix)
        self._place, self._input = bucket, CloudFiles(scheme, bucket, authority)
        if scheme in GCS:
            self.absent_condition = self.version_condition = "x-goog-if-generation-match"
            self.max_put_bytes = 5 << 40
        else:
            self.max_put_bytes = 5000 << 20

    def _send(self, key: str, body: bytes | Path, condition: str | None, attempt: str) -> None:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        size = len(body) if isinstance(body, bytes) else body.stat().st_size
        attributes = {ATTEMPT: attempt} if attempt else {}
        try:
            mode = self._mode(key, condition)
            self._place.client(size).put(key, body, attributes=attributes, mode=mode, use_multipart=False)
        except (AlreadyExistsError, PreconditionError, FileNotFoundError) as error:
            if condition is None or failure(error).no_bucket or (condition == ABSENT and isinstance(error, FileNotFoundError)):
                raise
            raise RefusedError from error

    def _mode(self, key: str, condition: str | None) -> Any:
        if condition is None:
            return "overwrite"
        if condition == ABSENT:
            return "create"
        if self._place.cloud == "az":
            return {"e_tag": f'"{_bare(condition)}"'}
        if condition == NO_VERSION:
            return {"e_tag": condition, "version": "1"}
        found = self._place.client().head(key)
        if _bare(found["e_tag"]) != condition:
            raise RefusedError
        return {"e_tag": found["e_tag"], "version": found["version"]}

    def _find(self, key: str) -> Head | None:
        try:
            found = self._place.client().get(key, options={"head": True})
        except FileNotFoundError:
            return None
        if is_folder_mark(found.attributes):
            return None
        return Head(_bare(found.meta["e_tag"]), found.attributes.get(ATTEMPT, ""))

    def _fetch(self, key: str) -> bytes:
        return bytes(self._place.client().get(key).bytes())

    def _fetch_tail(self, key: str, num_bytes: int) -> Tail | None:
        from obstore.exceptions import PreconditionError

        client = self._place.client()
        try:
            found = client.head(key)
            size, etag = int(found["size"]), found["e_tag"]
            if not size:
                return Tail(b"", _bare(etag))
            part = client.get(key, options={"range": (max(0, size - num_bytes), size), "if_match": etag})
            return Tail(bytes(part.bytes()), _bare(etag))
        except PreconditionError as error:
            raise InFlightError("it was replaced between two requests") from error
        except FileNotFoundError as error:
            if failure(error).no_bucket:
                raise
            return None

    def _remove(self, key: str) -> None:
        try:
            self._place.client().delete(key)
        except FileNotFoundError as error:
            if failure(error).no_bucket:
                raise

    def ages_s(self, names: Sequence[str]) -> list[float]:
        if not names:
            return []
        mark = self._key(f"_batchspec/tmp/now-{uuid.uuid4().hex}")  # the store's own clock

        def written() -> float:
            self._send(mark, b"", None, "")
            return self._written_s(mark)

        now = self._call(f"writing {self.where}", written)
        self._delete(mark)
        return [now - at for at in for_each(self, names, self._age_s)]

    def _age_s(self, name: str) -> float:
        def act() -> float:
            with suppress(FileNotFoundError):
                return self._written_s(self._key(name))
            return -math.inf

        return self._call(f"looking for {self._uri(name)}", act)

    def _written_s(self, key: str) -> float:
        at: float = self._place.client().head(key)["last_modified"].timestamp()
        return at

    def _folder_pages(self, name: str) -> Iterator[dict[str, str]]:
        prefix = self._key(name)

        def act() -> dict[str, str]:
            found = self._place.client().list_with_delimiter(prefix)
            versions = {item["path"].removeprefix(f"{prefix}/"): _bare(item["e_tag"]) for item in found["objects"]}
            return versions | {path.rstrip("/").removeprefix(f"{prefix}/"): "" for path in found["common_prefixes"]}

        yield self._call(f"listing {self._uri(name)}", act)

    def _key_pages(self, name: str) -> Iterator[list[str]]:
        prefix = self._key(name)

        def act() -> list[str]:
            return [item["path"] for item in self._place.client().list(f"{prefix}/", chunk_size=LISTED_AT_ONCE).collect()]

        yield self._call(f"listing {self._uri(name)}", act)

    def _files(self) -> pafs.FileSystem:
        return arrow_view(self._input)

    def _call(self, what: str, act: Callable[[], T]) -> T:
        passes = Passing(self._place)
        try:
            done = retried(what, act, lambda error: isinstance(error, InFlightError) or passes(error), self._explain)
            ANSWERED.add(self._place)
            return done
        except FileNotFoundError as error:
            if failure(error).no_bucket:
                self._explain(error)
            raise StorageError(f"{what} failed: it is not there any more; put it back, or start anew") from error
        except errors() as error:
            raise StorageError(f"{what} failed: {self._explain(error)}; run the same command again after that") from error

    def _explain(self, error: Exception) -> str:
        if failure(error).no_bucket:
            raise OutputError(NO_BUCKET.format(where=self.where, bucket=self._place.name)) from error
        return explain(self._place.cloud, error)


def _bare(etag: str) -> str:
    return etag.strip('"')
