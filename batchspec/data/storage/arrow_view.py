"""A remote file system for Arrow's readers: read only, with the same requests and retries as the input."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from batchspec.data.storage.places import RemotePlace
from batchspec.data.storage.remote_files import RemoteFiles
from batchspec.errors import InputError, StorageError

TYPES = {"file": pafs.FileType.File, "folder": pafs.FileType.Directory, "missing": pafs.FileType.NotFound}


def arrow_view(remote: RemoteFiles) -> pafs.FileSystem:
    return pafs.PyFileSystem(_Handler(remote))


def _refused(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("this file system is for reading named files")


class _Handler(pafs.FileSystemHandler):  # type: ignore[misc]
    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = move = copy_file = _refused
    open_output_stream = open_append_stream = get_file_info_selector = _refused

    def __init__(self, remote: RemoteFiles) -> None:
        self._remote = remote

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Handler) and other._remote is self._remote

    def __hash__(self) -> int:
        return id(self._remote)

    def get_type_name(self) -> str:
        return self._remote.scheme

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        return [pafs.FileInfo(path, TYPES[self._place(path).kind()]) for path in paths]

    def open_input_file(self, path: str) -> pa.PythonFile:
        place = self._place(path)
        try:
            return pa.PythonFile(place.open(), mode="r")
        except InputError as error:
            raise StorageError(
                f"reading {place} failed: it is not there any more; run the same command again after the repair"
            ) from error

    open_input_stream = open_input_file

    def _place(self, path: str) -> RemotePlace:
        return RemotePlace(self._remote, PurePosixPath(path))
