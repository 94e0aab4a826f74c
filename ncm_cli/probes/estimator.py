"""scikit-learn estimators of noisy counterfactual matching.

Pairs are given by their members, rows like those of X: two arrays ``(A, B)`` of shape (k, d), row i of B
being the counterpart of row i of A, or a `PairStore`, whose held-out pairs are not used; or by a list of
these, whose differences make one spectrum. Differences alone are refused, because steps of a pipeline
couldn't transform them as they transform rows. Pipelines: see ``ncm help api``. Scalers must come before a
projection: after it, they would magnify the rounding that it leaves.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    OneToOneFeatureMixin,
    RegressorMixin,
    TransformerMixin,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_array, check_is_fitted, validate_data

from ncm_cli.blocks import Array
from ncm_cli.errors import InputError
from ncm_cli.probes.metrics import decide, probabilities
from ncm_cli.solvers.methods import MAX_ITER, WEIGHT_DECAY
from ncm_cli.solvers.path import fit_path
from ncm_cli.solvers.projection import Spectrum, project, spectrum
from ncm_cli.store.pairs import PairStore

PairsOfOneKind = tuple[ArrayLike, ArrayLike] | PairStore
Pairs = PairsOfOneKind | Sequence[PairsOfOneKind] | None

LEAST_PAIRS_COMPARED = 8
"""Fewest pairs whose members' spread is compared with the spread of X."""

LARGEST_SPREAD_FACTOR = 2.0
"""Pairs whose spread differs from the spread of X by more than this factor were scaled differently. On
digits, MNIST's pixels and PACS by EfficientNet the factor was 1.05 to 1.27 for pairs scaled like X, and 3.1
to 7 for raw pairs with standardised rows."""


class _Linear(BaseEstimator):
    """Base of classifier and regressor: parameters, pairs, decision function."""

    def __init__(
        self,
        rank: int | None = None,
        *,
        pairs: Pairs = None,
        weight_decay: float = WEIGHT_DECAY,
        tol: float = 1e-12,
        max_iter: int = MAX_ITER,
    ) -> None:
        self.rank = rank
        self.pairs = pairs
        self.weight_decay = weight_decay
        self.tol = tol
        self.max_iter = max_iter

    def _fit(self, X: Array, y: NDArray[Any], n_classes: int, pairs: Pairs, sample_weight: Any) -> None:
        weights: Any = None
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, X, ensure_non_negative=True)
        with _as_value_errors():
            directions, rank = _directions(self, pairs, X)
            fit = fit_path(
                X,
                y,
                n_classes,
                directions.basis,
                [rank],
                [self.weight_decay],
                weights=weights,
                task="classification" if n_classes else "regression",
                tolerance=self.tol,
                max_iter=self.max_iter,
            )[0]
        if not fit.converged:
            warnings.warn(
                f"the gradient's norm is {fit.gradient_norm:.1e} after {fit.iterations} iterations: raise "
                "max_iter, or weight_decay",
                ConvergenceWarning,
                stacklevel=3,
            )
        self.coef_, self.intercept_ = fit.weight, fit.bias
        self.rank_, self.n_iter_ = rank, max(fit.iterations, 1)
        self.basis_, self.singular_values_ = (
            directions.basis[:, :rank],
            directions.singular_values[: directions.rank],
        )

    def _scores(self, X: ArrayLike) -> Array:
        check_is_fitted(self)
        rows: Array = validate_data(self, X, reset=False, dtype=np.float64)
        return rows @ self.coef_.T + self.intercept_


