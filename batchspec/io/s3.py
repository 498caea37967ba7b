"""Files of a job on S3, or on a store that speaks its protocol.

A name is taken by one PUT with `If-None-Match: *`, which the store refuses where the name exists. An answer can get lost, and the
request is then sent again and refused: the attempt's uuid in the object's metadata says whose it is. One PUT carries a whole
object, so that nothing partial is ever visible.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
import pyarrow.dataset as ds
import pyarrow.fs as pafs

from batchspec.errors import ConfigError, OutputError, StorageError
from batchspec.io.aws import NO_BUCKET, client, filesystem, no_bucket, passing, refusal, status, whole
from batchspec.io.retry import retried
from batchspec.io.store import STALE_S, Tail, for_each, scanning, storage_errors, storing

SCHEME = "s3://"
ATTEMPT = "batchspec-attempt"
MAX_PUT_BYTES = 5 << 30
SCAN_ATTEMPTS = 5
DELETED_AT_ONCE = 8
T = TypeVar("T")


@storage_errors
class S3Store:
    """A prefix of a bucket; see store.py for what each method promises. `method` is always `put`."""

    def __init__(self, root: str) -> None:
        """root is s3://bucket/prefix. Raises ConfigError where there is no bucket or no boto3."""
        bucket, _, prefix = root.removeprefix(SCHEME).rstrip("/").partition("/")
        if not bucket or not prefix or "//" in prefix:
            raise ConfigError(f"output.dir={root} must be s3://BUCKET/FOLDER; name a folder of a bucket")
        self.where, self.method = f"{SCHEME}{bucket}/{prefix}", "put"
        self._bucket, self._prefix = bucket, prefix
        self._client = client()
        self._folder: Path | None = None

    def check_root(self) -> None:
        if self.exists(""):
            raise OutputError(f"output.dir {self.where} is an object and is no batchspec job; choose another folder")

    def check_bucket(self) -> None:
        self.list("")

    def probe(self) -> None:
        name = f"_batchspec/tmp/probe-{uuid.uuid4().hex}"
        taken = self._create(name, b"")
        taken_twice = self._create(name, b"")
        self._delete(self._key(name))
        if not taken or taken_twice:
            raise OutputError(
                f"output.dir {self.where}: this store ignores If-None-Match on PUT, without which two runs could overwrite "
                "each other's shards; use a store that honours it (Amazon S3 and MinIO do) or a local folder"
            )

    def clean(self) -> None:
        for folder in Path(tempfile.gettempdir()).glob(f"{_scratch_prefix()}*"):
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime > STALE_S:
                    shutil.rmtree(folder)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self._create(name, data)

    def put(self, name: str, data: bytes) -> None:
        key, digest = self._key(name), _md5(io.BytesIO(data))
        self._call(
            f"writing {self._uri(name)}",
            lambda: whole(self._client.put_object(Bucket=self._bucket, Key=key, Body=data, ContentMD5=digest)),
        )

    def publish(self, path: Path, name: str) -> bool:
        return self._publish(path, name, IfNoneMatch="*")

    def version(self, name: str) -> str:
        found = self._head(name)
        return "" if found is None else str(found["ETag"])

    def versions(self, name: str) -> dict[str, str]:
        prefix = f"{self._key(name)}/"
        found: dict[str, str] = {}
        for page in self._pages(name, Prefix=prefix, Delimiter="/"):
            found |= {item["Key"].removeprefix(prefix): str(item["ETag"]) for item in page.get("Contents", ())}
            found |= {item["Prefix"].removeprefix(prefix).rstrip("/"): "" for item in page.get("CommonPrefixes", ())}
        found.pop("", None)  # some tools make an empty object for a folder
        return dict(sorted(found.items()))

    def tail(self, name: str, num_bytes: int) -> Tail | None:
        key = self._key(name)

        def act() -> Tail | None:
            try:
                answer = whole(self._client.get_object(Bucket=self._bucket, Key=key, Range=f"bytes=-{num_bytes}"))
                return Tail(answer["Body"].read(), str(answer["ETag"]))
            except Exception as error:
                if status(error) == 416:  # no range is within an empty object
                    return Tail(b"", self.version(name))
                if status(error) == 404 and not no_bucket(error):
                    return None
                raise

        return self._call(f"reading {self._uri(name)}", act)

    def delete(self, name: str, version: str) -> None:
        if self.version(name) == version:
            self._delete(self._key(name))

    def replace(self, path: Path, name: str, version: str) -> bool:
        return self._publish(path, name, IfMatch=version)

    def probe_replace(self) -> None:
        name = f"_batchspec/tmp/probe-{uuid.uuid4().hex}"
        self._create(name, b"")
        replaced = self._create(name, b"other", IfMatch='"0"')
        self._delete(self._key(name))
        if replaced:
            raise OutputError(
                f"output.dir {self.where}: this store ignores If-Match on PUT, without which a retry could undo another one's "
                "shards; use a store that honours it (Amazon S3 and MinIO do), or copy the job to a local folder"
            )

    def _publish(self, path: Path, name: str, **condition: str) -> bool:
        try:
            with storing(f"reading {path}"):
                size = path.stat().st_size
                if size > MAX_PUT_BYTES:
                    raise StorageError(
                        f"publishing {self._uri(name)} failed: {size:,} bytes, and S3 takes {MAX_PUT_BYTES:,} in one PUT; "
                        "start anew with a smaller output.shard_rows"
                    )
            return self._create(name, path, **condition)
        finally:
            path.unlink(missing_ok=True)

    def read(self, name: str) -> bytes:
        key = self._key(name)

        def act() -> bytes:
            answer = whole(self._client.get_object(Bucket=self._bucket, Key=key))
            data: bytes = answer["Body"].read()
            return data

        return self._call(f"reading {self._uri(name)}", act)

    def ages_s(self, names: Sequence[str]) -> list[float]:
        return list(for_each(self, names, self._age_s))

    def _age_s(self, name: str) -> float:
        found = self._head(name)
        if found is None:
            return math.inf
        now = parsedate_to_datetime(found["ResponseMetadata"]["HTTPHeaders"]["date"])
        age: float = (now - found["LastModified"]).total_seconds()
        return age

    def discard(self, prefix: str) -> None:
        pass  # a run's unfinished files lie on its own machine

    def list(self, name: str) -> list[str]:
        return [*self.versions(name)]

    def exists(self, name: str) -> bool:
        return self._head(name) is not None

    def delete_tree(self, name: str) -> None:
        # One by one, because not every store can delete many by one request; several at once, because there may be thousands.
        with ThreadPoolExecutor(DELETED_AT_ONCE) as pool:
            for page in self._pages(name, Prefix=f"{self._key(name)}/"):
                for _ in pool.map(self._delete, [item["Key"] for item in page.get("Contents", ())]):
                    pass

    def scratch(self) -> Path:
        if self._folder is None:
            with storing(f"making a folder in {tempfile.gettempdir()}"):
                self._folder = Path(tempfile.mkdtemp(prefix=_scratch_prefix()))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def scan(self, names: Sequence[str]) -> pl.LazyFrame:
        paths = [f"{self._bucket}/{self._key(name)}" for name in names]
        with scanning(self.where):
            return pl.scan_pyarrow_dataset(ds.dataset(paths, filesystem=self._arrow, format="parquet"))

    @cached_property
    def _arrow(self) -> pafs.FileSystem:
        return filesystem(self._bucket, attempts=SCAN_ATTEMPTS)

    def _delete(self, key: str) -> None:
        self._call(f"deleting {SCHEME}{self._bucket}/{key}", lambda: self._client.delete_object(Bucket=self._bucket, Key=key))

    def _create(self, name: str, data: bytes | Path, **condition: str) -> bool:
        """PUT under a condition, by default that there is no such object; False where the store says it does not hold."""
        condition = condition or {"IfNoneMatch": "*"}
        key, attempt = self._key(name), uuid.uuid4().hex

        def act() -> bool:
            try:
                with io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as body:
                    digest = _md5(body)
                    body.seek(0)
                    answer = self._client.put_object(
                        Bucket=self._bucket, Key=key, Body=body, ContentMD5=digest, Metadata={ATTEMPT: attempt}, **condition
                    )
                whole(answer)
            except Exception as error:
                gone = "IfMatch" in condition and status(error) == 404 and not no_bucket(error)
                if status(error) != 412 and not gone:
                    raise
                found = self._head(name)  # an answer to us may have got lost
                return found is not None and found["Metadata"].get(ATTEMPT) == attempt
            return True

        return self._call(f"publishing {self._uri(name)}", act)

    def _head(self, name: str) -> dict[str, Any] | None:
        key = self._key(name)

        def act() -> dict[str, Any] | None:
            try:
                return whole(self._client.head_object(Bucket=self._bucket, Key=key))
            except Exception as error:
                if status(error) == 404:
                    return None
                raise

        return self._call(f"looking for {self._uri(name)}", act)

    def _pages(self, name: str, **arguments: str) -> Iterator[dict[str, Any]]:
        def act() -> dict[str, Any]:
            return whole(self._client.list_objects_v2(Bucket=self._bucket, **arguments))

        while True:
            page = self._call(f"listing {self._uri(name)}", act)
            yield page
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def _call(self, what: str, act: Callable[[], T]) -> T:
        """`act` with retries; what boto3 raises as a StorageError that names the object, an OutputError that names the bucket."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return retried(what, act, passing)
        except (BotoCoreError, ClientError) as error:
            if no_bucket(error):
                raise OutputError(NO_BUCKET.format(where=self.where, bucket=self._bucket)) from error
            raise StorageError(f"{what} failed: {refusal(error)}; run the same command again after that") from error

    def _key(self, name: str) -> str:
        if name and any(part in ("", ".", "..") or "\0" in part for part in name.split("/")):
            raise OutputError(f"{self.where}/{name}: empty names and .. are refused; take another output.dir")
        return f"{self._prefix}/{name}" if name else self._prefix

    def _uri(self, name: str) -> str:
        return f"{self.where}/{name}" if name else self.where


def _md5(body: io.BytesIO | io.BufferedReader) -> str:
    """As the header Content-MD5 wants it: the store refuses what was damaged on the way."""
    return base64.b64encode(hashlib.file_digest(body, lambda: hashlib.md5(usedforsecurity=False)).digest()).decode()


def _scratch_prefix() -> str:
    return f"batchspec-{os.getuid()}-"
