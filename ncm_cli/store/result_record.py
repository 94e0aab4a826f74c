"""The types of results, by kind, as far as they are read."""

from __future__ import annotations

from typing import Any, TypedDict


class Head(TypedDict):
    """The fields of every result."""

    kind: str
    ncm_version: str
    created: str


Interval = list[float] | list[None]
"""Low and high end."""


class _Named(TypedDict):
    group: dict[str, str]
    n: int


class _Value(TypedDict, total=False):
    value: float | None
    ci_low: float | None
    ci_high: float | None


class _WorstValue(_Named):
    value: float | None


class _Metric(_Value, total=False):
    worst_group: _WorstValue | None


class _Bin(TypedDict):
    low: float
    high: float
    n: int
    confidence: float
    accuracy: float


class _Worst(_Named, total=False):
    accuracy: float | None
    mse: float | None


class _Group(_Worst, total=False):
    ci_low: float | None
    ci_high: float | None
    metrics: dict[str, _Value]


class _Crossing(TypedDict, total=False):
    columns: list[str]
    worst_group: _Worst | None
    adjusted: float | None


class _Reference(TypedDict, total=False):
    where: str | None
    missing_share: float


class _Overlap(TypedDict, total=False):
    train: int
    val: int


class _Probe(TypedDict, total=False):
    path: str
    sha256: str
    method: str | None
    rank: int | None
    selection: str | None
    converged: bool | None
    classes: list[str]


class _Source(TypedDict, total=False):
    path: str
    content_sha256: str | None


class _Difference(_Named):
    difference: float | None
    ci_low: float | None
    ci_high: float | None


class _Comparison(TypedDict, total=False):
    other: str
    other_accuracy: float
    difference: float
    only_this_right: int
    only_other_right: int
    p_value: float
    other_mse: float | None
    mse_difference: float | None
    ci_low: float | None
    ci_high: float | None
    groups: list[_Difference]


class _Right(TypedDict, total=False):
    ids_sha256: str
    right: str | None


class _EvalOptions(TypedDict, total=False):
    probe: str
    features: str
    where: str | None
    groups: str | None
    reference: str | None
    target: str | None
    metrics: str | None
    compare: str | None
    output: str | None


class Eval(TypedDict, total=False):
    """The result of ``ncm eval``."""

    n: int
    accuracy: float | None
    adjusted_accuracy: float | None
    balanced_accuracy: float | None
    log_loss: float | None
    mse: float | None
    adjusted_mse: float | None
    r2: float | None
    metrics: dict[str, _Metric]
    calibration: list[_Bin]
    worst_group: _Worst | None
    groups: list[_Group]
    crossings: list[_Crossing]
    reference: _Reference | None
    oracle: bool
    overlap: _Overlap
    task: str
    target: str
    where: str | None
    rows_without_answer: int
    predicted_classes: int
    probe: _Probe
    features: _Source
    comparison: _Comparison | None
    warnings: list[str]
    options: _EvalOptions
    rows: _Right | None


class _Ranked(TypedDict):
    rank: int


class _Point(_Ranked, total=False):
    pairs: int
    converged: bool
    term_1: float
    theta_m_theta: float
    term_2: float
    bound: float
    test_risk: float | None
    twin_error: float | None
    flip_rate: float | None
    test_error: float | None
    zero_one_bound: float | None


class _Summary(TypedDict, total=False):
    erm_test_accuracy: float | None
    erm_in_domain_accuracy: float | None
    best_rank: int
    best_test_accuracy: float
    bound_rank: int
    bound_test_accuracy: float
    bound_regret: float
    in_domain_drop: float
    in_domain_rise: float


class _Noise(TypedDict, total=False):
    applicable: bool
    value: float | None
    bound: float | None
    epsilon_norm: float | None
    sigma_s: float | None
    sigma_s_next: float | None
    condition_limit: float | None
    clean_rank: int | None
    clean_distance: float | None
    reasons: list[str]


class _ZeroOne(TypedDict, total=False):
    twin_error: float
    flip_rate: float
    bound: float
    test_error: float


class _Store(_ZeroOne, total=False):
    """A pair store of ``ncm bound``."""

    path: str
    pairs: int


class _Estimates(TypedDict, total=False):
    oracle_pairs: int
    term_1_on: str
    train_rows: int | None
    spurious_dim: str
    tolerance: float | None
    disagreeing_pairs: int
    unlabelled_pairs: int
    eigenvalues: list[float]


class _Oracle(TypedDict, total=False):
    where: str
    train_rows: int
    test_risk: float | None
    test_error: float | None
    gap: float | None


class _BoundOptions(TypedDict, total=False):
    probe: str
    features: str
    oracle_pairs: str | list[str]
    pairs: str | list[str] | None
    clean_pairs: str | list[str] | None
    train: str | None
    output: str | None
    explain: bool
    spurious_dim: int | None
    bootstrap: int
    seed: int
    ranks: str | None
    pair_counts: str | None
    oracle_train: str | None


