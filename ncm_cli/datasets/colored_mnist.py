"""ColoredMNIST: IRM's protocol on MNIST's own files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from ncm_cli.datasets.coloring import Plan, Row, counts, paint, plan, write_images, write_tables
from ncm_cli.datasets.folder import Built, building
from ncm_cli.datasets.idx import read_split
from ncm_cli.errors import InputError, UsageError
from ncm_cli.options.data import ColoredMnistOptions
from ncm_cli.options.spec import as_json, check
from ncm_cli.progress import Reporter

SIDE = 28

PACKED = "pixels.npy"


def build(options: ColoredMnistOptions, reporter: Reporter) -> Built:
    """Write the data set.

    Training and validation digits are drawn from MNIST's training files, test digits from its test files.
    Pairs to learn from are made of training digits, held-out pairs of digits that are neither in training nor
    in validation.
    """
    check(options)
    folder = _source(options, reporter)
    images, digits = read_split(folder, "train")
    test_images, test_digits = read_split(folder, "t10k")
    for which in (images, test_images):
        if which.shape[1:] != (SIDE, SIDE):
            raise InputError(
                "images of another size", where=folder, found=which.shape[1:], expected=(SIDE, SIDE)
            )
    rng = np.random.default_rng(options.seed)
    train = _drawn(len(digits), options.train_digits, "--train-digits", rng)
    test = _drawn(len(test_digits), options.test_digits, "--test-digits", rng) + len(digits)
    made = plan(np.concatenate([digits, test_digits]), train, test, options, rng)
    gray = _shrunk(np.concatenate([images, test_images]), options.size)
    files = _write(options, made, gray, reporter)
    return Built(
        builder="colored-mnist",
        output=options.output,
        files={role: options.output / name for role, name in files.items()},
        facts={"rows": len(made.rows), "pairs": len(made.pairs), "seed": options.seed},
        tables=(counts(made),),
    )


def _shrunk(images: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    """Images (n, 28, 28) as they are, or as (n, 14, 14) means of 2 × 2 pixels.

    IRM's authors take every other pixel instead; means keep more of the digit: a linear probe on grey digits
    gains .008.
    """
    if size == SIDE:
        return images
    blocks = images.reshape(len(images), size, 2, size, 2)
    return np.round(blocks.mean(axis=(2, 4))).astype(np.uint8)


def _write(
    options: ColoredMnistOptions, made: Plan, gray: npt.NDArray[np.uint8], reporter: Reporter
) -> dict[str, str]:
    with building(options.output, "colored-mnist", as_json(options)) as folder:
        files = write_tables(folder, made, with_path=not options.packed)
        with reporter.task("coloured digits", total=len(made.rows), unit="images") as task:
            if options.packed:
                _pack(folder / PACKED, gray, made.rows)
                files["pixels"] = PACKED
                task.advance(len(made.rows))
            else:
                for _ in write_images(folder, gray, made.rows):
                    task.advance()
    return files


def _pack(path: Path, gray: npt.NDArray[np.uint8], rows: list[Row]) -> None:
    """Red and green pixels of each row in [0, 1], (n, 2 · size²) float32, in manifest order."""
    pixels = 2 * gray.shape[1] * gray.shape[2]
    array = np.lib.format.open_memmap(path, "w+", dtype=np.float32, shape=(len(rows), pixels))
    for i, image in enumerate(paint(gray, rows)):
        array[i] = image[..., :2].reshape(-1)
    array /= 255
    array.flush()


def _drawn(available: int, count: int, name: str, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    if not 0 < count <= available:
        raise UsageError(f"{name} can't be met", found=count, expected=f"1 to {available:,}")
    return rng.permutation(available)[:count]


def _source(options: ColoredMnistOptions, reporter: Reporter) -> Path:
    if options.mnist is not None:
        return options.mnist
    from torchvision.datasets import MNIST

    folder = options.output.parent / "mnist"
    reporter.note(f"downloading MNIST to {folder}")
    try:
        MNIST(str(folder), download=True)
    except (OSError, RuntimeError) as error:
        raise InputError(
            "MNIST can't be downloaded",
            found=str(error).splitlines()[0],
            fix="get the files and give --mnist DIR",
        ) from None
    return folder
