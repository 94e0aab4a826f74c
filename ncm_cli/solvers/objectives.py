"""The objectives of the methods, as gradients with respect to the logits.

Every model here is linear, z = Wx + b, so a method is known by ∂objective/∂z: one matrix product with the
features gives its gradient, the same product for all configurations at once. An objective replaces the
logits it is given by that derivative, in place.

Shapes: ``brc`` is (rows of the batch, configurations, logits), ``be`` is (rows, environments), ``er`` is
(environments, configurations). A binary problem has one logit, the positive class's.

Within a batch the risk of environment e is R_e = Σ w_i ℓ_i / Σ w_i over its rows in the batch (w = 1 unless
upweighted); an environment with no row in the batch is left out of that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ncm_cli.solvers.batches import Batch, DeviceRows
from ncm_cli.solvers.methods import Config, Protocol


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

    def __init__(self, configs: Sequence[Config], rows: DeviceRows, *, protocol: Protocol) -> None:
        self.upweighted, self.protocol = configs[0].upweighted, protocol
        self.scale = rows.targets.new_ones(len(configs))
        """(R,) the factor of each objective, weight decay included."""

    def residual_(self, logits_brc: Tensor, batch: Batch) -> None:
        """Replace the logits by ∂objective/∂logits."""
        residual = probabilities_(logits_brc).sub_(batch.targets)
        residual.mul_(batch.shares("pooled", self.upweighted)[:, :, None])

    def begin(self, step: int) -> Tensor | None:
        """(R,) bool: the configurations whose penalties begin at this step; None if there are none."""
        return None


class _Annealed(Erm):
    """mean_e R_e + β · penalty, with β = 1 before step ``anneal`` and ``penalty`` from there on.

    The published codes (Arjovsky's and Krueger's ColoredMNIST, DomainBed) also use β = 1 before that step.
    Where β > 1, the whole objective, weight decay included, is divided by β as in Arjovsky's and Krueger's
    code, so that the gradient keeps the size for which the step size was chosen. DomainBed's code doesn't
    divide, and restarts Adam instead.
    """

    def __init__(self, configs: Sequence[Config], rows: DeviceRows, *, protocol: Protocol) -> None:
        super().__init__(configs, rows, protocol=protocol)
        self._penalty = self.scale.new_tensor([config.penalty for config in configs])
        self._anneal = self.scale.new_tensor([config.anneal for config in configs])
        self._begins = {config.anneal for config in configs}
        self._beta = torch.ones_like(self._penalty)

    def begin(self, step: int) -> Tensor | None:
        if step not in self._begins:
            return None
        self._beta = torch.where(self._anneal <= step, self._penalty, 1.0)
        if self.protocol != "domainbed":
            self.scale = 1 / self._beta.clamp_min(1)
        return self._anneal == step


class Irm(_Annealed):
    """IRMv1 (Arjovsky et al. 2019, eq. 4): mean_e R_e + β mean_e (∂R_e(s·z)/∂s at s = 1)².

    The derivative with respect to the dummy scale is D_e = Σ_i share_i Σ_c z_ic (p_ic − y_ic), squared on
    the whole batch as in the authors' code. Its gradient is 2 D_e share_i ((p − y) + c), where
    c = ∂(zᵀp)/∂z − p is p∘(z − zᵀp), or z p (1 − p) for one logit. In place of D_e², DomainBed has the
    product D_e D'_e of an environment's even and odd rows, which is unbiased, unlike the square.
    """

    def residual_(self, logits_brc: Tensor, batch: Batch) -> None:
        domainbed = self.protocol == "domainbed"
        shares_be = batch.shares("environments", self.upweighted)
        present = (shares_be.sum(0) > 0).sum()
        logits = logits_brc.clone()
        p = probabilities_(logits_brc)
        residual = p - batch.targets
        slopes_be = batch.shares("halves" if domainbed else "environments", self.upweighted)
        slope_er = slopes_be.T @ (logits * residual).sum(-1)
        if logits.shape[-1] == 1:
            curve = logits.mul_(p).mul_(1 - p)
        else:
            curve = logits.sub_((logits * p).sum(-1, keepdim=True)).mul_(p)
        # The derivative of Σ_e D_e² with respect to each slope; for Σ_e D_e D'_e it is the other half's
        # slope.
        outer_er = slope_er.roll(len(slope_er) // 2, 0) if domainbed else 2 * slope_er
        scale = self.scale / present
        on_slope = (slopes_be @ (outer_er * (self._beta * scale)))[..., None]
        on_risk = (shares_be.sum(1, keepdim=True) * scale)[..., None]
        torch.mul(curve.add_(residual), on_slope, out=logits_brc)
        logits_brc.add_(residual.mul_(on_risk))


class Vrex(_Annealed):
    """V-REx (Krueger et al. 2021, eq. 8): mean_e R_e + β Var_e(R_e), the variance over E, not E − 1.

    The authors' own code (``papers``) has Σ_e R_e + β (R_1 − R_2)² for two environments, which is
    2 (mean_e R_e + 2β Var_e(R_e)), and Σ_e R_e + β Var_e(R_e) for three, as here for more.
    """

    def residual_(self, logits_brc: Tensor, batch: Batch) -> None:
        shares_be = batch.shares("environments", self.upweighted)
        present = shares_be.sum(0) > 0
        risks_er = shares_be.T @ log_losses(logits_brc, batch.targets)
        mean = risks_er.sum(0) / present.sum()
        beta, scale = self._beta, self.scale / present.sum()
        if self.protocol == "papers":
            count = present.sum().to(beta)
            beta, scale = beta * torch.where(count == 2, 2.0, 1 / count), self.scale
        factors_er = ((risks_er - mean) * (2 * beta) + 1) * scale
        residual = probabilities_(logits_brc).sub_(batch.targets)
        residual.mul_((shares_be @ factors_er)[..., None])


class GroupDro(Erm):
    """Group DRO, online (Sagawa et al. 2020, algorithm 1): q_g ← q_g exp(η R_g), normalised; Σ_g q_g R_g.

    q is kept in logarithms, which cannot overflow.
    """

    def __init__(self, configs: Sequence[Config], rows: DeviceRows, *, protocol: Protocol) -> None:
        super().__init__(configs, rows, protocol=protocol)
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
    a domain across labels; λ ~ Beta(α, α) for each mixed row, which keeps the weight of row i. Logits of a
    linear model mix as the features do, so no mixed features are made. The batch says which rows are mixed:
    all rows, each with a partner in the batch (`Batch.mixing`), or (``papers``) the rows of one cell with
    those of another (`CellBatch.mixing`).

    Configurations are sorted by ``p_sel`` and share one ``alpha``.
    """

    def __init__(self, configs: Sequence[Config], rows: DeviceRows, *, protocol: Protocol) -> None:
        super().__init__(configs, rows, protocol=protocol)
        self._p_sel = np.array([config.p_sel for config in configs])
        self._alpha = configs[0].alpha
        self._draws = np.random.default_rng([configs[0].seed, int(self._alpha * 1e6)])

    def residual_(self, logits_brc: Tensor, batch: Batch) -> None:
        strategy, intra_label, intra_domain = batch.mixing
        # One draw per row with either strategy, so that a configuration's draws don't depend on others'.
        weights = torch.from_numpy(self._draws.beta(self._alpha, self._alpha, len(logits_brc)))
        share = batch.shares("pooled", self.upweighted)[:, :, None]
        weights = weights.to(logits_brc)[:, None, None]
        within_domain = int(np.searchsorted(self._p_sel, strategy, side="right"))
        for part_brc, (first, second) in (
            (logits_brc[:, :within_domain], intra_domain),
            (logits_brc[:, within_domain:], intra_label),
        ):
            if not part_brc.shape[1]:
                continue
            mix, share_of_part = weights[: len(second)], share
            if first is not None:
                first = first.to(part_brc.device)
                share_of_part = share[first] / share[first].sum()
            at: Any = slice(None) if first is None else first
            second = second.to(part_brc.device)
            mixed = torch.lerp(part_brc[second], part_brc[at], mix)
            targets = torch.lerp(batch.targets[second], batch.targets[at], mix)
            residual = probabilities_(mixed).sub_(targets).mul_(share_of_part)
            part_brc.zero_()
            part_brc[at] = residual * mix
            residual.mul_(1 - mix)
            if part_brc.is_cuda:
                # index_add_ adds in no fixed order on CUDA; index_put_ sorts first.
                part_brc.index_put_((second,), residual, accumulate=True)
            else:
                part_brc.index_add_(0, second, residual)


OBJECTIVES: dict[str, type[Erm]] = {"irm": Irm, "vrex": Vrex, "groupdro": GroupDro, "lisa": Lisa}
"""The data terms of methods other than erm."""