class Bound(TypedDict, total=False):
    """The result of ``ncm bound``."""

    loss: str
    rank: int
    spurious_dim: int
    s: int
    weight_norm: float
    term_1: float
    theta_m_theta: float
    root_bound: float
    misalignment: float
    term_2: float
    distance: float
    lambda_1: float
    lambda_s_next: float
    misalignment_upper: float
    term_2_upper: float
    bound: float
    upper_bound: float
    erm_bound: float
    noise_corollary: _Noise
    test_risk: float | None
    slack: float | None
    holds: bool
    exact: bool
    zero_one: _ZeroOne | None
    oracle_stores: list[_Store]
    pair_stores: list[_Store]
    estimates: _Estimates
    intervals: dict[str, Interval]
    bootstrap: dict[str, float | None] | None
    path: list[_Point]
    summary: _Summary | None
    pair_counts: list[_Point]
    oracle: _Oracle | None
    probe: _Probe
    options: _BoundOptions


class _Pick(TypedDict):
    method: str
    rule: str
    hyper_parameters: dict[str, float]
    metrics: dict[str, float | None]


class _Picked(_Pick, total=False):
    oracle: bool
    trial: int
    seeds: list[int] | int | None
    epochs: list[int] | list[int | None] | None
    sd: dict[str, float | None] | None
    values: dict[str, list[float | None]]


class _SweepData(TypedDict, total=False):
    features: str
    content_sha256: str | None
    fingerprint: str
    target: str
    train: str | None
    val: str | None
    test: str | None
    train_rows: int
    val_rows: int
    test_rows: int
    pairs: str | list[str] | None
    pairs_used: int
    pairs_held_out: int
    numerical_rank: int


class _TrainingOptions(TypedDict, total=False):
    features: str
    source: str
    pairs: str | list[str] | None
    output: str
    train: str | None
    val: str | None
    test: str | None
    leave_out: str | None
    groups: str | None
    save_probes: str | None
    search: list[str]
    seeds: int
    seed: int


class Sweep(TypedDict, total=False):
    """The result of ``ncm sweep``."""

    output: str
    rows: list[_Picked]
    configurations: int
    diverged: int
    unconverged: int
    rules: dict[str, str | None]
    options: _TrainingOptions
    classes: list[str]
    data: _SweepData
    table: str
    history: str


class _Chosen(TypedDict):
    oracle: bool
    epoch: int
    metrics: dict[str, float | None]


class _PairStore(_Source, total=False):
    used: int
    held_out: int


class _FinetunePairs(_PairStore, total=False):
    stores: list[_PairStore]


class _FinetuneData(TypedDict, total=False):
    source: _Source | None
    features: _Source | None
    pairs: _FinetunePairs | None
    train: str | None
    val: str | None
    test: str | None
    train_rows: int
    checkpoint: str


class Finetune(TypedDict, total=False):
    """The result of ``ncm finetune``."""

    history: dict[str, list[float | None]]
    output: str
    method: str
    seed: int
    rule: str
    oracle: bool
    epoch: int
    epochs: int
    diverged: bool
    rules: dict[str, _Chosen | None]
    evals: list[Eval]
    checkpoint: str
    fingerprint: str
    probe: _Probe
    classes: list[str]
    data: _FinetuneData
    options: _TrainingOptions
    key: dict[str, Any]


class _Mean(TypedDict):
    mean: float
    sd: float | None
    n: int


class _Expected(TypedDict):
    metric: str
    filters: dict[str, str]


class _Expectation(_Expected, total=False):
    value: float | None
    spread: float | None
    tolerance: float | None
    min: float | None
    max: float | None
    source: str | None


class _Compared(TypedDict):
    expectation: _Expectation
    measured: _Mean | None
    state: str


class _Verdict(_Compared, total=False):
    within: float | None


class _Made(TypedDict):
    file: str
    step: str
    cell: dict[str, str]
    sha256: str | None


class _Recipe(TypedDict, total=False):
    name: str
    file: str
    sha256: str


class _Provenance(TypedDict, total=False):
    recipe: _Recipe | None
    vars: dict[str, Any]
    matrix: dict[str, list[str]]
    versions: dict[str, str | None] | None
    files: list[_Made]


class Run(TypedDict, total=False):
    """The result of ``ncm run``."""

    rows: list[dict[str, Any]]
    expect: list[_Verdict]
    provenance: _Provenance
    failed: list[dict[str, Any]]
    stopped: list[dict[str, str]]


SCHEMAS: dict[str, Any] = {"eval": Eval, "bound": Bound, "sweep": Sweep, "finetune": Finetune, "run": Run}
"""The type of each kind of result."""
