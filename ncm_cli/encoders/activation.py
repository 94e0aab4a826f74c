"""QuickGELU or GELU: which a checkpoint was trained with, as far as that can be told.

OpenAI trained CLIP with QuickGELU, x·sigmoid(1.702 x). The weights have the same names and shapes either way,
so loading them under a plain-GELU name gives plausible, worse features without an error.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from ncm_cli.progress import Reporter

from . import weights

if TYPE_CHECKING:
    import torch

OPENAI_SETTINGS = ("input_resolution", "context_length", "vocab_size")
"""Entries that only state dicts of OpenAI's own archives hold."""


def uses_quick_gelu(tower: torch.nn.Module) -> bool | None:
    """Whether an image tower uses QuickGELU; None where it has neither activation: then it can't matter."""
    names = {type(part).__name__ for part in tower.modules()}
    if "QuickGELU" in names:
        return True
    return False if "GELU" in names else None


def warn_on_mismatch(
    model_quick: bool, path: Path, model: str, tag_quick: bool | None, likely: bool, reporter: Reporter
) -> None:
    """Warn where the weights' activation is known to be the other one, or can't be known and might be.

    ``tag_quick`` is what open_clip records for a tag; None for a local file, which is looked at.
    ``likely``: nothing about the model rules the other activation out.
    """
    trained, evidence = (tag_quick, "its tag") if tag_quick is not None else evidence_in(path)
    names = {True: "QuickGELU", False: "GELU"}
    used = names[model_quick]
    other = model.removesuffix("-quickgelu") if model_quick else f"{model}-quickgelu"
    if trained is None:
        if likely and not model_quick:
            reporter.warn(
                f"{path.name} doesn't say whether it was trained with GELU or QuickGELU; {used} is used, as "
                f"the model {model} says. For weights trained with QuickGELU, such as OpenAI's, use "
                f"--model {other}"
            )
    elif trained != model_quick:
        reporter.warn(
            f"QuickGELU mismatch: the model {model} uses {used}, but the weights were trained with "
            f"{names[trained]} ({evidence}): features will be wrong. Use --model {other}"
        )


def evidence_in(path: Path) -> tuple[bool | None, str]:
    """Whether a local checkpoint was trained with QuickGELU (None: it doesn't say), and how that is known."""
    for look in (_known_file, _openai_archive, _beside, _by_name):
        found, how = look(path)
        if found is not None:
            return found, how
    return None, ""


def _known_file(path: Path) -> tuple[bool | None, str]:
    """OpenAI's own files by their digest, which is part of their address."""
    from open_clip.pretrained import get_pretrained_url, list_pretrained_models_by_tag

    urls = [get_pretrained_url(model, "openai") for model in list_pretrained_models_by_tag("openai")]
    digests = {url.split("/")[-2] for url in urls if "openaipublic" in url}
    known = digests and weights.digest(path)["sha256"] in digests
    return (True, "it is OpenAI's own file") if known else (None, "")


def _openai_archive(path: Path) -> tuple[bool | None, str]:
    """A TorchScript archive or a state dict with OpenAI's settings in it."""
    if not zipfile.is_zipfile(path):
        return None, ""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if any(name.endswith("/constants.pkl") for name in names):
            return True, "it is a TorchScript archive, as OpenAI's are"
        index = next((name for name in names if name.endswith("data.pkl")), None)
        text = archive.read(index) if index else b""
    if all(name.encode() in text for name in OPENAI_SETTINGS):
        return True, "it holds the settings of an OpenAI archive"
    return None, ""


def _beside(path: Path) -> tuple[bool | None, str]:
    """The configuration that open_clip saves beside a checkpoint."""
    config = path.parent / "open_clip_config.json"
    try:
        model = json.loads(config.read_text(encoding="utf-8"))["model_cfg"]
        return bool(model.get("quick_gelu", False)), f"{config.name} beside it says so"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, ""


def _by_name(path: Path) -> tuple[bool | None, str]:
    """What the file and its folder are called: a model with its activation, or one of open_clip's tags."""
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained

    text = f"{path.resolve().parent.name}/{path.name}".lower().replace("-", "_")
    if "quickgelu" in text or "quick_gelu" in text:
        return True, "its name says so"
    tags: dict[str, set[bool]] = {}
    for model, tag in list_pretrained():
        tags.setdefault(tag, set()).add(bool(get_pretrained_cfg(model, tag).get("quick_gelu", False)))
    # Short tags (v1, meta) turn up in unrelated names; a tag used with both activations tells nothing.
    telling = (kinds for tag, kinds in tags.items() if len(tag) > 5 and tag in text and len(kinds) == 1)
    said = {kind for kinds in telling for kind in kinds}
    return (said.pop(), "its name holds a tag of open_clip's") if len(said) == 1 else (None, "")
