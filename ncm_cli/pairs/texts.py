"""Pairs of prompts that name the same class in different settings: their members are texts, not images.

Chuang et al. 2023, Debiasing vision-language models via biased prompts, arXiv:2302.00070.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from ncm_cli.errors import InputError
from ncm_cli.images.text import filled, load_text_tower, read_classes, read_prompts, require_apart
from ncm_cli.pairs.members import Members
from ncm_cli.pairs.options import PairsOptions
from ncm_cli.progress import Reporter
from ncm_cli.store.columns import Column
from ncm_cli.store.digests import without_view
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.rows import InMemoryRows


def alternatives(options: PairsOptions) -> list[tuple[str, ...]]:
    """Sets of templates that differ only in the setting; ``|`` separates the templates of one ``--prompts``.

    All templates without ``|`` together are one set. Raises `InputError` for a set of a single template, or
    with a repeated one.
    """
    lines = [[part.strip() for part in prompt.split("|")] for prompt in read_prompts(options.prompts)]
    alone = [prompt for (prompt, *others) in lines if not others]
    sets = [tuple(line) for line in lines if len(line) > 1] + ([tuple(alone)] if alone else [])
    for prompts in sets:
        slots = {"{" in prompt for prompt in prompts}
        if len(prompts) < 2 or len(set(prompts)) < len(prompts) or not all(prompts) or len(slots) > 1:
            raise InputError(
                "prompts that make no pair",
                where="--prompts",
                found=" | ".join(map(repr, prompts)),
                expected="two or more different prompts, all with {class} or all without",
                fix="--prompts 'a photo of a {class} on land' --prompts 'a photo of a {class} on water'",
            )
    return sets


def text_members(options: PairsOptions, store: FeatureStore, reporter: Reporter) -> Members:
    """All pairs of alternatives, for each class.

    Features are of unit length if those of ``store`` are, and otherwise as ``encode_text`` gives them. Ids
    are the prompts; the label is the class, missing where prompts name none.
    """
    templates = alternatives(options)
    classes = {"": ""}
    if any("{" in prompt for prompts in templates for prompt in prompts):
        classes = read_classes(options, store, store.label_column)
    label_of: dict[str, str] = {}
    pairs: dict[tuple[str, str], None] = {}
    for alike in templates:
        for name, words in classes.items() if "{" in alike[0] else [("", "")]:
            texts = [filled(prompt, words) for prompt in alike]
            label_of |= dict.fromkeys(texts, name)
            pairs |= dict.fromkeys(itertools.combinations(texts, 2))
    ids = list(label_of)
    names = sorted(set(label_of.values()) - {""})
    codes = np.array([names.index(name) if name else -1 for name in label_of.values()])
    tower = load_text_tower(store, options, reporter)
    tokens = tower.tokens(ids)
    place = {text: at for at, text in enumerate(ids)}
    for pair in pairs:
        require_apart("a pair of prompts", pair, tokens[[place[text] for text in pair]], "--prompts")
    class_column = Column("class", codes, tuple(names))
    prompts = InMemoryRows(Path("--prompts"), ids, {"class": class_column}, label_column="class")
    prompts.embedded(without_view(store.encoder), tower.encode(tokens))
    a, b = (prompts.positions(texts) for texts in zip(*pairs, strict=True))
    # Pairs of one class are held out together, whatever their prompts.
    groups = np.where(codes >= 0, len(ids) + codes, np.arange(len(ids)))
    return Members((prompts, prompts), a, b, nodes=groups)
