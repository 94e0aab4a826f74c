"""The objectives of the methods, as gradients with respect to the logits, and the rows that a step sees.

Every model here is linear, z = Wx + b, so a method is known by ∂objective/∂z: one matrix product with the
features gives its gradient, the same product for all configurations at once. An objective replaces the
logits it is given by that derivative, in place.

Shapes: ``brc`` is (rows of the batch, configurations, logits), ``be`` is (rows, environments), ``er`` is
(environments, configurations). A binary problem has one logit, the positive class's.

Within a batch the risk of environment e is R_e = Σ w_i ℓ_i / Σ w_i over its rows in the batch (w = 1 unless
upweighted); an environment with no row in the batch is left out of that step.

Two comparators aren't trained by steps: dfr, and the eraser of leace.

DFR is deep feature reweighting: the last layer retrained on group-balanced rows (Kirichenko et al. 2023). It
is the variant on validation rows (DFR^Val_Tr, section 4), as in the authors' ``dfr_evaluate_spurious.py``:
random subsets in which every group has as many rows as the smallest, on each a logistic regression with an ℓ1
penalty, which liblinear puts on the intercept too, and the average of weights and intercepts.

C is chosen on one subset of half of the validation rows, with features standardised by that subset, by what
it says of the other half. What is tested are `SUBSETS` subsets of all validation rows with the same C,
standardised by the training rows. What differs from the authors' code moves the test rows' worst-group
accuracy by less than .005: the halves are drawn group by group, so that none lacks a group; liblinear's
tolerance is 1e-8 (theirs, 1e-4, leaves weights up to 1e-2 off); more than two classes are fitted one against
the rest.

LEACE makes features from which a column can no longer be told linearly (Belrose et al. 2023). Its eraser
x − L R (x − μ) is affine, so a probe on erased features is a probe on the features themselves.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ncm_cli.blocks import Features, applied, blocks, moments
from ncm_cli.errors import InputError
from ncm_cli.probes.path import Fit

if TYPE_CHECKING:
    from ncm_cli.baselines.options import Config
    from ncm_cli.baselines.trainer import Batch, DeviceRows


def generator_of(seed: int, stream: int) -> torch.Generator:
    """A generator of its own for each (seed, stream), so that one use never shifts another."""
    made = torch.Generator()
    made.manual_seed(int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0] >> 1))
    return made


def epoch_order(strata: Tensor | None, n: int, generator: torch.Generator) -> Tensor:
    """A random order of ``n`` rows in which every stratum (n,), if there are such, is spread evenly.

    Each stratum is shuffled and its rows are laid out at even distances with a random offset each, so
    that any stretch of the order holds every environment in proportion (to one row or so). A plain
    shuffle would leave steps with no row of a small environment, and its risk undefined there.
    """
    shuffled = torch.randperm(n, generator=generator)
    if strata is None:
        return shuffled
    codes = strata[shuffled]
    by_stratum = torch.argsort(codes, stable=True)
    counts = torch.bincount(codes)
    starts = torch.cumsum(counts, 0) - counts
    sorted_codes = codes[by_stratum]
    place = torch.arange(n) - starts[sorted_codes]
    jitter = torch.rand(n, generator=generator, dtype=torch.float64)
    position = (place + jitter) / counts[sorted_codes]
    return shuffled[by_stratum[torch.argsort(position, stable=True)]]


def epoch_batches(
    strata: Tensor | None, n: int, batch_size: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """The rows of each batch of an epoch that passes over every row once.

    At most ``batch_size`` rows a batch (0: all of them), the sizes equal to one row.
    """
    order = epoch_order(strata, n, generator)
    count = 1 if batch_size <= 0 else math.ceil(n / batch_size)
    for i in range(count):
        yield order[i * n // count : (i + 1) * n // count]


def drawn_batches(
    strata: Tensor | None, n: int, batch_size: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """DomainBed's: ``batch_size`` rows of each stratum, drawn with replacement, one stratum after another.

    As many batches as hold ``n`` rows. ``batch_size`` 0 is all rows in their order.
    """
    if batch_size <= 0:
        yield torch.arange(n)
        return
    members = (
        [torch.arange(n)] if strata is None else [(strata == e).nonzero()[:, 0] for e in strata.unique()]
    )
    for _ in range(math.ceil(n / (len(members) * batch_size))):
        yield torch.cat([own[torch.randint(len(own), (batch_size,), generator=generator)] for own in members])


def partners(primary: Tensor, secondary: Tensor, draws: Tensor) -> Tensor:
    """(B,) for each row a random one with the same ``primary`` and another ``secondary`` code (B,).

    ``draws`` (B,) are uniform in [0, 1). Rows that have no such partner are their own.
    """
    width = int(secondary.max()) + 1
    cells = primary * width + secondary
    order = torch.argsort(cells, stable=True)
    cell_counts = torch.bincount(cells, minlength=(int(primary.max()) + 1) * width)
    cell_starts = torch.cumsum(cell_counts, 0) - cell_counts
    own = cell_counts[cells]
    block = cell_counts.view(-1, width).sum(1)[primary]
    block_start = cell_starts.view(-1, width)[:, 0][primary]
    others = block - own
    pick = block_start + torch.minimum((draws * others).long(), (others - 1).clamp_min(0))
    pick = torch.where(pick >= cell_starts[cells], pick + own, pick)
    found = order[pick.clamp_max(len(order) - 1)]
    return torch.where(others > 0, found, torch.arange(len(order)))


def log_losses(logits_brc: Tensor, targets: Tensor) -> Tensor:
    """(B, R) logistic loss (one logit) or softmax cross-entropy, in nats."""
    if logits_brc.shape[-1] == 1:
        return (functional.softplus(logits_brc) - targets * logits_brc)[..., 0]
    return torch.logsumexp(logits_brc, -1) - (logits_brc * targets).sum(-1)


def probabilities_(logits_brc: Tensor) -> Tensor:
    """Sigmoid or softmax, in place."""
    if logits_brc.shape[-1] == 1:
        return logits_brc.sigmoid_()
    return logits_brc.copy_(torch.softmax(logits_brc, -1))


class Erm:
    """Empirical risk minimisation (Vapnik 1998): the (weighted) mean loss of all rows.

    Also the data term of ``ncm`` (whose rank constraint acts on the weights), of ``matchdg`` (whose penalty
    does), of ``leace`` and, one environment at a time, of ``fish``.
    """

    def __init__(self, configs: Sequence[Config], rows: DeviceRows, *, domainbed: bool) -> None:
        self.upweighted, self.domainbed = configs[0].upweighted, domainbed
        self.scale = rows.targets.new_ones(len(configs))
        """(R,) what each objective is multiplied by, weight decay included."""

    def residual_(self, logits_brc: Tensor, batch: Batch) -> None:
        """Replace the logits by ∂objective/∂logits."""
        residual = probabilities_(logits_brc).sub_(batch.targets)
        residual.mul_(batch.shares("pooled", self.upweighted)[:, :, None])

    def begin(self, step: int) -> Tensor | None:
        """(R,) bool: the configurations whose penalties begin at this step; None without."""
        return None


class _Annealed(Erm):
    """mean_e R_e + β · penalty, with β = 1 before step ``anneal`` and ``penalty`` from there on.

    Both published codes (Arjovsky's ColoredMNIST, DomainBed) use β = 1 before. Where β > 1 the whole
    objective, weight decay included, is divided by β as in Arjovsky's and Krueger's codes: it keeps the
    gradient's size, which a step size was chosen for. DomainBed's doesn't divide, and restarts Adam instead.
    """

    def __init__(self, configs: Sequence[Config], rows: DeviceRows, *, domainbed: bool) -> None:
        super().__init__(configs, rows, domainbed=domainbed)
        self._penalty = self.scale.new_tensor([config.penalty for config in configs])
        self._anneal = self.scale.new_tensor([config.anneal for config in configs])
        self._begins = {config.anneal for config in configs}
        self._beta = torch.ones_like(self._penalty)

    def begin(self, step: int) -> Tensor | None:
        if step not in self._begins:
            return None
        self._beta = torch.where(self._anneal <= step, self._penalty, 1.0)
        if not self.domainbed:
            self.scale = 1 / self._beta.clamp_min(1)
        return self._anneal == step


class Irm(_Annealed):
    """IRMv1 (Arjovsky et al. 2019, eq. 4): mean_e R_e + β mean_e (∂R_e(s·z)/∂s at s = 1)².

    The derivative with respect to the dummy scale is D_e = Σ_i share_i Σ_c z_ic (p_ic − y_ic), squared on
    the whole batch as in the authors' code. Its gradient is 2 D_e share_i ((p − y) + c), where
    c = ∂(zᵀp)/∂z − p is p∘(z − zᵀp), or z p (1 − p) for one logit. DomainBed has the product D_e D'_e of an
    environment's even and odd rows in place of D_e²: without bias, unlike the square.
    """

    def residual_(self, logits_brc: Tensor, batch: Batch) -> None:
        shares_be = batch.shares("environments", self.upweighted)
        present = (shares_be.sum(0) > 0).sum()
        logits = logits_brc.clone()
        p = probabilities_(logits_brc)
        residual = p - batch.targets
        slopes_be = batch.shares("halves" if self.domainbed else "environments", self.upweighted)
        slope_er = slopes_be.T @ (logits * residual).sum(-1)
        if logits.shape[-1] == 1:
            curve = logits.mul_(p).mul_(1 - p)
        else:
            curve = logits.sub_((logits * p).sum(-1, keepdim=True)).mul_(p)
        # The derivative of Σ_e D_e² with respect to each slope; of Σ_e D_e D'_e it is the other half's slope.
        outer_er = slope_er.roll(len(slope_er) // 2, 0) if self.domainbed else 2 * slope_er
        scale = self.scale / present
        on_slope = (slopes_be @ (outer_er * (self._beta * scale)))[..., None]
        on_risk = (shares_be.sum(1, keepdim=True) * scale)[..., None]
        torch.mul(curve.add_(residual), on_slope, out=logits_brc)
        logits_brc.add_(residual.mul_(on_risk))


class Vrex(_Annealed):
    """V-REx (Krueger et al. 2021, eq. 8): mean_e R_e + β Var_e(R_e), the variance over E, not E − 1."""

    def residual_(self, logits_brc: Tensor, batch: Batch) -> None:
        shares_be = batch.shares("environments", self.upweighted)
        present = shares_be.sum(0) > 0
        risks_er = shares_be.T @ log_losses(logits_brc, batch.targets)
        mean = risks_er.sum(0) / present.sum()
        factors_er = ((risks_er - mean) * (2 * self._beta) + 1) * (self.scale / present.sum())
        residual = probabilities_(logits_brc).sub_(batch.targets)
        residual.mul_((shares_be @ factors_er)[..., None])


class GroupDro(Erm):
    """Group DRO, online (Sagawa et al. 2020, algorithm 1): q_g ← q_g exp(η R_g), normalised; Σ_g q_g R_g.

    q is kept in logarithms, which cannot overflow.
    """

    def __init__(self, configs: Sequence[Config], rows: DeviceRows, *, domainbed: bool) -> None:
        super().__init__(configs, rows, domainbed=domainbed)
        self._eta = self.scale.new_tensor([config.eta for config in configs])
        self._log_q = self.scale.new_zeros(rows.members["dro"].shape[1], len(configs))

    def residual_(self, logits_brc: Tensor, batch: Batch) -> None:
        shares_be = batch.shares("dro", self.upweighted)
        self._log_q += (shares_be.T @ log_losses(logits_brc, batch.targets)) * self._eta
        self._log_q.sub_(torch.logsumexp(self._log_q, 0))
        residual = probabilities_(logits_brc).sub_(batch.targets)
        residual.mul_((shares_be @ self._log_q.exp())[..., None])


class Lisa(Erm):
    """LISA (Yao et al. 2022, eqs. 3 to 5): the loss on x̃ = λx_i + (1−λ)x_j and ỹ = λy_i + (1−λ)y_j.

    At each step a configuration mixes within labels across domains with probability ``p_sel``, else within
    a domain across labels; λ ~ Beta(α, α) for each row. Logits of a linear model mix as the features do, so
    no mixed features are made. Partners come from the batch; a row that has none stays as it is. The mixed
    row keeps the weight of row i. The authors' code for subpopulation shifts draws as many rows from every
    (label, domain) cell: that is what upweighting by these two columns does.

    Its configurations are sorted by ``p_sel`` and have one ``alpha``.
    """

    def __init__(self, configs: Sequence[Config], rows: DeviceRows, *, domainbed: bool) -> None:
        super().__init__(configs, rows, domainbed=domainbed)
        self._p_sel = np.array([config.p_sel for config in configs])
        self._alpha = configs[0].alpha
        self._draws = np.random.default_rng([configs[0].seed, int(self._alpha * 1e6)])

    def residual_(self, logits_brc: Tensor, batch: Batch) -> None:
        strategy, intra_label, intra_domain = batch.mixing
        # One draw a row whatever the strategy, so that a configuration's draws don't depend on others'.
        weights = torch.from_numpy(self._draws.beta(self._alpha, self._alpha, len(logits_brc)))
        share = batch.shares("pooled", self.upweighted)[:, :, None]
        mix = weights.to(logits_brc)[:, None, None]
        within_domain = int(np.searchsorted(self._p_sel, strategy, side="right"))
        for part_brc, found in (
            (logits_brc[:, :within_domain], intra_domain),
            (logits_brc[:, within_domain:], intra_label),
        ):
            if not part_brc.shape[1]:
                continue
            partner = found.to(part_brc.device)
            mixed = torch.lerp(part_brc[partner], part_brc, mix)
            targets = torch.lerp(batch.targets[partner], batch.targets, mix)
            residual = probabilities_(mixed).sub_(targets).mul_(share)
            torch.mul(residual, mix, out=part_brc)
            residual.mul_(1 - mix)
            if part_brc.is_cuda:
                # index_add_ adds in no fixed order on CUDA; index_put_ sorts first.
                part_brc.index_put_((partner,), residual, accumulate=True)
            else:
                part_brc.index_add_(0, partner, residual)


OBJECTIVES: dict[str, type[Erm]] = {"irm": Irm, "vrex": Vrex, "groupdro": GroupDro, "lisa": Lisa}
"""The data terms that aren't erm's."""


Array = NDArray[np.float64]
Codes = NDArray[np.int64]

SUBSETS = 20
"""Balanced subsets that are averaged for the test rows, as in the authors' code."""

SPLIT, DRAW = 10, 11
"""Streams of random numbers of one seed (0 to 2 are the trainer's)."""

TOLERANCE, MAX_ITER = 1e-8, 1000
"""Of liblinear: weights are then within about 1e-6 of the solution, after some 30 of its iterations."""


def halves(groups: Codes, seed: int) -> tuple[Codes, Codes]:
    """Two random halves of the rows, group by group: where to fit, and where to choose C.

    Raises `InputError` for a group with one row only.
    """
    generator = generator_of(seed, SPLIT)
    fit: list[Codes] = []
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        if len(rows) < 2:
            raise InputError(
                "dfr needs two validation rows of every group",
                found=f"a group with {len(rows)}",
                fix="coarser --groups, or leave dfr out",
            )
        order = torch.randperm(len(rows), generator=generator).numpy()
        fit.append(rows[order[: (len(rows) + 1) // 2]])
    chosen = np.sort(np.concatenate(fit))
    return chosen, np.setdiff1d(np.arange(len(groups)), chosen)


def fit_dfr(
    X: NDArray[np.floating],
    y: Codes,
    groups: Codes,
    n_classes: int,
    Cs: Sequence[float],
    *,
    seed: int,
    subsets: int = SUBSETS,
    scale_by: Features | None = None,
) -> list[Fit]:
    """Retrain on validation rows ``X`` (n, d) for every C: C · Σ loss + ‖w‖₁ + |b| on standardised features.

    Parameters
    ----------
    subsets
        How many balanced subsets are drawn and averaged.
    scale_by
        (m, d) the rows that say how features are standardised; None: each subset's own.

    Raises
    ------
    InputError
        A balanced subset lacks a class: groups that say nothing of the labels.
    """
    from sklearn.preprocessing import StandardScaler

    X = np.asarray(X, np.float64)
    common = None
    if scale_by is not None:
        common = StandardScaler()
        for _, rows in blocks(scale_by):
            common.partial_fit(rows)
    fits: list[list[Fit]] = [[] for _ in Cs]
    for rows in _subsets(groups, seed, subsets):
        if len(np.unique(y[rows])) < n_classes:
            raise InputError(
                "a balanced subset of the validation rows lacks a class",
                fix="--groups with the label among its columns, or leave dfr out",
            )
        scaler = common or StandardScaler().fit(X[rows])
        for C, found in zip(Cs, fits, strict=True):
            found.append(_solve(X[rows], y[rows], n_classes, C, scaler))
    return [
        dataclasses.replace(
            found[0],
            weight=np.mean([one.weight for one in found], axis=0),
            bias=np.mean([one.bias for one in found], axis=0),
            converged=all(one.converged for one in found),
            iterations=max(one.iterations for one in found),
        )
        for found in fits
    ]


def _subsets(groups: Codes, seed: int, count: int) -> Codes:
    """(count, G·n_min) positions: as many random rows of every group as the smallest has."""
    generator = generator_of(seed, DRAW)
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    smallest = min(len(rows) for rows in members)

    def draw(rows: Codes) -> Codes:
        return rows[torch.randperm(len(rows), generator=generator).numpy()[:smallest]]

    return np.stack([np.concatenate([draw(rows) for rows in members]) for _ in range(count)])


def _solve(X: Array, y: Codes, n_classes: int, C: float, scaler: Any) -> Fit:
    """One fit on standardised rows: the positive class against the other, or each against the rest."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    # scikit-learn renamed what asks for ℓ1 in 1.8.
    old = LogisticRegression().get_params()["penalty"] == "l2"
    l1: dict[str, Any] = {"penalty": "l1"} if old else {"l1_ratio": 1.0}
    model = LogisticRegression(
        solver="liblinear", C=C, tol=TOLERANCE, max_iter=MAX_ITER, random_state=0, **l1
    )
    weights, biases, iterations = [], [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # said by ``converged``
        for positive in (1,) if n_classes == 2 else range(n_classes):
            model.fit(scaler.transform(X), y == positive)
            weights.append(model.coef_[0])
            biases.append(model.intercept_[0])
            iterations = max(iterations, int(model.n_iter_.max()))
    weight = np.stack(weights) / scaler.scale_
    bias = np.stack(biases) - weight @ scaler.mean_
    return Fit(0, 0.0, weight, bias, converged=iterations < MAX_ITER, iterations=iterations)


CORRELATION = 1e-8
"""The least correlation with the column that is erased: above float64's rounding, below what a row shows."""

GAP = 1e-6
"""Standard deviations: far more than `CORRELATION` leaves, far less than a probe could use."""


@dataclasses.dataclass(frozen=True, slots=True)
class Eraser:
    """x ↦ x − L R (x − μ), theorem 4.3, with L (d, k), R (k, d) and μ (d,)."""

    left: Array
    right: Array
    mean: Array

    def apply(self, X: Features) -> Any:
        """Erased rows, float64 (n, d)."""
        return applied(X, lambda rows: rows - ((rows - self.mean) @ self.right.T) @ self.left.T)

    def fold(self, weight: Array, bias: Array) -> tuple[Array, Array]:
        """The probe on given features equal to (``weight`` (..., C, d), ``bias`` (..., C)) on erased ones."""
        through = weight @ self.left
        return weight - through @ self.right, bias + through @ (self.right @ self.mean)


def fit_eraser(X: Features, codes: NDArray[np.integer]) -> Eraser:
    """The eraser of a categorical column, of codes (n,), that changes the features (n, d) least.

    It takes the difference of the values' means out of the features, whatever its size. "Least" is meant in
    mean square under a covariance of the features that is shrunk towards an isotropic one (the package's
    default): not quite the least-squares eraser of these rows, but one that holds up where there are few rows
    for the dimensions. A warning says where a difference stays.

    Raises
    ------
    InputError
        The package ``concept-erasure`` isn't installed, or the column has one value only.
    """
    try:
        with warnings.catch_warnings():
            # The package scripts a function with torch.jit, which warns of its deprecation at import.
            warnings.simplefilter("ignore")
            from concept_erasure import LeaceFitter
    except ImportError:
        raise InputError(
            "leace needs the package concept-erasure", fix="pip install 'ncm-cli[leace]'"
        ) from None
    values = np.unique(codes, return_inverse=True)[1].reshape(-1)
    if values.max() == 0:
        raise InputError("the column to erase has one value only on the training rows")
    hot = np.eye(values.max() + 1)[values]
    # The package's tolerances are absolute. With features of unit size and standardised indicators its
    # singular values are correlations, however rare a value is and whatever the features' unit.
    mean, deviation = moments(X)
    square = sum(float(((rows - mean) ** 2).sum()) for _, rows in blocks(X))
    size = np.sqrt(square / (len(X) * X.shape[1])) or 1.0
    indicators = ((hot - hot.mean(0)) / hot.std(0))[:, 1:]  # the first follows from the others
    fitter = LeaceFitter(X.shape[1], indicators.shape[1], dtype=torch.float64, svd_tol=CORRELATION)
    for own, rows in blocks(X):
        fitter.update(torch.from_numpy((rows - mean) / size), torch.from_numpy(indicators[own]))
    eraser = Eraser(fitter.eraser.proj_left.numpy(), fitter.eraser.proj_right.numpy(), mean)
    # The largest difference of a value's mean from all rows', in the features' standard deviations.
    sums = sum(
        (hot[own].T @ rows for own, rows in blocks(eraser.apply(X))), np.zeros((hot.shape[1], X.shape[1]))
    )
    differences = np.abs(sums / hot.sum(0)[:, None] - sums.sum(0) / len(X))[:, deviation > 0]
    gap = float((differences / deviation[deviation > 0]).max(initial=0.0))
    if gap > GAP:
        warnings.warn(
            f"leace leaves a difference of means of {gap:.2g} standard deviations: "
            "a feature that tells the erased column is too small beside the others; try --scaling standard",
            stacklevel=2,
        )
    return eraser
