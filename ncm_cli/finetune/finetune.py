"""``ncm finetune``: trains a network, resumes after a kill, and writes checkpoint, head and results."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ncm_cli import __version__
from ncm_cli.errors import InputError, MismatchError, listing
from ncm_cli.finetune.options import FinetuneOptions, checkpoint_files
from ncm_cli.finetune.rows import ManifestRows, TrainingPictures, read_rows
from ncm_cli.finetune.train import Epoch, Training, best_epochs, config_of, network_request
from ncm_cli.images.encoder import load_encoder, request_key, start_loading
from ncm_cli.images.network import TorchEncoder
from ncm_cli.images.request import EncoderRequest
from ncm_cli.images.weights import tuned_facts, write_tuned
from ncm_cli.options import check, parse_workers, values_of
from ncm_cli.probes.evaluate import evaluate
from ncm_cli.probes.options import EvalOptions
from ncm_cli.probes.problem import Problem
from ncm_cli.probes.reading import read_method_problem
from ncm_cli.probes.record import flags_of, pairs_used, probe_of
from ncm_cli.probes.rules import RULES
from ncm_cli.probes.usable_pairs import read_pair_stores
from ncm_cli.progress import SILENT, Reporter
from ncm_cli.solvers.training_set import Fit, TrainingSet
from ncm_cli.store.digests import differences, digest_of
from ncm_cli.store.files import (
    atomic_path,
    jsonable,
    one_line,
    read_result,
    remove_leftovers,
    require_file,
    sha256_file,
    write_result,
    writer_lock,
)
from ncm_cli.store.probe import Probe, read_probe, record_ids, write_probe
from ncm_cli.store.roles import Role

NOT_IN_KEY = ("source", "root", "pairs", "output", "model", "pretrained", "device", "workers", "fresh")
"""Options that don't change the result, or only through the contents of the files that they name."""

_MAGIC = b"ncm-finetune-unfinished-1"


def unfinished_file(output: Path) -> Path:
    """The file in which an unfinished run keeps its state after each epoch."""
    return output.with_name(f".{output.name}.partial")


def finetune(options: FinetuneOptions, *, reporter: Reporter = SILENT) -> dict[str, Any]:
    """Train a network, and write the epoch that the rule picks: checkpoint, head and results.

    After each epoch the state is written to a file beside the output, so that the same command resumes after
    a kill; on a CPU the result then has the same bits as that of an uninterrupted run. A finished result of
    the same settings, rows, pictures and pairs isn't changed.

    Returns
    -------
    dict
        The body of ``NAME.json``: ``history`` has every epoch; ``rules`` the choice of each rule, None if it
        has none; ``evals`` the results of ``ncm eval`` for the kept weights on validation and test rows. Also
        ``written``, False if the result was there already.

    Raises
    ------
    UsageError
        Options that don't go together.
    InputError
        Rows, columns, pairs, pictures or weights that can't be used; training that diverged at once.
    MismatchError
        Outputs or an unfinished run of other settings.
    """
    check(options)
    rows = read_rows(options, reporter)
    with writer_lock(options.output):
        for path in (*checkpoint_files(options.output), unfinished_file(options.output)):
            remove_leftovers(path)
        key = jsonable(_key(options, rows))
        if body := _finished(options, key, reporter):
            return body
        problem = _read_problem(options, rows, reporter)
        start_loading(network_request(options), reporter)
        network = load_encoder(network_request(options), device=options.device, reporter=reporter)
        assert isinstance(network, TorchEncoder)
        training = Training(options, problem, rows, network)
        pictures = TrainingPictures(
            rows.image_files, training.needed, network.preprocess, parse_workers(options.workers), reporter
        )
        history, best = _run(training, pictures, key, reporter)
        body = _write(training, pictures, rows, history, best, reporter) | {"key": key}
        write_result(checkpoint_files(options.output)[2], "finetune", body)
        _remove_unfinished(options.output, key)
    return body | {"written": True}


def _key(options: FinetuneOptions, rows: ManifestRows) -> dict[str, Any]:
    """Everything on which the result depends."""
    settings = {name: value for name, value in jsonable(options).items() if name not in NOT_IN_KEY}
    contents = [store.content_sha256 for store in read_pair_stores(options.pairs)]
    return {
        "options": settings | {"method": options.chosen_method, "rule": options.chosen_rule},
        "rows": rows.content_sha256,
        "pairs": contents[0] if len(contents) == 1 else contents or None,
        "network": request_key(network_request(options)),
        "versions": {"ncm": __version__, "torch": str(torch.__version__)},
    }


def _refusal(path: Path, recorded: dict[str, Any], asked: dict[str, Any], what: str) -> MismatchError:
    return MismatchError(
        what,
        where=path,
        found=differences(recorded, asked),
        fix="another -o, the same settings, or --fresh to start over",
    )


