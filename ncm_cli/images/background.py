"""Pictures whose object stands on another background: ``ncm embed --augment background``.

A mask says what is kept: white is the object, black its background, grey a soft edge. What replaces the
background is that of another image of the same split, a picture of a folder, grey or noise. The choice is
drawn from (seed, id) alone on a ring of hashes, so that adding an image changes the views of few others.

If the background is another image's, that image's object is filled in from its surroundings. Otherwise the
new picture would show two objects, one of which may have another label.
"""

from __future__ import annotations

import bisect
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from ncm_cli.errors import InputError, UsageError, as_written, listing
from ncm_cli.images.decode import decode
from ncm_cli.images.folder import IMAGE_SUFFIXES, walk_images
from ncm_cli.images.manifest import Manifest, absolute_text
from ncm_cli.images.options import BACKGROUND, EmbedOptions, parse_augment
from ncm_cli.images.paths import archive_of, fetch, is_remote, look_up
from ncm_cli.images.samples import DecodeError
from ncm_cli.store.digests import canonical_json, digest_of, parse_json, printable

MAX_COVER_PIXELS = 1 << 24
"""Largest picture that gets another background, or becomes one: pasting takes a hundred bytes a pixel."""

MAX_TRIES = 8
"""Most backgrounds that are tried for a picture before it fails, since some may have no usable mask."""

GREY = 128
"""The level of a grey background."""

NOISE_SIDE = 16
"""Colours along each side of a noise background, which is enlarged: finer noise would average to grey."""

HALF = 128
"""The least level of a mask at which a pixel counts as the object's."""

MAX_TINT = 32
"""Largest difference of a grey pixel's three channels, for masks that went through JPEG."""

EDGE_SHARE = 0.01
"""How far another image's object is grown before it is filled, as a share of the shorter side: pixels at its
edge are a mixture of it and the background."""

MAX_MIXED = 0.02
"""The object's share of a pixel from which its colour isn't used to estimate the background."""

Decode = Callable[[bytes], Image.Image]


@dataclass(frozen=True)
class Beside:
    """The other files that a view was made of, with the facts that show whether they have changed."""

    mask: str
    backgrounds: tuple[tuple[str, str], ...] = ()
    """(path, mask) of each background that was tried, the last of which was used; no mask in a folder's."""
    facts: str = ""
    """Digest of the files' sizes and times."""
    sha256: str = ""
    """Digest of their contents."""

    @classmethod
    def of(cls, text: str) -> Beside | None:
        """The record in a store's text; None if the text isn't a record."""
        try:
            fields = parse_json(text)
            pairs = tuple((str(path), str(mask)) for path, mask in fields["backgrounds"])
            return cls(str(fields["mask"]), pairs, str(fields["facts"]), str(fields["sha256"]))
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def text(self) -> str:
        """The record as a store keeps it."""
        return canonical_json(vars(self))

    @property
    def paths(self) -> list[str]:
        """All of the files."""
        return [path for path in (self.mask, *(path for pair in self.backgrounds for path in pair)) if path]


class _Bytes(dict[str, bytes]):
    """The contents of files, each read once; ``facts`` are their sizes and times before that."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: dict[str, tuple[int, int]] = {}

    def __missing__(self, path: str) -> bytes:
        self.facts[path] = look_up(path)
        self[path] = fetch(path)
        return self[path]

    def told(self, beside: Beside) -> Beside:
        """The record with the digests of its files; raises `DecodeError` where one can't be read."""
        digests = [_digest(self, path) for path in beside.paths]
        facts = [self.facts[path] for path in beside.paths]
        return replace(beside, facts=digest_of(facts), sha256=digest_of(digests))


def _digest(contents: _Bytes, path: str) -> str:
    try:
        return hashlib.sha256(contents[path]).hexdigest()
    except DecodeError as error:  # of a background that was tried and rejected
        return error.reason


