"""Output on S3, or a store with its protocol, by boto3; object_store.py explains how a name is published exactly once."""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.fs as pafs

from batchspec.data.storage.object_store import ABSENT, Head, InFlightError, ObjectStore, RefusedError
from batchspec.data.storage.retry import retried
from batchspec.data.storage.s3_client import NO_BUCKET, client, filesystem, no_bucket, passing, refusal, status, whole
from batchspec.data.storage.store import Tail, for_each, storage_errors
from batchspec.errors import ConfigError, OutputError, StorageError

SCHEME = "s3://"
ATTEMPT = "batchspec-attempt"
SCAN_ATTEMPTS = 5
T = TypeVar("T")


@storage_errors
class S3Store(ObjectStore):
    """A version is an ETag, in its quotes."""

    def __init__(self, root: str) -> None:
        """root is s3://bucket/prefix. Raises ConfigError for another form, or without boto3."""
        bucket, _, prefix = root.removeprefix(SCHEME).rstrip("/").partition("/")
        if not bucket or not prefix:
            raise ConfigError(f"output.dir={root} must be s3://BUCKET/FOLDER; name a folder of a bucket")
        super().__init__(f"{SCHEME}{bucket}/{prefix}", bucket, prefix)
        self._client = client()

    def _send(self, key: str, body: bytes | Path, condition: str | None, attempt: str) -> None:
        headers: dict[str, Any] = {}
        if condition is not None:
            headers |= {"IfNoneMatch": "*"} if condition == ABSENT else {"IfMatch": condition}
        if attempt:
            headers["Metadata"] = {ATTEMPT: attempt}
        try:
            with io.BytesIO(body) if isinstance(body, bytes) else body.open("rb") as data:
                digest = _md5(data)
                data.seek(0)
                whole(self._client.put_object(Bucket=self._bucket, Key=key, Body=data, ContentMD5=digest, **headers))
        except Exception as error:
            gone = "IfMatch" in headers and status(error) == 404 and not no_bucket(error)
            if condition is not None and (status(error) == 412 or gone):
                raise RefusedError from error
            raise

    def _find(self, key: str) -> Head | None:
        found = self._facts(key)
        return None if found is None else Head(str(found["ETag"]), found["Metadata"].get(ATTEMPT, ""))

    def _facts(self, key: str) -> dict[str, Any] | None:
        try:
            return whole(self._client.head_object(Bucket=self._bucket, Key=key))
        except Exception as error:
            if status(error) == 404:
                return None
            raise

    def _fetch(self, key: str) -> bytes:
        data: bytes = whole(self._client.get_object(Bucket=self._bucket, Key=key))["Body"].read()
        return data

    def _fetch_tail(self, key: str, num_bytes: int) -> Tail | None:
        try:
            answer = whole(self._client.get_object(Bucket=self._bucket, Key=key, Range=f"bytes=-{num_bytes}"))
            return Tail(answer["Body"].read(), str(answer["ETag"]))
        except Exception as error:
            if status(error) == 416:  # an empty object has no range
                found = self._find(key)
                return None if found is None else Tail(b"", found.version)
            if status(error) == 404 and not no_bucket(error):
                return None
            raise

    def _remove(self, key: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=key)

    def ages_s(self, names: Sequence[str]) -> list[float]:
        return list(for_each(self, names, self._age_s))

    def _age_s(self, name: str) -> float:
        found = self._call(f"looking for {self._uri(name)}", lambda: self._facts(self._key(name)))
        if found is None:
            return math.inf
        now = parsedate_to_datetime(found["ResponseMetadata"]["HTTPHeaders"]["date"])
        age: float = (now - found["LastModified"]).total_seconds()
        return age

    def _folder_pages(self, name: str) -> Iterator[dict[str, str]]:
        prefix = f"{self._key(name)}/"
        for page in self._pages(name, Prefix=prefix, Delimiter="/"):
            found = {item["Key"].removeprefix(prefix): str(item["ETag"]) for item in page.get("Contents", ())}
            yield found | {item["Prefix"].removeprefix(prefix).rstrip("/"): "" for item in page.get("CommonPrefixes", ())}

    def _key_pages(self, name: str) -> Iterator[list[str]]:
        for page in self._pages(name, Prefix=f"{self._key(name)}/"):
            yield [item["Key"] for item in page.get("Contents", ())]

    def _pages(self, name: str, **arguments: str) -> Iterator[dict[str, Any]]:
        def act() -> dict[str, Any]:
            return whole(self._client.list_objects_v2(Bucket=self._bucket, **arguments))

        while True:
            page = self._call(f"listing {self._uri(name)}", act)
            yield page
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def _files(self) -> pafs.FileSystem:
        return filesystem(self._bucket, attempts=SCAN_ATTEMPTS)

    def _call(self, what: str, act: Callable[[], T]) -> T:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return retried(what, act, lambda error: isinstance(error, InFlightError) or passing(error))
        except (BotoCoreError, ClientError) as error:
            if no_bucket(error):
                raise OutputError(NO_BUCKET.format(where=self.where, bucket=self._bucket)) from error
            raise StorageError(f"{what} failed: {refusal(error)}; run the same command again after that") from error


def _md5(body: io.BytesIO | io.BufferedReader) -> str:
    """The value of the header Content-MD5: the store refuses a body that was damaged in transit."""
    return base64.b64encode(hashlib.file_digest(body, lambda: hashlib.md5(usedforsecurity=False)).digest()).decode()