def _finished(options: FinetuneOptions, key: dict[str, Any], reporter: Reporter) -> dict[str, Any] | None:
    """The existing result, None if it is missing or damaged; `MismatchError` if it has other settings."""
    checkpoint, probe, result = files = checkpoint_files(options.output)
    if options.fresh or not result.exists():
        return None
    body = read_result(result, kind="finetune", fix="--fresh makes it again")
    if body.get("key") != key:
        raise _refusal(result, dict(body.get("key") or {}), key, "there is a result of other settings")
    with contextlib.suppress(InputError, FileNotFoundError):
        if (sha256_file(checkpoint), read_probe(probe).sha256) == (
            body["checkpoint"],
            body["probe"]["sha256"],
        ):
            reporter.note(f"{options.output} is up to date")
            for path in files:  # make compares times
                os.utime(path)
            _remove_unfinished(options.output, key)
            if (file := unfinished_file(options.output)).exists():
                reporter.note(f"{file} was left by a run with other settings; delete it if it isn't needed")
            return body | {"written": False}
    return None


def _read_problem(options: FinetuneOptions, rows: ManifestRows, reporter: Reporter) -> Problem:
    """The rows and pairs, read as by ``ncm fit``; refuses pairs whose pictures aren't in the source."""
    columns = ("envs", "dro_groups")
    problem = read_method_problem(options, columns, reporter, features=options.source, store=rows)
    if (pairs := problem.pairs) is not None:
        members = zip(pairs.ids, (pairs.row_a, pairs.row_b), strict=True)
        absent = dict.fromkeys(id for ids, at in members for id, row in zip(ids, at, strict=True) if row < 0)
        if absent:
            raise InputError(
                f"{len(absent):,} members of pairs aren't in the source, so their pictures can't be found",
                where=listing(map(str, values_of(options.pairs))),
                found=listing(absent),
                expected=f"ids of {options.source}",
            )
    return problem


def _run(
    training: Training, pictures: TrainingPictures, key: dict[str, Any], reporter: Reporter
) -> tuple[list[Epoch], dict[str, Any]]:
    """Train the missing epochs; returns the history of all epochs, and the weights that the rule picks."""
    options, file = training.options, unfinished_file(training.options.output)
    history: list[Epoch] = []
    best: dict[str, Any] = {}
    if file.exists():
        state = _unfinished(file, key, options)
        if state:
            training.load(state)
            history, best = state["history"], state["best"]
            reporter.note(
                f"going on after an interrupted run: {len(history)} of {options.epochs} epochs are done"
            )
    left = options.epochs - len(history)
    with reporter.task("training", left * len(training.train.ids), "rows") as task:
        for number in range(len(history) + 1, options.epochs + 1):
            epoch = training.epoch(number, pictures, task)
            if math.isfinite(epoch["train_loss"]):
                with np.errstate(invalid="ignore", over="ignore"):  # weights that have just diverged
                    epoch |= training.measure(pictures)
            if not all(map(math.isfinite, (epoch["train_loss"], epoch.get("val_log_loss", math.nan)))):
                what = f"the training diverged in epoch {number}"
                if not history:
                    raise InputError(what, found=f"--lr {options.lr:g}", fix="a smaller --lr or --penalty")
                reporter.warn(f"{what}; the results of the epochs before it are kept")
                break
            history.append(epoch)
            reporter.detail(
                f"epoch {number}: " + ", ".join(f"{name} {value:.4g}" for name, value in epoch.items())
            )
            if best_epochs(history)[options.chosen_rule] == number - 1:
                best = training.copy()
            # Saved in memory first: on a full disk torch's writer raises only an assertion of C++.
            buffer = io.BytesIO()
            torch.save({"key": key, "history": history, "best": best, **training.state()}, buffer)
            with atomic_path(file) as temporary, temporary.open("wb") as stream:
                stream.write(_head(buffer.getbuffer(), key))
                stream.write(buffer.getbuffer())
    return history, best


def _head(data: bytes | memoryview, key: dict[str, Any]) -> bytes:
    """The first line of an unfinished run's file: the digests of its state and its key."""
    return b"%s %s %s\n" % (_MAGIC, hashlib.sha256(data).hexdigest().encode(), digest_of(key).encode())


def _remove_unfinished(output: Path, key: dict[str, Any]) -> None:
    """Remove the unfinished run of these settings, but not one of other settings."""
    file = unfinished_file(output)
    if file.is_file():
        with file.open("rb") as stream:
            head = stream.read(len(_head(b"", key)))
        if head.startswith(_MAGIC) and head.split()[-1:] == [digest_of(key).encode()]:
            file.unlink()


def _unfinished(file: Path, key: dict[str, Any], options: FinetuneOptions) -> dict[str, Any] | None:
    """The state of an unfinished run of these settings; None if ``--fresh`` replaces a run of others."""
    try:
        head, _, data = require_file(file).read_bytes().partition(b"\n")
        if head.split()[:-1] != _head(data, key).split()[:-1]:
            raise ValueError("contents that don't match their digest")
        state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        recorded = state["key"]
    except Exception as error:  # torch raises errors of many classes on foreign files
        if options.fresh:
            return None
        what = "the file of an unfinished run can't be read"
        reason = one_line(error) or type(error).__name__
        raise InputError(what, where=file, found=reason, fix="--fresh starts over") from error
    if recorded == key:
        return state
    if options.fresh:
        return None
    raise _refusal(file, recorded, key, "there is an unfinished run of other settings")


