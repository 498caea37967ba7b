"""Input files on Google Cloud Storage and Azure Blob Storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchspec.data.storage.cloud_client import ANSWERED, Bucket, CutAnswer, Passing, bucket_of, errors, explain, failure
from batchspec.data.storage.remote_files import Kind, Opened, RemoteEntry, RemoteFiles, Stamp
from batchspec.data.storage.s3_client import NO_BUCKET
from batchspec.errors import InputError


class CloudFiles:
    """One bucket; paths begin with its name as written in the URL."""

    def __init__(self, scheme: str, bucket: Bucket, authority: str) -> None:
        self.scheme, self._bucket, self._authority = scheme, bucket, authority
        bucket.client()  # refuses unusable settings
        self.errors = errors()

    def kind(self, path: str) -> Kind:
        found = self._kind(self._key(path))
        ANSWERED.add(self._bucket)
        return found

    def _kind(self, key: str) -> Kind:
        if key:
            try:
                if not is_folder_mark(self._bucket.client().get(key, options={"head": True}).attributes):
                    return "file"
            except FileNotFoundError:
                pass
        return "folder" if any(self._bucket.client().list(f"{key}/" if key else None, chunk_size=1)) else "missing"

    def stamp(self, path: str) -> Stamp:
        found = self._bucket.client().head(self._key(path))
        return Stamp(int(found["size"]), str(found["e_tag"]))

    def walk(self, path: str) -> Sequence[RemoteEntry]:
        found = self._bucket.client().list(self._key(path) or None).collect()
        return [RemoteEntry(f"{self._authority}/{item['path']}", int(item["size"])) for item in found]

    def open(self, path: str) -> Opened:
        return _CloudFile(self._bucket, self._key(path), self.stamp(path).size_bytes)

    def check_bucket(self, path: str) -> bool:
        try:
            next(iter(self._bucket.client().list(chunk_size=1)), None)
        except self.errors as error:
            if failure(error).no_bucket:
                return False
            raise
        return True

    def passing(self) -> Callable[[Exception], bool]:
        return Passing(self._bucket)

    def explain(self, error: Exception) -> str:
        if failure(error).no_bucket:
            where = f"input.path {self.scheme}://{self._authority}"
            raise InputError(NO_BUCKET.format(where=where, bucket=self._bucket.name)) from error
        return explain(self._bucket.cloud, error)

    def _key(self, path: str) -> str:
        return path.partition("/")[2]


@dataclass(slots=True)
class _CloudFile:
    bucket: Bucket
    key: str
    num_bytes: int

    def size(self) -> int:
        return self.num_bytes

    def read_at(self, size: int, offset: int) -> bytes:
        data = bytes(self.bucket.client().get_range(self.key, start=offset, length=size))
        if len(data) < size:
            raise CutAnswer(f"{len(data)} of {size} bytes came at {offset}")
        return data

    def close(self) -> None:
        pass


def is_folder_mark(attributes: dict[str, str]) -> bool:
    """Accounts with a hierarchical namespace (Azure Data Lake) show a folder as an empty object with this in its metadata."""
    return any(name.lower() == "hdi_isfolder" and value == "true" for name, value in attributes.items())


def cloud_files(entry: str) -> tuple[RemoteFiles, str]:
    """The file system of a URL, and the path in it. Raises ConfigError."""
    bucket, authority, path = bucket_of(entry, "input.path")
    return CloudFiles(entry.partition("://")[0], bucket, authority), f"{authority}/{path}"
