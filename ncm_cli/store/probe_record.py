"""The types of a probe's ``meta``, which records how it was made, as far as it is read."""

from __future__ import annotations

from typing import Any, TypedDict


class _Estimate(TypedDict):
    value: float
    low: float | None
    """None if it is infinite, and so is ``high``."""
    high: float | None


class _Fitted(TypedDict):
    rank: int
    weight_decay: float
    converged: bool


class _Candidate(_Fitted, total=False):
    flip_rate: float | None
    pair_mse: float | None
    val_accuracy: float | None
    val_log_loss: float | None
    val_mse: float | None
    bound_01: float | None
    bound_mse: float | None
    log_loss_bound: float | None
    worst_group: float | None
    test_accuracy: float | None
    test_mse: float | None
    cell_error: float | None
    worst_cell_error: float | None
    cell_log_loss: float | None
    within_flip_rate: float | None
    across_flip_rate: float | None
    guarded_bound: float | None
    cell_bound: float | None
    upweighted: bool
    pair_rows: bool


class _Epoch(TypedDict):
    """An epoch of ``ncm finetune``."""

    epoch: int


class _Measured(TypedDict):
    name: str
    bound: _Estimate


class _Control(_Measured, total=False):
    weight_decay: float | None
    val_error: _Estimate
    flip_rate: _Estimate


class _Judgement(TypedDict):
    code: str
    text: str


class _Judged(_Judgement, total=False):
    reasons: list[str]
    pairs: int
    units: int
    bound: _Estimate | None
    erm_bound: _Estimate | None
    flip_rate: _Estimate | None
    erm_flip_rate: _Estimate | None
    gain: _Estimate | None
    score: str | None


class _StoreVerdict(_Judged, total=False):
    path: str


class _Verdict(_Judged, total=False):
    stores: list[_StoreVerdict]
    about: str
    val_error: _Estimate | None
    erm_val_error: _Estimate | None
    constant_error: float | None
    cell_error: _Estimate | None
    erm_cell_error: _Estimate | None
    worst_cell_error: float | None
    within_flip_rate: _Estimate | None
    erm_within_flip_rate: _Estimate | None
    across_flip_rate: _Estimate | None
    erm_across_flip_rate: _Estimate | None
    control: str | None
    control_gain: _Estimate | None


class _Rule(TypedDict):
    rule: str


class _Selection(_Rule, total=False):
    oracle: bool
    note: str
    folds: int
    groups: str | None
    chosen: int
    path: list[_Candidate] | list[_Epoch]
    verdict: _Verdict | None
    controls: list[_Control]
    crossings: list[dict[str, Any]]


class _Options(TypedDict, total=False):
    """The options that are read again, for instance by ``ncm bound``."""

    features: str
    pairs: str | list[str] | None
    output: str
    train: str | None
    val: str | None
    test: str | None
    leave_out: str | None
    target: str | None
    groups: str | None
    upweight: str | None
    pair_rows: str | None
    overlap: str
    scaling: str
    scale_factor: float
    epochs: int
    batch_size: int
    device: str
    method: str | None
    rank: str
    weight_decay: str | float | None
    select: str | None
    folds: int
    task: str
    solver: str | None
    tolerance: float
    max_iter: int
    lr: float
    seed: int


class _Source(TypedDict, total=False):
    path: str
    content_sha256: str | None
    row_numbers_of: str | None
    train_sha256: str
    used: int
    used_sha256: str | None
    held_out: int


class _Pairs(_Source, total=False):
    stores: list[_Source]


class _Data(TypedDict, total=False):
    features: _Source | None
    source: _Source | None
    pairs: _Pairs | None
    train: str | None
    val: str | None
    test: str | None
    train_rows: int
    val_rows: int
    checkpoint: str


class _Scaling(TypedDict, total=False):
    kind: str
    factor: float | None


class _Rows(TypedDict, total=False):
    train: str
    val: str


class _Made(TypedDict):
    encoder: dict[str, Any]
    fingerprint: str


class Record(_Made, total=False):
    """The fields of the record that are read. Those not required may be absent, and there may be others."""

    scaling: _Scaling | None
    command: str
    method: str | None
    rank: int
    converged: bool | None
    hyper_parameters: dict[str, Any] | None
    selection: _Selection | None
    flags: list[str] | None
    options: _Options | None
    rows: _Rows | None
    data: _Data | None
    mixed_with: _Source | None