def _write(
    training: Training,
    pictures: TrainingPictures,
    rows: ManifestRows,
    history: list[Epoch],
    best: dict[str, Any],
    reporter: Reporter,
) -> dict[str, Any]:
    """Write checkpoint and head, and evaluate them like ``ncm embed`` and ``ncm eval``; the result's body."""
    options, problem, picks = training.options, training.problem, best_epochs(history)
    rule, chosen = options.chosen_rule, picks[options.chosen_rule]
    checkpoint, probe_file, result = checkpoint_files(options.output)
    training.take(best)
    # The image size is the option's, else that of the checkpoint of ncm finetune that training began with.
    side = options.image_size or tuned_facts(options.pretrained).get("image_size")
    tuned = {"model": options.model, "representation": options.representation, "image_size": side}
    write_tuned(checkpoint, training.module, tuned)
    request = EncoderRequest(model=options.model, pretrained=str(checkpoint), precision=options.precision)
    network = load_encoder(request, device=training.network.device, reporter=SILENT)
    probe = _probe(training, network.description, history, chosen)
    write_probe(probe_file, probe)
    features, evals = np.zeros((rows.rows, options.representation), np.float32), []
    roles: tuple[Role, ...] = ("val", "test")
    measured = [part for part in roles if part in training.at]
    for part in measured:
        features[training.at[part]] = pictures.features(network, training.at[part])
    rows.embedded(network.description, features)
    rows.forget_others(problem.target.name, problem.target.known)
    asked = EvalOptions(
        probe=probe_file, features=options.source, groups=options.groups, target=problem.target.name
    )
    for part in measured:
        where = problem.roles.where[part]
        body = evaluate(dataclasses.replace(asked, where=where), store=rows, reporter=reporter)
        evals.append(body | {"kind": "eval", "options": body["options"] | {"output": str(result)}})
    rules = {
        name: {"oracle": RULES[name].oracle, "epoch": at + 1, "metrics": history[at]} if at >= 0 else None
        for name, at in picks.items()
    }
    names = dict.fromkeys(name for epoch in history for name in epoch)
    return jsonable(
        {
            "output": str(options.output),
            "method": config_of(options).label,
            "seed": options.seed,
            "rule": rule,
            "oracle": RULES[rule].oracle,
            "epoch": chosen + 1,
            "epochs": len(history),
            "diverged": len(history) < options.epochs,
            "rules": rules,
            "history": {"epoch": list(range(1, len(history) + 1))}
            | {name: [epoch.get(name) for epoch in history] for name in names},
            "evals": evals,
            "checkpoint": sha256_file(checkpoint),
            "fingerprint": probe.fingerprint,
            "probe": evals[0]["probe"],
            "classes": problem.target.classes,
            "data": probe.meta["data"],
            "options": jsonable(options),
        }
    )


def _probe(training: Training, encoder: dict[str, Any], history: list[Epoch], chosen: int) -> Probe:
    """The head as a probe of the checkpoint's representations."""
    options, problem = training.options, training.problem
    config, where, oracle = config_of(options), problem.roles.where, RULES[options.chosen_rule].oracle
    weight, bias = training.probe()
    trained = ("epochs", "batch_size", "pair_batch", "momentum", "upweight", "seed")
    record = {
        "command": "finetune",
        "method": config.label,
        "hyper_parameters": config.hyper
        | {"penalty": options.chosen_penalty, "solver": "adam" if training.domainbed else "sgd"}
        | {name: getattr(options, name) for name in trained},
        "selection": {
            "rule": options.chosen_rule,
            "oracle": oracle,
            "note": "",
            "folds": 0 if training.fold is None else 1,
            "groups": options.groups,
            "chosen": chosen,
            "path": [{"epoch": at + 1, **metrics} for at, metrics in enumerate(history)],
        },
        "flags": flags_of(problem, oracle),
        "options": jsonable(options) | {name: where[name] for name in ("train", "val")},
    }
    paired = problem.pairs and pairs_used(problem.pairs, training.trained_pairs, training.measured_pairs)
    rows = {"train": training.train, "val": problem.val}
    origin = {
        "rows": {name: record_ids(part.ids) for name, part in rows.items() if part is not None},
        "data": {
            "checkpoint": str(options.output),
            "source": {"path": str(options.source), "content_sha256": problem.content_sha256},
            "pairs": paired,
            **{str(part): text for part, text in where.items()},
            **{f"{part}_rows": len(at) for part, at in training.at.items()},
        },
    }
    part = TrainingSet(X=np.zeros((1, weight.shape[1])), y=np.zeros(1), n_classes=len(problem.target.classes))
    fit = Fit(rank=0, weight_decay=options.weight_decay, weight=weight, bias=bias)
    return probe_of(dataclasses.replace(problem, encoder=encoder), part, fit, record, origin)
