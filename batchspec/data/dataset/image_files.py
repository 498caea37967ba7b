"""Images that rows name by a path: files below input.image_root, a local folder or one in an object store."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from batchspec.console.text import quoted
from batchspec.data.storage.places import LocalPlace, RemotePlace, place_of
from batchspec.errors import BadRow, ConfigError, InputError
from batchspec.process.local_files import open_regular

MISSING_IMAGE = "missing_image"
"""Code of the error of a row whose image is not there, or not where images are read."""


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """The files below a folder. Objects of a store are read one by one, each by two requests."""

    root: str
    place: LocalPlace | RemotePlace

    @classmethod
    def of(cls, root: str) -> ImageFiles:
        """Of input.image_root. Raises ConfigError for a local folder that is not there, and for a store that is not read;
        StorageError."""
        try:
            place = place_of(root)
        except ConfigError as error:
            raise ConfigError(str(error).replace("input.path", "input.image_root", 1)) from None
        assert isinstance(place, LocalPlace | RemotePlace)
        if not place.is_dir():
            where = "on this machine" if isinstance(place, LocalPlace) else "in the store"
            raise ConfigError(f"input.image_root={root}: no such folder {where}; correct it, or give images as bytes")
        return cls(root, place)

    def read(self, path: str, number: int, most: int) -> bytes:
        """The bytes of a file, of a larger one the first `most`. number: of the image in its row, from 1, for messages.

        Links are followed. Raises BadRow (MISSING_IMAGE) for a file outside of the folder, and for one that cannot be read, which
        may be there later; StorageError for a store that does not answer.
        """
        where = f"image {number} is the file {quoted(path[:200])}"
        inner = path.removeprefix(f"{str(self.place).rstrip('/')}/") if isinstance(self.place, RemotePlace) else path
        if "://" in inner:
            said = f"the URL {quoted(path[:80])}, and URLs are not downloaded; give its bytes, or a path below input.image_root"
            raise BadRow(MISSING_IMAGE, f"image {number} is {said}")
        try:
            if isinstance(self.place, RemotePlace):
                found = self._remote(self.place, inner, most)
            elif (file := self._below(inner)) is None:
                found = None
            else:
                with open_regular(file) as opened:
                    found = opened.read(most)
        except (OSError, RuntimeError, ValueError, InputError) as error:  # RuntimeError: links that lead to each other
            said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise BadRow(MISSING_IMAGE, f"{where} of input.image_root={self.root}: {said}", retryable=True) from None
        if found is None:
            raise BadRow(MISSING_IMAGE, f"{where}, which is outside of input.image_root={self.root}; correct it")
        return found

    def _below(self, path: str) -> Path | None:
        root = Path(self.root)
        file = (root / path).resolve()
        return file if file.is_relative_to(root.resolve()) else None

    @staticmethod
    def _remote(root: RemotePlace, path: str, most: int) -> bytes | None:
        inner = os.path.normpath(path)
        if inner.startswith(("/", "..")):
            return None
        with io.BufferedReader(root.at(root.path / PurePosixPath(inner)).open()) as file:  # type: ignore[type-var]
            return file.read(most)
