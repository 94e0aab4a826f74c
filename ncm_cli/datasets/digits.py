"""Coloured digits: IRM's ColoredMNIST protocol on the 1,797 8×8 digits that scikit-learn ships."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ncm_cli.datasets.coloring import counts, plan, write_images, write_tables
from ncm_cli.datasets.folder import Built, building
from ncm_cli.options.data import DigitsOptions
from ncm_cli.options.spec import as_json, check
from ncm_cli.progress import Reporter


def build(options: DigitsOptions, reporter: Reporter) -> Built:
    """Write the data set: no download.

    Test digits never occur in training, validation or pairs. Pairs to learn from are made of training
    digits, held-out pairs of digits that are neither in training nor in validation.
    """
    check(options)
    digits, target = _load_digits()
    gray = np.round(digits.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    rng = np.random.default_rng(options.seed)
    order = rng.permutation(len(target))
    n_test = round(len(target) * options.test_fraction)
    made = plan(target.astype(np.int64), order[n_test:], order[:n_test], options, rng)
    with building(options.output, "digits", as_json(options)) as folder:
        files = write_tables(folder, made)
        with reporter.task("digits", total=len(made.rows), unit="images") as task:
            for _ in write_images(folder, gray, made.rows):
                task.advance()
    return Built(
        builder="digits",
        output=options.output,
        files={role: options.output / name for role, name in files.items()},
        facts={"rows": len(made.rows), "pairs": len(made.pairs), "seed": options.seed},
        tables=(counts(made),),
    )


def _load_digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """What scikit-learn's ``load_digits`` returns: pixels (1797, 64) from 0 to 16, and digits (1797,).

    Its file is read without importing scikit-learn, which takes longer than all the rest.
    """
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    pixels, target = load_digits(return_X_y=True)
    return pixels, target