@dataclass(frozen=True)
class Ring:
    """Backgrounds in the order of their hashes."""

    hashes: Sequence[bytes]
    ids: Sequence[str]

    @classmethod
    def over(cls, ids: Sequence[str], seed: int) -> Ring:
        """The ring of some ids."""
        placed = sorted((_hash(seed, id), id) for id in ids)
        return cls([at for at, _ in placed], [id for _, id in placed])

    def after(self, seed: int, id: str) -> Iterator[str]:
        """At most `MAX_TRIES` ids, without ``id``, from the place on the ring that is drawn for ``id``."""
        start = bisect.bisect(self.hashes, _hash(seed, f"view of\0{id}"))
        walk = (self.ids[(start + step) % len(self.ids)] for step in range(len(self.ids)))
        others = (other for other in walk if other != id)
        for _, other in zip(range(MAX_TRIES), others, strict=False):
            yield other


def _hash(seed: int, text: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{text}".encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True)
class Backgrounds:
    """What replaces the backgrounds in a run of ``ncm embed``. Reader processes have a copy."""

    fill: str
    seed: int
    folder: str
    """Where the masks are, for messages."""
    masks: dict[str, str]
    """The mask of each id that has one."""
    rings: dict[str, Ring] = field(default_factory=dict)
    """The backgrounds for the images of each split; those of a folder, for all images, are under ""."""
    files: dict[str, str] = field(default_factory=dict)
    """The file of each background on a ring."""
    split_of: dict[str, str] = field(default_factory=dict)

    def candidates(self, id: str) -> list[tuple[str, str]]:
        """(path, mask) of the backgrounds to try for an image, in order."""
        ring = self.rings.get(self.split_of.get(id, ""))
        from_folder = self.fill == FOLDER
        return [
            (self.files[other], "" if from_folder else self.masks[other])
            for other in (ring.after(self.seed, id) if ring else ())
        ]

    def replaced(self, image: Image.Image, id: str, decode: Decode) -> tuple[Image.Image, str]:
        """The picture on another background, and the record of what it was made of (`Beside`) as text.

        Raises `DecodeError` for a mask that is missing, empty, full or of another shape, a picture that is
        too large, and where no background can be used.
        """
        if id not in self.masks:
            raise DecodeError(f"no mask: no {' or '.join(mask_names(id))} in {self.folder}")
        contents, beside = _Bytes(), Beside(self.masks[id])
        share = read_mask(beside.mask, image.size, contents)
        front = own_colours(image, share)
        if self.fill in PLAIN:
            made = paste(front, share, _plain(self.fill, image.size, self.seed, id))
            return made, contents.told(beside).text
        reasons = []
        for tried in self.candidates(id):
            beside = replace(beside, backgrounds=(*beside.backgrounds, tried))
            try:
                behind = _behind(*tried, image.size, decode, contents)
            except DecodeError as error:
                reasons.append(f"{os.path.basename(tried[0])}: {error.reason}")  # noqa: PTH119
                continue
            return paste(front, share, behind), contents.told(beside).text
        raise DecodeError(f"no background can be used: {listing(reasons, 2)}" if reasons else NO_OTHER)

    def still(self, id: str, text: str, *, verify: bool) -> str | None:
        """The record of a view if the same files would make it again; None if it is to be made anew.

        Paths, sizes and times decide; if only sizes or times differ, or with ``verify``, the contents do.
        """
        old = Beside.of(text)
        if old is None or self.masks.get(id) != old.mask:
            return None
        if tuple(self.candidates(id)[: len(old.backgrounds)]) != old.backgrounds:
            return None
        if not verify and digest_of([look_up(path) for path in old.paths]) == old.facts:
            return text
        new = _Bytes().told(old)
        return new.text if new.sha256 == old.sha256 else None


def again(image: Image.Image, id: str, text: str, view: Mapping[str, Any], decode: Decode) -> Image.Image:
    """A view as it was made, by the record in its store; raises `DecodeError` if files are missing."""
    beside, contents = Beside.of(text), _Bytes()
    if beside is None:
        raise DecodeError("the store doesn't say what it was made of")
    share = read_mask(beside.mask, image.size, contents)
    front = own_colours(image, share)
    if not beside.backgrounds:
        return paste(front, share, _plain(view["backgrounds"], image.size, view["seed"], id))
    return paste(front, share, _behind(*beside.backgrounds[-1], image.size, decode, contents))


def _behind(path: str, mask: str, size: tuple[int, int], decode: Decode, contents: _Bytes) -> Image.Image:
    """A background for a picture of ``size``: a file, without the object that its mask shows, if any."""
    place = decode(contents[path])
    _refuse_large(place.size)
    try:
        covering = cover(place, size)
        if not mask:
            return covering
        share = Image.fromarray(
            np.rint(255 * read_mask(mask, place.size, contents, empty=True)).astype(np.uint8)
        )
        return without_object(covering, np.asarray(cover(share, size, Image.Resampling.BILINEAR)) / 255)
    except InputError as error:
        raise DecodeError(error.what) from None


def _plain(fill: str, size: tuple[int, int], seed: int, id: str) -> Image.Image:
    if fill == "grey":
        return Image.new("RGB", size, (GREY, GREY, GREY))
    rng = np.random.Generator(np.random.PCG64(int.from_bytes(_hash(seed, f"noise\0{id}"), "big")))
    colours = rng.integers(0, 256, (NOISE_SIDE, NOISE_SIDE, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC)


def _refuse_large(size: tuple[int, int]) -> None:
    if size[0] * size[1] > MAX_COVER_PIXELS:
        raise DecodeError(
            f"{size[0]:,} × {size[1]:,} pixels, over the limit of {MAX_COVER_PIXELS:,} for another background"
        )


NO_OTHER = "no background: no other image of its split has a mask"

FOLDER, PLAIN = "folder", ("grey", "noise")
"""Kinds of backgrounds: those of ``--backgrounds``, and those that need no picture."""


def read_backgrounds(options: EmbedOptions, manifest: Manifest) -> tuple[Backgrounds | None, list[str]]:
    """What the options say of backgrounds, with notes; None without ``--augment background``.

    Raises `InputError` if the folder of masks has none for these images, and `UsageError` for images that
    aren't local files.
    """
    if BACKGROUND not in dict(parse_augment(options.augment)):
        return None, []
    assert options.masks is not None and manifest.files is not None
    local = [options.masks, *([options.backgrounds] if options.backgrounds else [])]
    far = [as_written(path) for path in local if is_remote(as_written(path))]
    far += [
        file.path for file in manifest.files if is_remote(file.path) or archive_of(file.path) != file.path
    ]
    if far:
        raise UsageError(
            "--augment background takes local files only",
            found=listing(map(printable, far), 3),
            expected="images and masks in folders of this machine, no archives and no addresses",
            fix="unpack or download them first",
        )
    base = absolute_text(options.masks)
    names, _ = walk_images(Path(base))
    mask_files = set(names)
    masks = {}
    for id in manifest.ids:
        if name := next((name for name in mask_names(id) if name in mask_files), None):
            masks[id] = os.path.join(base, name)  # noqa: PTH118
    if not masks:
        raise InputError(
            "none of the images has a mask",
            where=options.masks,
            found=listing(map(printable, names), 3),
            expected=f"masks named by the images' ids: {mask_names(manifest.ids[0])[-1]}",
        )
    left = len(mask_files) - len({*masks.values()})
    notes = [f"{left:,} masks belong to no image"] if left else []
    made = Backgrounds(fill_of(options), options.seed, str(options.masks), masks)
    if options.backgrounds is not None:
        place = absolute_text(options.backgrounds)
        background_names = walk_images(Path(place))[0]
        files = {name: os.path.join(place, name) for name in background_names}  # noqa: PTH118
        return replace(made, rings={"": Ring.over(background_names, options.seed)}, files=files), notes
    if made.fill in PLAIN:
        return made, notes
    splits = manifest.text.get(manifest.split_column or "", [""] * len(manifest))
    split_of = dict(zip(manifest.ids, splits, strict=True))
    pools: dict[str, list[str]] = {}
    for id in masks:
        pools.setdefault(split_of[id], []).append(id)
    rings = {split: Ring.over(ids, options.seed) for split, ids in pools.items()}
    paths = {file.id: file.path for file in manifest.files}
    return replace(made, rings=rings, files=paths, split_of=split_of), notes


def fill_of(options: EmbedOptions) -> str:
    """What replaces backgrounds, as the fingerprint has it."""
    return FOLDER if options.backgrounds is not None else options.fill


def mask_names(id: str) -> list[str]:
    """The names that the mask of an image may have in the folder of masks, the most specific first.

    ``a.jpg.png`` and ``a.png`` for the id ``a.jpg``; ``v1.5.png`` for ``v1.5``.
    """
    id = id.lstrip("/")
    stem, suffix = os.path.splitext(id)  # noqa: PTH122
    return [f"{id}.png", *([f"{stem}.png"] if suffix.lower() in IMAGE_SUFFIXES else [])]


def read_mask(
    path: str, size: tuple[int, int], contents: Mapping[str, bytes], *, empty: bool = False
) -> npt.NDArray[np.float64]:
    """The object's share (h, w) of each pixel of a picture of ``size`` (width, height).

    A mask of another size is resized with antialiasing. It is of the picture as it is shown, its EXIF
    orientation applied. Raises `DecodeError` for one that is no mask of such a picture; ``empty`` allows one
    without an object.
    """
    _refuse_large(size)
    name = os.path.basename(path)  # noqa: PTH119
    try:
        picture = decode(contents[path])
    except DecodeError as error:
        raise DecodeError(f"its mask {name}: {error.reason}") from None
    colours = np.asarray(picture, np.int16)
    if np.ptp(colours, axis=2).max() > MAX_TINT:
        raise DecodeError(
            f"its mask {name} is a coloured picture; a mask is grey, the object white on black "
            "(of a cut-out, its alpha channel)"
        )
    mask = picture.convert("L")
    levels = np.asarray(mask)
    low, high = int(levels.min()), int(levels.max())
    if high < HALF and not (empty and not high):
        least = f" (its greatest value is {high}; the object is 255)" if high else ""
        raise DecodeError(f"its mask {name} is empty{least}")
    if low >= HALF:
        raise DecodeError(
            f"its mask {name} is full: no background is left; the object is white on black, and "
            "transparency doesn't count"
        )
    (width, height), (w, h) = size, mask.size
    if abs(w * height - h * width) > max(width, height) + max(w, h):  # a pixel more or less is rounding
        turned = ", turned: masks are of pictures as EXIF turns them" if (h, w) == size else ""
        raise DecodeError(
            f"its mask {name} has another shape{turned}: {w} × {h}, where the picture is {width} × {height}"
        )
    if mask.size != size:
        mask = mask.resize(
            size, Image.Resampling.BILINEAR
        )  # it doesn't overshoot at edges, and averages when it reduces
    return np.asarray(mask) / 255


def cover(
    place: Image.Image, size: tuple[int, int], resample: Image.Resampling = Image.Resampling.LANCZOS
) -> Image.Image:
    """``place`` resized and centrally cropped so that it fills ``size`` (width, height) exactly.

    A place smaller than the picture in either direction is enlarged first.
    """
    width, height = size
    if place.width < width or place.height < height:
        enlarge = max(width / place.width, height / place.height)
        larger = (max(width, int(place.width * enlarge)), max(height, int(place.height * enlarge)))
        if larger[0] * larger[1] > MAX_COVER_PIXELS:
            raise InputError(
                "a background too narrow to fill the picture",
                found=f"{place.width} × {place.height}",
                expected=f"sides of a shape like {width} × {height}",
            )
        place = place.resize(larger, resample)
    if place.width / place.height > width / height:
        offset = (place.width - int(width / height * place.height)) // 2
        box = (offset, 0, place.width - offset, place.height)
    else:
        offset = (place.height - int(place.width / (width / height))) // 2
        box = (0, offset, place.width, place.height - offset)
    return place.crop(box).resize(size, resample)


def paste(front: Image.Image, mask: npt.NDArray[np.float64], place: Image.Image) -> Image.Image:
    """The picture (RGB) where ``mask`` (h, w, values in [0, 1]) is 1, the place (RGB) where it is 0.

    Pasting follows Sagawa et al., Distributionally Robust Neural Networks for Group Shifts (2020).
    """
    share = mask[..., None]
    front_part = np.around(np.asarray(front) * share)
    place_part = np.around(np.asarray(cover(place, front.size)) * (1 - share))
    # Both parts are rounded, as by the authors, so the sum may exceed 255 by one on a soft edge.
    return Image.fromarray(np.minimum(front_part + place_part, 255).astype(np.uint8))


def own_colours(image: Image.Image, share: npt.NDArray[np.float64]) -> Image.Image:
    """The picture with the object's own colours at its soft edges; ``share`` (h, w) is the object's.

    There a pixel is share · object + (1 − share) · background. `without_object` estimates the background. If
    the picture were pasted unchanged, the old background would remain as a seam.
    """
    edge = (share > 0) & (share < 1)
    if not edge.any():
        return image
    try:
        behind = np.asarray(without_object(image, share), np.float64)
    except DecodeError:  # nothing to estimate it from
        return image
    pixels, part = np.asarray(image).copy(), share[edge][:, None]
    object_colours = (pixels[edge] - (1 - part) * behind[edge]) / part
    pixels[edge] = np.clip(np.rint(object_colours), 0, 255).astype(np.uint8)
    return Image.fromarray(pixels)


def without_object(image: Image.Image, share: npt.NDArray[np.float64]) -> Image.Image:
    """The picture with its object filled in from what surrounds it; ``share`` (h, w) is the object's.

    The known pixels are averaged over squares of 2, 4, 8 ... pixels, and each unknown one takes the finest
    average that there is ("pull-push": Gortler et al., The Lumigraph, 1996). Raises `DecodeError` where the
    object, grown by `EDGE_SHARE`, leaves nothing.
    """
    reach = max(1, round(EDGE_SHARE * min(image.size)))
    weight = (_grown(share.astype(np.float32), reach) < MAX_MIXED).astype(np.float32)[..., None]
    if not weight.any():
        raise DecodeError("its object leaves no background")
    levels = [(np.asarray(image, np.float32) * weight, weight)]
    while max(levels[-1][1].shape[:2]) > 1:
        levels.append(_halved(*levels[-1]))
    colour = levels[-1][0] / np.maximum(levels[-1][1], np.finfo(np.float32).tiny)
    for summed, known in reversed(levels[:-1]):
        height, width = known.shape[:2]
        coarse = np.stack(
            [
                np.asarray(Image.fromarray(part).resize((width, height), Image.Resampling.BILINEAR))
                for part in np.moveaxis(colour, 2, 0)
            ],
            axis=2,
        )
        colour = summed + (1 - known) * coarse  # weights are at most 1
    return Image.fromarray(np.clip(np.rint(colour), 0, 255).astype(np.uint8))


def _grown(share: npt.NDArray[np.float32], reach: int) -> npt.NDArray[np.float32]:
    """The greatest of the values within ``reach`` rows and columns of each."""
    for axis in (0, 1):
        width = 0
        while width < reach:
            step = min(2 * width + 1, reach - width)
            pads = [(step, step) if at == axis else (0, 0) for at in (0, 1)]
            padded, length = np.pad(share, pads), share.shape[axis]
            shifted = [np.take(padded, range(at, at + length), axis) for at in (0, 2 * step)]
            share, width = np.maximum(share, np.maximum(*shifted)), width + step
    return share


def _halved(
    summed: npt.NDArray[np.float32], known: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Weighted colours and weights of squares of 2 × 2 pixels; one known pixel is enough for a square."""
    height, width = known.shape[:2]
    pads = ((0, height % 2), (0, width % 2), (0, 0))
    total, weight = (
        padded[::2, ::2] + padded[1::2, ::2] + padded[::2, 1::2] + padded[1::2, 1::2]
        for padded in (np.pad(summed, pads), np.pad(known, pads))
    )
    scale = 1 / np.maximum(weight, np.float32(1))
    return total * scale, weight * scale
