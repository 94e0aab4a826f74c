"""Encodes prompts with the text tower of the model that made a store's features."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ncm_cli.errors import InputError, listing
from ncm_cli.images import weights
from ncm_cli.images.encoder import start_loading
from ncm_cli.images.options import OPENAI_TEMPLATES, TextOptions, parse_classes, parse_prompt, words_for
from ncm_cli.images.request import EncoderRequest, request_of
from ncm_cli.options import is_file
from ncm_cli.progress import Reporter
from ncm_cli.store.digests import OTHER_WEIGHTS, require_same_encoder
from ncm_cli.store.features import FeatureStore
from ncm_cli.store.files import require_file
from ncm_cli.store.roles import classes_among
from ncm_cli.store.tables import read_table

if TYPE_CHECKING:
    from ncm_cli.images.network import TorchEncoder

TEXT_BATCH = 256
"""Texts in a batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTower:
    """The text tower that belongs to the image tower of a store's features.

    A classifier's logits are ``logit_scale`` times the cosine of picture and text, plus ``logit_bias`` if the
    model has one.
    """

    request: EncoderRequest
    encoder: TorchEncoder
    tokenizer: Any
    logit_scale: float
    logit_bias: float | None
    reporter: Reporter

    def tokens(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """int64 (n, length): the tokens of each text; warns if a text is cut to the model's length."""
        tokens, cut = [], ""
        for start in range(0, len(texts), TEXT_BATCH):
            part = list(texts[start : start + TEXT_BATCH])
            tokens.append(self.tokenizer(part))
            length = tokens[0].shape[1]
            # At twice the length, the second half of a text that fits is padding, a single value.
            beyond = self.tokenizer(part, context_length=2 * length)[:, length:]
            longer = (beyond != beyond[:, -1:]).any(dim=1).nonzero()
            cut = cut or (part[int(longer[0])] if len(longer) else "")
        if cut:
            self.reporter.warn(f"prompts of more than {length} tokens are cut, such as {cut!r}")
        return np.concatenate(tokens)

    def encode(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """float32 (n, d): ``encode_text`` of the tokens, with rows of unit length if the store's have that.

        Computed in fp32, whatever the precision of the store's features.
        """
        import torch

        from ncm_cli.solvers.device import exact

        module: Any = self.encoder.model.module
        features = []
        with self.reporter.task("encoding texts", len(tokens), "texts") as task:
            for start in range(0, len(tokens), TEXT_BATCH):
                part = torch.from_numpy(tokens[start : start + TEXT_BATCH]).to(self.encoder.device)
                with torch.inference_mode(), exact(self.encoder.device, "fp32"):
                    features.append(module.encode_text(part).float().cpu().numpy())
                task.advance(len(part))
        return self.request.finish(np.concatenate(features))


def require_apart(what: str, names: Sequence[str], tokens: NDArray[np.int64], where: str) -> None:
    """Refuse two of ``names`` with the same row of ``tokens``, since the model can't tell them apart."""
    first: dict[bytes, str] = {}
    for name, row in zip(names, tokens, strict=True):
        other = first.setdefault(row.tobytes(), name)
        if other is not name:
            raise InputError(
                f"{what} that the model can't tell apart: it reads the same tokens for both",
                where=where,
                found=f"{other!r} and {name!r}",
                expected="a difference in more than case, blanks and HTML entities, among the first "
                f"{tokens.shape[1]} tokens",
                fix="other words, or a shorter prompt",
            )


def load_text_tower(store: FeatureStore, options: TextOptions, reporter: Reporter) -> TextTower:
    """Load the encoder of a store's features, for its text tower.

    Raises
    ------
    InputError
        An encoder without text, weights without a text tower, or what `load_encoder` raises.
    MismatchError
        The loaded encoder isn't the one of the features: weights, activation or another field differs.
    """
    described = store.encoder
    if described.get("kind") != "open_clip":
        raise InputError(
            "the store's encoder has no text tower, so prompts have no features beside its rows",
            where=store.path,
            found=f"encoder {described.get('model')!r}",
            expected="features that ncm embed made with an open_clip model",
            fix="ncm embed SOURCE --model ViT-B-32-quickgelu --pretrained openai -o F.h5",
        )
    made_with = weights.relocated(store.options, store.path.parent)
    made_like = request_of(described, made_with, pretrained=options.pretrained, where=store.path)
    request = dataclasses.replace(made_like, precision="fp32")
    start_loading(request, reporter)
    from ncm_cli.images.network import TorchEncoder

    encoder = TorchEncoder(request, options.device, reporter)
    loaded = encoder.description | {"precision": described.get("precision")}
    require_same_encoder(
        store.path, described, "the encoder loaded", loaded, ignore_view=True, fix=OTHER_WEIGHTS
    )
    model = encoder.model
    if model.lacks:
        raise InputError(
            "the weights have no complete text tower",
            where=request.weights or request.model,
            found=f"{len(model.lacks)} tensors missing: {listing(model.lacks, 4)}",
            expected="weights of both towers",
        )
    assert model.tokenizer is not None
    with weights.fetching(f"the tokenizer of {request.model}", f"--model {request.model}"):
        try:
            tokenizer = model.tokenizer()
        except ImportError as error:
            what = f"the tokenizer of {request.model} needs a package that isn't installed"
            raise InputError(what, found=error, fix=f"pip install {error.name}") from error
    module: Any = model.module
    bias = getattr(module, "logit_bias", None)
    return TextTower(
        request=request,
        encoder=encoder,
        tokenizer=tokenizer,
        logit_scale=module.logit_scale.exp().item(),
        logit_bias=None if bias is None else bias.item(),
        reporter=reporter,
    )


def read_classes(
    options: TextOptions, store: FeatureStore, target: str | None, known: Sequence[str] = ()
) -> dict[str, str]:
    """The classes in order, and the words for each: from the options, else ``known``, else of a column.

    Raises `InputError` if there are none, or if two have the same words.
    """
    if options.classes is not None:
        classes = parse_classes(options.classes)
    elif options.class_map is not None:
        classes = _read_class_map(options.class_map)
    elif known or target is not None:
        all_rows = np.ones(store.rows, dtype=bool)
        known = known or classes_among(store, str(target), all_rows)
        classes = {name: words_for(name) for name in known}
    else:
        raise InputError("the store has no label to name classes", where=store.path, fix="--classes cat,dog")
    first: dict[str, str] = {}
    for name, words in classes.items():
        if first.setdefault(words, name) != name:
            raise InputError(
                "two classes with the same words",
                where=options.class_map or store.path,
                found=f"{words!r} for {first[words]!r} and {name!r}",
                fix="--classes NAME=WORDS,NAME=WORDS",
            )
    return classes


def _read_class_map(path: Path) -> dict[str, str]:
    table = read_table(path, what="class map")
    names = table.column("class")
    words = table.column("text") if "text" in table.columns else [""] * len(names)
    classes: dict[str, str] = {}
    for at, (name, text) in enumerate(zip(names, words, strict=True)):
        if not name or name in classes:
            what = f"a class that is {'listed twice' if name else 'blank'}"
            raise InputError(what, where=path, found=f"{table.row_name(at)}: {name!r}")
        classes[name] = text or words_for(name)
    return classes


def read_prompts(prompts: Sequence[str]) -> list[str]:
    """The distinct texts of ``--prompts``: each value is a text, a file of texts, or ``openai``."""
    texts: list[str] = []
    for prompt in prompts:
        if prompt == OPENAI_TEMPLATES:
            import open_clip

            texts += [template("{}") for template in open_clip.OPENAI_IMAGENET_TEMPLATES]
        elif "{" in prompt or not is_file(Path(prompt)):
            texts.append(prompt)
        else:
            try:
                lines = require_file(prompt).read_text(encoding="utf-8-sig").splitlines()
            except UnicodeDecodeError as error:
                raise InputError("prompts that aren't UTF-8 text", where=prompt, found=error) from error
            texts += [parse_prompt(line.strip()) for line in lines if line.strip()]
    if not texts:
        raise InputError("no prompts", where=f"--prompts {listing(prompts)}")
    return list(dict.fromkeys(texts))


def filled(template: str, words: str) -> str:
    """A template with the words for a class filled in."""
    return template.replace("{class}", "{}").replace("{}", words)
