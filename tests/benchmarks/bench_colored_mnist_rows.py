"""What picks by test accuracy find on ColoredMNIST where methods are trained as in the paper's own code.

    python tests/benchmarks/bench_colored_mnist_rows.py [--methods rex,irm] [--optimizer sgd]

That code (github.com/inouye-lab/NCM, folder ``solver``) differs from the methods' own authors' and from
`ncm sweep`; here its training is written down anew in plain torch, R trials as one weight tensor:

- two logits and a bias, drawn as ``torch.nn.Linear`` draws them; batches of 128 rows of each training domain;
  Adam, or SGD with momentum .9 (that code has either for a data set; the report doesn't say which);
- its REx penalises the variance of the losses of *the rows* of a batch (``rex``), not of the domains' risks
  (``vrex``); the weight of a penalty rises from 0 to 1 in ``anneal`` steps, then jumps to its value, and
  nothing is divided by it; fish keeps its optimiser;
- a trial that diverged answers class 0 and stays a candidate;
- all trials share one start and one order of batches, as with its one seed.

Data as there: 50,000 training digits in two domains, MNIST's test digits once in the training domains'
colours (in-domain) and once in the test domain's. Search: lr 10^[-5,-3], penalty 10^[0,5], anneal 50 to 250
steps, fish's step and groupdro's eta 10^[-4,-1], weight decay 10^[-4,-2] (erm: none); uniform draws where
theirs are Bayesian. 160 trials and 40 epochs there: --trials 160 --epochs 40.

Printed: in-domain / test accuracy of the best in-domain and of the best on the test digits (ORACLE) among
all trials and epochs, and the share of the test digits that the latter answers as their colour says.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from bench_selection import ROOT, colour, read_idx
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

METHODS = ("erm", "irm", "rex", "vrex", "fish", "groupdro")


class Digits(NamedTuple):
    """Coloured digits: pixels (n, d) in [0, 1], labels (n), whether each is green (n)."""

    x: Tensor
    y: Tensor
    green: Tensor


def coloured(images: np.ndarray, digits: np.ndarray, flips: np.ndarray, rng: np.random.Generator) -> Digits:
    """IRM's protocol: the label, digit < 5, is wrong with probability .25, the colour with that of ``flips``.

    ``flips`` has one probability, or one for each digit.
    """
    y = (digits < 5) ^ (rng.random(len(digits)) < 0.25)
    green = y ^ (rng.random(len(digits)) < flips)
    parts = colour(images, green), y.astype(np.int64), green
    return Digits(*map(torch.from_numpy, parts))


Images = tuple[np.ndarray, np.ndarray]
"""Grey images (n, p) in [0, 1] and their digits (n)."""


def mnist(folder: Path, size: int) -> tuple[Images, Images]:
    """MNIST's 50,000 first training digits and its test digits, mean-pooled to ``size`` pixels a side."""
    parts = []
    for part, most in (("train", 50_000), ("t10k", 10_000)):
        images, digits = (read_idx(folder, f"{part}-{name}-ubyte") for name in ("images-idx3", "labels-idx1"))
        blocks = images[:most].astype(np.float32).reshape(-1, size, 28 // size, size, 28 // size)
        parts.append((blocks.mean(axis=(2, 4)).reshape(most, -1) / 255, digits[:most]))
    return parts[0], parts[1]


def drawn(train: Images, test: Images, rng: np.random.Generator) -> tuple[list[Digits], Digits, Digits]:
    """The training domains, and the test digits in the training domains' and in the test domain's colours."""
    domains = [
        coloured(*(part[i::2] for part in train), np.array(flip), rng) for i, flip in enumerate((0.1, 0.2))
    ]
    flips = np.where(np.arange(len(test[1])) % 2, 0.2, 0.1)
    return domains, coloured(*test, flips, rng), coloured(*test, np.array(0.9), rng)


class Optimizer:
    """SGD with momentum .9, or Adam, with weight decay, as torch's; lr and decay are (R, 1, 1)."""

    def __init__(self, weight: Tensor, name: str, lr: Tensor, decay: Tensor) -> None:
        self.weight, self.name, self.lr, self.decay = weight, name, lr, decay
        self.mean, self.square, self.age = torch.zeros_like(weight), torch.zeros_like(weight), 0

    def step(self, gradient: Tensor) -> None:
        gradient = gradient + self.decay * self.weight
        self.age += 1
        if self.name == "sgd":
            self.mean = 0.9 * self.mean + gradient
            self.weight -= self.lr * self.mean
            return
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        root = (self.square / (1 - 0.999**self.age)).sqrt() + 1e-8
        self.weight -= self.lr / (1 - 0.9**self.age) * self.mean / root


class Trials:
    """R trials of a method: (R, 2, d + 1) weights, the bias last, and their hyper-parameters (R)."""

    def __init__(self, method: str, optimizer: str, dim: int, trials: int, rng: np.random.Generator) -> None:
        def log(low: float, high: float) -> Tensor:
            return torch.from_numpy(10 ** rng.uniform(low, high, trials)).float()

        self.method = method
        self.hyper = {"lr": log(-5, -3), "penalty": log(0, 5)}
        self.hyper["anneal"] = torch.from_numpy(rng.integers(50, 251, trials))
        self.hyper |= {"eta": log(-4, -1), "decay": log(-4, -2) * (method != "erm")}
        bound = dim**-0.5  # of torch.nn.Linear
        start = torch.from_numpy(rng.uniform(-bound, bound, (2, dim + 1))).float()
        self.weight = start.repeat(trials, 1, 1)
        lr, decay = (self.hyper[name][:, None, None] for name in ("lr", "decay"))
        self.optimizer = Optimizer(self.weight, optimizer, lr, decay)
        self.q = torch.full((trials, 2), 0.5)
        self.steps = 0

    def losses(self, weight: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(R, n) cross-entropies and (R, n) derivatives of each by a factor on the logits."""
        logits = torch.einsum("nd,rcd->rnc", x, weight[:, :, :-1]) + weight[:, None, :, -1]
        log_p = functional.log_softmax(logits, -1)
        slope = (logits * (log_p.exp() - functional.one_hot(y, 2))).sum(-1)
        return -log_p[:, torch.arange(len(y)), y], slope

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """(R, 2, d + 1) gradients of the objectives on a batch whose halves are the two domains."""
        weight = self.weight.detach().requires_grad_()
        losses, slopes = self.losses(weight, x, y)
        risks = torch.stack([part.mean(1) for part in losses.tensor_split(2, dim=1)], 1)
        objective = losses.mean(1)
        if self.method == "groupdro":
            objective = (risks * self.q).sum(1)
            q = self.q * torch.exp(self.hyper["eta"][:, None] * risks.detach())
            self.q = q / q.sum(1, keepdim=True)
        elif self.method in ("irm", "rex", "vrex"):
            first, second = (part.mean(1) for part in slopes.tensor_split(2, dim=1))
            penalty = {
                "irm": (first**2 + second**2) / 2,
                "rex": losses.var(1, correction=0),
                "vrex": risks.var(1, correction=0),
            }[self.method]
            ramp = self.steps / self.hyper["anneal"]
            objective = objective + torch.where(ramp >= 1, self.hyper["penalty"], ramp) * penalty
        return torch.autograd.grad(objective.sum(), weight)[0]

    def step(self, x: Tensor, y: Tensor) -> None:
        """Train on a batch whose halves are the two domains."""
        if self.method != "fish":
            self.optimizer.step(self.gradient(x, y))
        else:
            before = self.weight.clone()
            for part in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
                self.optimizer.step(self.gradient(*part))
            self.weight.copy_(before + self.hyper["eta"][:, None, None] * (self.weight - before))
        self.steps += 1

    def answers(self, x: Tensor) -> Tensor:
        """(R, n) classes; class 0 where a trial diverged, as with torch's argmax."""
        logits = [x @ self.weight[:, c, :-1].T + self.weight[:, c, -1] for c in (0, 1)]
        return (logits[1] > logits[0]).T


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = os.environ.get("NCM_TEST_DATA", ROOT.parent / "shared" / "data")
    parser.add_argument("--data", type=Path, default=data, help="folder that holds mnist/ with the IDX files")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    parser.add_argument(
        "--size", type=int, default=14, help="pixels a side: 14 as in the recipe, 28 as there"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--smoke", action="store_true", help="a few trials on scikit-learn's digits")
    args = parser.parse_args()
    if args.smoke:
        images, digits = load_digits(return_X_y=True)
        train = test = ((images / 16).astype(np.float32), digits)
        args.seeds, args.trials, args.epochs = 1, 3, 1
    else:
        train, test = mnist(args.data / "mnist", args.size)
    print("method    seed  in-domain      ORACLE         as its colour  epoch  hyper-parameters")
    for method in args.methods.split(","):
        for seed in range(args.seeds):
            rng = np.random.default_rng(seed)
            print(f"{method:8}  {seed:4}  {_row(method, drawn(train, test, rng), args, rng)}", flush=True)


def _row(
    method: str,
    drawn_digits: tuple[list[Digits], Digits, Digits],
    args: argparse.Namespace,
    rng: np.random.Generator,
) -> str:
    domains, inside, test = drawn_digits
    trials = Trials(method, args.optimizer, inside.x.shape[1], args.trials, rng)
    half = args.batch_size // 2
    accuracy, follows = np.zeros((2, args.epochs, args.trials)), np.zeros((args.epochs, args.trials))
    for epoch in range(args.epochs):
        for _ in range(sum(len(domain.y) for domain in domains) // args.batch_size):
            picked = [rng.choice(len(domain.y), half, replace=False) for domain in domains]
            rows = [(domain.x[i], domain.y[i]) for domain, i in zip(domains, picked, strict=True)]
            trials.step(*map(torch.cat, zip(*rows, strict=True)))
        for rows, found in zip((inside, test), accuracy, strict=True):
            found[epoch] = (trials.answers(rows.x) == rows.y.bool()).float().mean(1)
        follows[epoch] = (trials.answers(test.x) == test.green).float().mean(1)
    picks = [np.unravel_index(which.argmax(), which.shape) for which in accuracy]
    shown = [f"{accuracy[0][pick]:.3f} / {accuracy[1][pick]:.3f}" for pick in picks]
    epoch, trial = picks[1]
    names = {"erm": (), "fish": ("eta",), "groupdro": ("eta",)}.get(method, ("penalty", "anneal"))
    hyper = ", ".join(f"{name} {float(trials.hyper[name][trial]):.2g}" for name in ("lr", "decay", *names))
    return f"{shown[0]}  {shown[1]}  {follows[picks[1]]:13.3f}  {epoch + 1:5}  {hyper}"


if __name__ == "__main__":
    main()
