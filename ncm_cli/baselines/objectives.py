"""Mini-batches in an order that a seed decides, and the draws that LISA makes on them.

The order depends on the seed and the data alone, never on a configuration: configurations of one seed
see the same rows at the same step, and so share their matrix products.

The objectives of the methods, as gradients with respect to the logits.

Every model here is linear, z = Wx + b, so a method is known by ∂objective/∂z: one matrix product with the
features gives its gradient, the same product for all configurations at once. An objective replaces the
logits it is given by that derivative, in place.

Shapes: ``brc`` is (rows of the batch, configurations, logits), ``be`` is (rows, environments), ``er`` is
(environments, configurations). A binary problem has one logit, the positive class's.

Within a batch the risk of environment e is R_e = Σ w_i ℓ_i / Σ w_i over its rows in the batch (w = 1 unless
upweighted); an environment with no row in the batch is left out of that step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ncm_cli.baselines.config import Config


def generator_of(seed: int, stream: int) -> torch.Generator:
    """A generator of its own for each (seed, stream), so that one use never shifts another."""
    made = torch.Generator()
    made.manual_seed(int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0] >> 1))
    return made


def epoch_order(strata: Tensor | None, n: int, generator: torch.Generator) -> Tensor:
    """A random order of ``n`` rows in which every stratum is spread evenly.

    Each stratum is shuffled and its rows are laid out at even distances with a random offset each, so
    that any stretch of the order holds every environment in proportion (to one row or so). A plain
    shuffle would leave steps with no row of a small environment, and its risk undefined there.

    Parameters
    ----------
    strata
        (n,) int64 codes from 0, or None for a plain shuffle.

    Returns
    -------
    Tensor
        (n,) int64 positions.
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
    """The rows of each batch of an epoch that passes over every row once."""
    order = epoch_order(strata, n, generator)
    for start, end in batch_bounds(n, batch_size):
        yield order[start:end]


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