class NCMClassifier(ClassifierMixin, _Linear):
    """Logistic regression that can't see what pairs differ in.

    Minimises ``mean loss + weight_decay/2 |W|^2`` (the intercept left free) over weights orthogonal to the
    top ``rank`` directions of the pairs' differences: Bai et al., Noisy Counterfactual Matching, equation 4.
    Two classes: logistic loss. More: softmax cross-entropy. Rank 0 is scikit-learn's LogisticRegression with
    ``C = 1 / (n_samples * weight_decay)``.

    Parameters
    ----------
    rank : int or None, default=None
        Directions to remove, at most the pairs' numerical rank. None: up to the largest gap in their
        spectrum (all if there is none), 0 without pairs. The right rank depends on the noise: ``ncm fit``
        chooses it by folds of pairs. Cross-validated accuracy prefers small ranks, since spurious features
        help in-domain.
    pairs : (A, B), PairStore or a list of these, default=None
        Pairs in the space of the rows that `fit` sees; or give them to `fit`.
    weight_decay : float, default=1e-4
    tol : float, default=1e-12
        Gradient norm to reach, relative to the rows' root mean square norm.
    max_iter : int, default=1000

    Attributes
    ----------
    coef_ : (1 or n_classes, n_features)
        Orthogonal to ``basis_``.
    intercept_ : (1 or n_classes,)
    classes_ : (n_classes,)
    basis_ : (n_features, rank_)
    singular_values_ : (numerical rank,)
    rank_, n_iter_ : int

    Notes
    -----
    In a Pipeline, steps before the classifier transform the pairs too if they are routed to it: see
    ``ncm help api``. GridSearchCV passes on all pairs to every fit. `fit` warns if the members of pairs are
    spread differently from the rows, as they are if the rows are scaled and the pairs aren't.

    Examples
    --------
    >>> import numpy as np
    >>> from ncm_cli import NCMClassifier
    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(2, size=200)
    >>> X = rng.normal(size=(200, 5)) + 3 * y[:, None] * np.eye(5)[0] + y[:, None] * np.eye(5)[1]
    >>> A, B = X[:20], X[:20] + np.eye(5)[0] * rng.normal(size=(20, 1))  # the first feature differs
    >>> model = NCMClassifier().fit(X, y, pairs=(A, B))
    >>> model.rank_, bool(abs(model.coef_[0, 0]) < 1e-9)
    (1, True)
    """

    def fit(
        self, X: ArrayLike, y: ArrayLike, pairs: Pairs = None, sample_weight: ArrayLike | None = None
    ) -> NCMClassifier:
        """Fit on rows X (n, d) and classes y; ``pairs`` replace those given at construction."""
        rows, labels = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("only one class in y: a classifier needs samples of at least two classes")
        self._fit(rows, codes, len(self.classes_), pairs, sample_weight)
        return self

    def decision_function(self, X: ArrayLike) -> Array:
        """Logits: (n,) of ``classes_[1]`` for two classes, else (n, n_classes)."""
        scores = self._scores(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict_proba(self, X: ArrayLike) -> Array:
        """Probabilities (n, n_classes), in the order of ``classes_``."""
        return probabilities(self._scores(X))

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Classes (n,)."""
        codes = decide(self._scores(X))  # which raises an error before `fit`
        return np.asarray(self.classes_[codes])


class NCMRegressor(RegressorMixin, _Linear):
    """Ridge regression that can't see what pairs differ in.

    Minimises ``mean (y - f)^2 + weight_decay |w|^2`` over weights orthogonal to the top ``rank`` directions
    of the pairs' differences; rank 0 is scikit-learn's ``Ridge(alpha=n_samples * weight_decay)``. Parameters
    and attributes are those of `NCMClassifier`; ``tol`` and ``max_iter`` have no effect: the solution is
    direct.
    """

    def fit(
        self, X: ArrayLike, y: ArrayLike, pairs: Pairs = None, sample_weight: ArrayLike | None = None
    ) -> NCMRegressor:
        """Fit on rows X (n, d) and values y (n,); ``pairs`` replace those given at construction."""
        rows, values = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        self._fit(rows, np.asarray(values, np.float64), 0, pairs, sample_weight)
        self.coef_, self.intercept_ = self.coef_[0], self.intercept_[0]
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Values (n,)."""
        return self._scores(X)


class SpuriousProjection(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """Removes the top directions of pairs' differences from features: ``x - Q Q^T x``.

    Parameters
    ----------
    rank : int or None, default=None
        Directions to remove; None: up to the largest gap in the spectrum, all if there is none.
    pairs : (A, B), PairStore or a list of these, default=None
        Pairs in the space of the rows that `transform` sees; or give them to `fit`. One of the two is needed.

    Attributes
    ----------
    basis_ : (n_features, rank_)
        Orthonormal; each column's largest entry is positive.
    singular_values_ : (numerical rank,)
    rank_ : int
    """

    def __init__(self, rank: int | None = None, *, pairs: Pairs = None) -> None:
        self.rank = rank
        self.pairs = pairs

    def fit(self, X: ArrayLike | None = None, y: object = None, pairs: Pairs = None) -> SpuriousProjection:
        """Find the directions of the pairs; rows X (n, d) are only used to check the pairs' spread."""
        rows = None if X is None else validate_data(self, X, dtype=np.float64)
        with _as_value_errors():
            if self.pairs is None and pairs is None:
                raise InputError(
                    "a projection is fitted on pairs, not on rows or differences",
                    expected="SpuriousProjection(pairs=(A, B)).fit(X): two arrays of rows, or a PairStore",
                )
            directions, self.rank_ = _directions(self, pairs, rows)
        self.n_features_in_ = len(directions.basis)
        self.basis_ = directions.basis[:, : self.rank_]
        self.singular_values_ = directions.singular_values[: directions.rank]
        return self

    def transform(self, X: ArrayLike) -> Array:
        """Rows (n, d) with these directions projected out."""
        check_is_fitted(self)
        return project(validate_data(self, X, reset=False, dtype=np.float64), self.basis_)


@contextmanager
def _as_value_errors() -> Iterator[None]:
    """Turn errors into the `ValueError` that scikit-learn expects for unusable input."""
    try:
        yield
    except InputError as error:
        raise ValueError(str(error)) from error


def _directions(
    estimator: _Linear | SpuriousProjection, pairs: Pairs, X: Array | None
) -> tuple[Spectrum, int]:
    """The spectrum of an estimator's pairs, and the rank to remove."""
    if pairs is not None and estimator.pairs is not None:
        raise InputError("pairs both at construction and in fit", fix="leave one of them out")
    given = estimator.pairs if pairs is None else pairs
    if given is None:
        assert X is not None
        directions = spectrum(np.zeros((X.shape[1], 0)))
    else:
        a, b = _members(given, X)
        magnitude = float(np.sqrt((np.mean(a**2) + np.mean(b**2)) / 2))
        directions = spectrum((a - b).T, magnitude=magnitude)
    rank = estimator.rank
    if rank is None:
        return directions, directions.gap or directions.rank
    if isinstance(rank, bool) or rank != int(rank) or not 0 <= rank <= directions.rank:
        raise InputError(
            "a rank that the pairs don't have",
            found=rank,
            expected=f"a whole number from 0 to {directions.rank}",
        )
    return directions, int(rank)


def _members(pairs: Any, X: Array | None) -> tuple[Array, Array]:
    """Both members (k, d) of each pair, of all kinds; warns if they seem to be scaled differently from X."""
    several = isinstance(pairs, tuple | list) and bool(pairs) and all(map(_is_one_kind, pairs))
    kinds = [_members_of(kind) for kind in (pairs if several else [pairs])]
    for (a, b), (other_a, other_b) in itertools.combinations(kinds, 2):
        if np.array_equal(a, other_a) and np.array_equal(b, other_b):
            raise InputError("the same pairs are given twice", found=f"two kinds of {len(a):,} equal pairs")
    width = len(kinds[0][0][0]) if X is None else X.shape[1]
    for a, _ in kinds:
        if a.shape[1] != width:
            raise InputError(
                "pairs have a different number of features than " + ("other pairs" if X is None else "X"),
                found=f"members of shape {a.shape}",
                expected=f"(k, {width})",
            )
    a, b = kinds[0] if len(kinds) == 1 else (np.concatenate(members) for members in zip(*kinds, strict=True))
    if X is None:
        return a, b
    of_pairs, of_rows = np.vstack([a, b]).std(axis=0), X.std(axis=0)
    varying = (of_pairs > 0) & (of_rows > 0)
    ratios = np.abs(np.log(of_pairs[varying] / of_rows[varying]))
    factor = float(np.exp(np.median(ratios))) if len(a) >= LEAST_PAIRS_COMPARED and varying.any() else 1.0
    if factor > LARGEST_SPREAD_FACTOR:
        warnings.warn(
            f"the features of pairs' members are typically spread {factor:.2g} times more or less widely "
            "than those of X: the pairs must be scaled as the rows are, by routing them with "
            "transform_input (see ncm help api)",
            stacklevel=5,
        )
    return a, b


def _is_one_kind(pairs: Any) -> bool:
    """Whether ``pairs`` are pairs of one kind, and not an array of first or of second members."""
    if isinstance(pairs, tuple | list) and len(pairs) == 2:
        return all(np.ndim(members) == 2 for members in pairs)
    return isinstance(pairs, PairStore)


def _members_of(pairs: Any) -> tuple[Array, Array]:
    """Both members (k, d) of pairs of one kind."""
    if isinstance(pairs, PairStore):
        pairs = (pairs.features_a[~pairs.holdout], pairs.features_b[~pairs.holdout])
    if not (isinstance(pairs, tuple | list) and len(pairs) == 2):
        shape = getattr(pairs, "shape", None)
        raise InputError(
            "pairs are given by their members, not by differences",
            found=type(pairs).__name__ if shape is None else f"an array of shape {shape}",
            expected="pairs=(A, B), two arrays of rows (k, d), or a PairStore, or a list of these",
            fix="give the PairStore instead of its delta, or (A, B) instead of (A - B).T",
        )
    a, b = (check_array(rows, dtype=np.float64, input_name="pairs") for rows in pairs)
    if a.shape != b.shape:
        raise InputError(
            "the two members of pairs have different shapes",
            found=f"{a.shape} and {b.shape}",
            expected="two arrays of one shape (k, d)",
        )
    return a, b
