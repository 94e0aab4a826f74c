"""scikit-learn estimators of noisy counterfactual matching.

Differences of pairs come as in the paper and in a pair store: ``delta`` (d, k), one column a pair.
"""

from __future__ import annotations

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
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from ncm_cli.errors import InputError
from ncm_cli.methods.path import Fit, fit_path
from ncm_cli.methods.projection import Spectrum, project, spectrum
from ncm_cli.options.fit import MAX_ITER

Array = NDArray[np.float64]


class _Linear(BaseEstimator):
    """What classifier and regressor share: parameters, pairs, decision function."""

    def __init__(
        self,
        rank: int | None = None,
        *,
        weight_decay: float = 1e-4,
        tol: float = 1e-12,
        max_iter: int = MAX_ITER,
    ) -> None:
        self.rank = rank
        self.weight_decay = weight_decay
        self.tol = tol
        self.max_iter = max_iter

    def _fit(
        self,
        X: Array,
        y: NDArray[Any],
        n_classes: int,
        pairs: ArrayLike | None,
        sample_weight: ArrayLike | None,
    ) -> None:
        from sklearn.utils.validation import _check_sample_weight

        weights = (
            None
            if sample_weight is None
            else _check_sample_weight(sample_weight, X, ensure_non_negative=True)
        )
        try:
            found = _spectrum_of(pairs, X.shape[1])
            rank = _resolve_rank(self.rank, found)
            fit = fit_path(
                X,
                y,
                n_classes,
                found.basis,
                [rank],
                [self.weight_decay],
                weights=weights,
                task="classification" if n_classes else "regression",
                tolerance=self.tol,
                max_iter=self.max_iter,
            )[0]
        except InputError as error:
            raise ValueError(str(error)) from error
        self._remember(fit, found)

    def _remember(self, fit: Fit, found: Spectrum) -> None:
        if not fit.converged:
            import warnings

            warnings.warn(
                f"the gradient's norm is {fit.gradient_norm:.1e} after {fit.iterations} iterations: raise "
                "max_iter, or weight_decay",
                ConvergenceWarning,
                stacklevel=4,
            )
        self.coef_, self.intercept_ = fit.weight, fit.bias
        self.rank_, self.n_iter_ = fit.rank, max(fit.iterations, 1)
        self.basis_ = found.basis[:, : fit.rank]
        self.singular_values_ = found.singular_values[: found.rank]

    def _scores(self, X: ArrayLike) -> Array:
        check_is_fitted(self)
        return np.asarray(
            validate_data(self, X, reset=False, dtype=np.float64) @ self.coef_.T + self.intercept_
        )


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
        spectrum (all where there is none), 0 without pairs. The right rank depends on the noise: ``ncm fit``
        chooses it by folds of pairs. Cross-validated accuracy prefers small ranks, since spurious features
        help in-domain.
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
    In a Pipeline, pairs must be given in the space that the classifier sees. GridSearchCV passes ``pairs`` on
    whole, except when there are exactly as many rows as features: it then takes them for one value a row.

    Examples
    --------
    >>> import numpy as np
    >>> from ncm_cli import NCMClassifier
    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(2, size=200)
    >>> X = rng.normal(size=(200, 5)) + 3 * y[:, None] * np.eye(5)[0] + y[:, None] * np.eye(5)[1]
    >>> pairs = np.eye(5)[:, :1] * rng.normal(size=20)  # they differ in the first feature only
    >>> model = NCMClassifier().fit(X, y, pairs=pairs)
    >>> model.rank_, bool(abs(model.coef_[0, 0]) < 1e-9)
    (1, True)
    """

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        pairs: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> NCMClassifier:
        """Fit on rows X (n, d) and classes y; ``pairs`` (d, k) holds one difference a column."""
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
        from ncm_cli.methods.metrics import probabilities

        return probabilities(self._scores(X))

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Classes (n,)."""
        from ncm_cli.methods.metrics import decide

        codes = decide(self._scores(X))
        return np.asarray(self.classes_[codes])


class NCMRegressor(RegressorMixin, _Linear):
    """Ridge regression that can't see what pairs differ in.

    Minimises ``mean (y - f)^2 + weight_decay |w|^2`` over weights orthogonal to the top ``rank`` directions
    of the pairs' differences; rank 0 is scikit-learn's ``Ridge(alpha=n_samples * weight_decay)``. Parameters
    and attributes are those of `NCMClassifier`; ``tol`` and ``max_iter`` have no effect: the solution is
    direct.
    """

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        pairs: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> NCMRegressor:
        """Fit on rows X (n, d) and values y (n,); ``pairs`` (d, k) holds one difference a column."""
        rows, values = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        self._fit(rows, np.asarray(values, np.float64), 0, pairs, sample_weight)
        self.coef_, self.intercept_ = self.coef_[0], self.intercept_[0]
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Values (n,)."""
        return self._scores(X)


class SpuriousProjection(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """Removes from features the top directions of pairs' differences: ``x - Q Q^T x``.

    It is fitted on differences, not on rows: in a Pipeline, wrap a fitted one in scikit-learn's
    ``FrozenEstimator``.

    Parameters
    ----------
    rank : int or None, default=None
        Directions to remove; None: up to the largest gap in the spectrum, all where there is none.

    Attributes
    ----------
    basis_ : (n_features, rank_)
        Orthonormal; each column's largest entry is positive.
    singular_values_ : (numerical rank,)
    rank_ : int
    """

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank

    def fit(self, delta: ArrayLike, y: object = None) -> SpuriousProjection:
        """Find the directions of the differences ``delta`` (d, k), one a column."""
        columns = check_array(delta, dtype=np.float64)
        try:
            found = spectrum(columns)
            self.rank_ = _resolve_rank(self.rank, found)
        except InputError as error:
            raise ValueError(str(error)) from error
        self.n_features_in_ = len(columns)
        self.basis_ = found.basis[:, : self.rank_]
        self.singular_values_ = found.singular_values[: found.rank]
        return self

    def transform(self, X: ArrayLike) -> Array:
        """Rows (n, d) without what they have in these directions."""
        check_is_fitted(self)
        return project(validate_data(self, X, reset=False, dtype=np.float64), self.basis_)


def _spectrum_of(pairs: ArrayLike | None, d: int) -> Spectrum:
    if pairs is None:
        return spectrum(np.zeros((d, 0)))
    delta = np.asarray(pairs, np.float64)
    if delta.ndim != 2 or delta.shape[0] != d:
        turned = delta.ndim == 2 and delta.shape[1] == d
        raise InputError(
            "pairs have another number of features than X",
            found=f"shape {delta.shape}",
            expected=f"({d}, k): one difference a column",
            fix="pairs.T" if turned else None,
        )
    return spectrum(delta)


def _resolve_rank(asked: int | None, found: Spectrum) -> int:
    if asked is None:
        return found.gap or found.rank
    if isinstance(asked, bool) or asked != int(asked) or not 0 <= asked <= found.rank:
        raise InputError(
            "a rank that the pairs don't have", found=asked, expected=f"a whole number from 0 to {found.rank}"
        )
    return int(asked)