def batch_bounds(n: int, batch_size: int) -> list[tuple[int, int]]:
    """Start and end of the batches of an epoch: at most ``batch_size`` rows, sizes equal to one row.

    ``batch_size`` 0 is the full batch.
    """
    count = 1 if batch_size <= 0 else math.ceil(n / batch_size)
    return [(i * n // count, (i + 1) * n // count) for i in range(count)]


def partners(primary: Tensor, secondary: Tensor, draws: Tensor) -> Tensor:
    """For each row, a random row with the same ``primary`` code and another ``secondary`` code.

    Rows that have no such partner are their own.

    Parameters
    ----------
    primary, secondary
        (B,) int64 codes.
    draws
        (B,) uniform in [0, 1).

    Returns
    -------
    Tensor
        (B,) int64 row numbers.
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


@dataclasses.dataclass(slots=True)
class Mixing:
    """One step's draws for LISA: strategy and partners, and a way to draw mixing weights."""

    strategy: float
    """Uniform in [0, 1): a configuration mixes within labels where it is below its ``p_sel``."""
    intra_label: Tensor
    """(B,) rows of the same label in another domain."""
    intra_domain: Tensor
    """(B,) rows of the same domain with another label."""


@dataclasses.dataclass(slots=True)
class Batch:
    """One step's rows, shared by all configurations of a seed."""

    given: Callable[[], Tensor]
    """(B, width) rows in the given coordinates, the last columns being the bias's 1 and zeros."""
    rotated: Callable[[], Tensor]
    """(B, width) the same in the coordinates [basis, complement]."""
    targets: Tensor
    """(B, 1, C): 0 or 1 for a binary problem, else one-hot."""
    shares: Callable[[str, bool], Tensor]
    """(grouping, upweighted) -> (B, E): each row's share in the risk of each of the grouping's parts, columns
    summing to 1 (or 0 where the batch has no such row). Groupings: ``pooled``, ``environments``, ``dro``, and
    ``halves``: the environments' rows of even places in the batch, then those of odd ones."""
    mixing: Callable[[], Mixing]
    visits: Callable[[], list[tuple[int, Tensor]]]
    """The environments in the order in which Fish visits them, each with its rows of the batch (not none)."""


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

    Also the data term of ``ncm`` (whose rank constraint acts on the weights) and of ``matchdg`` (whose
    penalty does).
    """

    grouping = "pooled"

    def __init__(self, configs: Sequence[Config], like: Tensor, parts: int) -> None:
        self.upweighted = configs[0].upweighted
        self.scale = like.new_ones(len(configs))
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

    grouping = "environments"
    divides = True

    def __init__(self, configs: Sequence[Config], like: Tensor, parts: int) -> None:
        super().__init__(configs, like, parts)
        self._penalty = like.new_tensor([config.penalty for config in configs])
        self._anneal = torch.tensor([config.anneal for config in configs], device=like.device)
        self._begins = {config.anneal for config in configs}
        self._beta = torch.ones_like(self._penalty)

    def begin(self, step: int) -> Tensor | None:
        if step not in self._begins:
            return None
        self._beta = torch.where(self._anneal <= step, self._penalty, 1.0)
        if self.divides:
            self.scale = 1 / self._beta.clamp_min(1)
        return self._anneal == step


class Irm(_Annealed):
    """IRMv1 (Arjovsky et al. 2019, eq. 4): mean_e R_e + β mean_e (∂R_e(s·z)/∂s at s = 1)².

    The derivative with respect to the dummy scale is D_e = Σ_i share_i Σ_c z_ic (p_ic − y_ic), squared on
    the whole batch as in the authors' code. Its gradient is 2 D_e share_i ((p − y) + c), where
    c = ∂(zᵀp)/∂z − p is p∘(z − zᵀp), or z p (1 − p) for one logit.
    """

    slopes = "environments"
    """The grouping whose parts have a slope each."""

    def residual_(self, logits_brc: Tensor, batch: Batch) -> None:
        shares_be = batch.shares("environments", self.upweighted)
        present = (shares_be.sum(0) > 0).sum()
        logits = logits_brc.clone()
        p = probabilities_(logits_brc)
        residual = p - batch.targets
        slopes_be = batch.shares(self.slopes, self.upweighted)
        slope_er = slopes_be.T @ (logits * residual).sum(-1)
        if logits.shape[-1] == 1:
            curve = logits.mul_(p).mul_(1 - p)
        else:
            curve = logits.sub_((logits * p).sum(-1, keepdim=True)).mul_(p)
        scale = self.scale / present
        on_slope = (slopes_be @ (self._outer(slope_er) * (self._beta * scale)))[..., None]
        on_risk = (shares_be.sum(1, keepdim=True) * scale)[..., None]
        torch.mul(curve.add_(residual), on_slope, out=logits_brc)
        logits_brc.add_(residual.mul_(on_risk))

    def _outer(self, slope_er: Tensor) -> Tensor:
        """The derivative of Σ_e D_e² with respect to each slope."""
        return 2 * slope_er


class DomainBedIrm(Irm):
    """Irm with the penalty D_e D'_e of an environment's even and odd rows: without bias, unlike D_e²."""

    divides = False
    slopes = "halves"

    def _outer(self, slope_er: Tensor) -> Tensor:
        """The derivative of Σ_e D_e D'_e: the other half's slope."""
        return slope_er.roll(len(slope_er) // 2, 0)


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


class DomainBedVrex(Vrex):
    """Vrex that isn't divided."""

    divides = False


class GroupDro(Erm):
    """Group DRO, online (Sagawa et al. 2020, algorithm 1): q_g ← q_g exp(η R_g), normalised; Σ_g q_g R_g.

    q is kept in logarithms, which cannot overflow.
    """

    grouping = "dro"

    def __init__(self, configs: Sequence[Config], like: Tensor, parts: int) -> None:
        super().__init__(configs, like, parts)
        self._eta = like.new_tensor([config.eta for config in configs])
        self._log_q = like.new_zeros(parts, len(configs))

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
    """

    grouping = "environments"

    def __init__(self, configs: Sequence[Config], like: Tensor, parts: int) -> None:
        super().__init__(configs, like, parts)
        self._p_sel = np.array([config.p_sel for config in configs])
        if (np.diff(self._p_sel) < 0).any():
            raise ValueError("LISA's configurations must be sorted by p_sel")
        self._alpha = configs[0].alpha
        self._draws = np.random.default_rng([configs[0].seed, int(self._alpha * 1e6)])

    def residual_(self, logits_brc: Tensor, batch: Batch) -> None:
        mixing = batch.mixing()
        # One draw a row whatever the strategy, so that a configuration's draws don't depend on others'.
        weights = torch.from_numpy(self._draws.beta(self._alpha, self._alpha, len(logits_brc)))
        share = batch.shares("pooled", self.upweighted)[:, :, None]
        mix = weights.to(logits_brc)[:, None, None]
        within_domain = int(np.searchsorted(self._p_sel, mixing.strategy, side="right"))
        for part, partner in (
            (logits_brc[:, :within_domain], mixing.intra_domain),
            (logits_brc[:, within_domain:], mixing.intra_label),
        ):
            if part.shape[1]:
                _mixed_residual_(part, batch.targets, mix, partner.to(part.device), share)


def _mixed_residual_(
    logits_brc: Tensor, targets: Tensor, mix: Tensor, partner: Tensor, share: Tensor
) -> None:
    mixed = torch.lerp(logits_brc[partner], logits_brc, mix)
    residual = probabilities_(mixed).sub_(torch.lerp(targets[partner], targets, mix)).mul_(share)
    torch.mul(residual, mix, out=logits_brc)
    residual.mul_(1 - mix)
    if logits_brc.is_cuda:
        # index_add_ adds in no fixed order on CUDA; index_put_ sorts first.
        logits_brc.index_put_((partner,), residual, accumulate=True)
    else:
        logits_brc.index_add_(0, partner, residual)


_PAPERS: dict[str, type[Erm]] = {
    "erm": Erm,
    "ncm": Erm,
    "matchdg": Erm,
    "leace": Erm,
    "fish": Erm,
    "irm": Irm,
    "vrex": Vrex,
    "groupdro": GroupDro,
    "lisa": Lisa,
}
"""Each method's data term. ``fish`` takes the plain loss, one environment at a time."""

_DOMAINBED: dict[str, type[Erm]] = {**_PAPERS, "irm": DomainBedIrm, "vrex": DomainBedVrex}


def objective_of(method: str, *, domainbed: bool) -> type[Erm]:
    """The data term of a method in DomainBed's form, or in its own paper's."""
    return (_DOMAINBED if domainbed else _PAPERS)[method]
