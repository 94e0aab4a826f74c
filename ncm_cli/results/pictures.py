"""Pictures of a page: small, within a budget of bytes, and a reason where there is none."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image, features

from ncm_cli.images.augment import apply
from ncm_cli.images.decode import DecodeError, decode
from ncm_cli.images.options import parse_augment
from ncm_cli.images.paths import fetch
from ncm_cli.store.features import FeatureStore


@dataclass(frozen=True, slots=True)
class Tile:
    """A row's picture on a page."""

    id: str
    src: str | None
    """A ``data:`` URL; None where there is no picture, and ``why`` says why."""
    why: str = ""
    crisp: bool = False
    """Of so few pixels that they are to be enlarged as squares."""


class Pictures:
    """Thumbnails of at most ``side`` pixels, as the encoder saw the files; of ``budget`` bytes in all.

    A picture that can't be shown never raises: its tile says why.
    """

    def __init__(self, *, side: int = 112, budget: int = 3_500_000) -> None:
        self.side, self.left = side, budget
        self._made: dict[object, tuple[str | None, str, bool]] = {}

    def row(self, store: FeatureStore, position: int) -> Tile:
        """The picture of a row of a store; position −1 is a row that it doesn't have."""
        if position < 0:
            return Tile("", None, "not in the feature store")
        id, files = store.ids[position], store.files
        if files is None:
            return self.tile(id, None)
        return self.tile(id, files.path[position], files.sha256[position], encoder=store.encoder)

    def tile(
        self,
        id: str,
        path: str | None,
        sha256: str | None = None,
        *,
        encoder: Mapping[str, Any] | None = None,
    ) -> Tile:
        """The picture of an image file.

        Parameters
        ----------
        path
            None for a row of an array.
        sha256
            Of the file that was embedded: another file's picture isn't shown.
        encoder
            Its description: a range of samples and an augmentation change what it saw.
        """
        if path is None:
            return Tile(id, None, "a row of an array has no picture")
        if self.left <= 0:
            return Tile(id, None, "the page is full")
        told = encoder or {}
        view = told.get("view") or {}
        key = (path, sha256, str(told.get("intensity_range")), (str(view), id) if view else None)
        if key not in self._made:
            self._made[key] = self._read(id, path, sha256, told.get("intensity_range"), view)
        src, why, crisp = self._made[key]
        if src is not None and len(src) > self.left:
            self.left = 0  # a small one that still fitted would leave a page with holes
            return Tile(id, None, "the page is full")
        self.left -= len(src or "")
        return Tile(id, src, why, crisp)

    def _read(
        self, id: str, path: str, sha256: str | None, span: Any, view: Mapping[str, Any]
    ) -> tuple[str | None, str, bool]:
        try:
            data = fetch(path)
            if sha256 and hashlib.sha256(data).hexdigest() != sha256:
                return None, "changed since it was embedded", False
            image = decode(data, tuple(span) if span else None)
            if view:
                image = apply(parse_augment(view["augment"]), image, seed=view["seed"], id=id)
        except DecodeError as error:
            return None, error.reason, False
        crisp = max(image.size) <= self.side // 2
        image.thumbnail((self.side, self.side), Image.Resampling.LANCZOS)
        kind, settings = ("PNG", {"optimize": True}) if crisp else _LOSSY
        stream = io.BytesIO()
        image.save(stream, kind, **settings)
        return (
            f"data:image/{kind.lower()};base64,{base64.b64encode(stream.getvalue()).decode('ascii')}",
            "",
            crisp,
        )


_LOSSY: tuple[str, dict[str, Any]] = (
    ("WEBP", {"quality": 75, "method": 4}) if features.check("webp") else ("JPEG", {"quality": 80})
)
