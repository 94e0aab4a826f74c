"""Published weights: from the Hugging Face cache, or downloaded into it.

What a checkpoint file holds, read without running anything in it.

Nothing is unpickled freely: safetensors, ``torch.load(weights_only=True)``, and TorchScript archives (whose
reader builds tensors and TorchScript modules only).

Which weights a request names: the file or tag, and what they are by content.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import logging
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncm_cli.errors import InputError, listing, nearest
from ncm_cli.store.files import sha256_file

_CACHE_ERRORS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOTDIR, errno.EEXIST})
_ELSEWHERE = "--pretrained FILE, or --model local-dir:FOLDER, for weights that are here"


@contextmanager
def fetching(what: str, option: str, cache: str | Path | None = None) -> Iterator[None]:
    """Turn any failure of a download into one InputError; libraries raise dozens of kinds of it.

    ``option`` is what asks for it, and ``cache`` the folder that keeps it, if not the hub's. The hub client's
    own words are left out, logged or raised: they advise for programs.
    """
    from huggingface_hub import constants

    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except InputError:
        raise
    except Exception as error:
        why, fix = _reason(error, offline=cache is None and constants.HF_HUB_OFFLINE)
        raise InputError(
            f"{what} could not be fetched, and the cache lacks it",
            where=f"{option}; cache folder {cache or constants.HF_HUB_CACHE}",
            found=why,
            fix=f"{fix}; or {_ELSEWHERE}",
        ) from error
    finally:
        log.setLevel(level)


def _reason(error: Exception, *, offline: bool) -> tuple[str, str]:
    """Why a download failed, and what to do."""
    if isinstance(error, OSError) and error.errno in _CACHE_ERRORS:
        why = f"the cache can't be written: {os.strerror(error.errno).lower()}"
        return why, "make it writable, or name another with HF_HOME=FOLDER"
    if offline:
        why = "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so the network isn't used"
        return why, "unset it once, with a network connection"
    status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "code", None)
    if status is not None:
        return (
            f"the server answered {status}",
            "check the name; a private or gated model needs HF_TOKEN=TOKEN",
        )
    return f"the server can't be reached ({type(error).__name__})", "run once with a network connection"


def hub_file(repository: str, filenames: Sequence[str]) -> Path:
    """The first of several files that a Hugging Face repository has: from the cache, else downloaded.

    Without a connection the hub client retries for most of a minute, so the connection is tried once first.
    """
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    hub: Any = importlib.import_module("huggingface_hub.utils")
    for filename in filenames:
        cached = try_to_load_from_cache(repository, filename)
        if isinstance(cached, str):
            return Path(cached)
    if not constants.HF_HUB_OFFLINE:
        hub.get_session().head(constants.ENDPOINT, timeout=10)
    for filename in filenames[:-1]:
        try:
            return Path(hf_hub_download(repository, filename))
        except hub.EntryNotFoundError:
            continue
    return Path(hf_hub_download(repository, filenames[-1]))


if TYPE_CHECKING:
    import torch


def check_checkpoint(path: Path) -> str:
    """``safetensors``, ``torchscript``, ``torch`` or ``numpy``, by content; or an InputError."""
    with path.open("rb") as stream:
        head = stream.read(256)
    if not head:
        raise InputError("the checkpoint file is empty", where=path)
    if head.startswith(b"version https://git-lfs"):
        raise InputError(
            "the checkpoint is a Git LFS pointer, not the weights",
            where=path,
            fix="git lfs pull",
        )
    if head.startswith(b"PK\3\4"):
        try:
            names = zipfile.ZipFile(path).namelist()
        except zipfile.BadZipFile:
            raise InputError(
                "the checkpoint file is damaged or cut short", where=path, fix="copy or download it again"
            ) from None
        if any(name.endswith("/constants.pkl") for name in names):
            return "torchscript"
        if any(name.endswith("data.pkl") for name in names):
            return "torch"
        if any(name.endswith(".npy") for name in names):
            return "numpy"
    elif head[:2] == b"\x80\x02":
        return "torch"
    elif head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return "safetensors"
    raise InputError(
        "not a checkpoint file",
        where=path,
        found=f"content that starts with {head[:16]!r}",
        expected="safetensors, a file of torch.save, or a TorchScript archive",
    )


@contextmanager
def reading(path: Path, model: str) -> Iterator[None]:
    """Turn what readers of checkpoints raise on foreign files into an InputError that names the file."""
    import pickle

    try:
        yield
    except InputError:
        raise
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))  # the rest advises to load it all the same
        raise InputError(
            "the checkpoint holds Python objects beyond tensors, which are never loaded",
            where=path,
            found=f"an object of {named[1]}" if named else "an unreadable object",
            fix="where it was made, torch.save(model.state_dict(), FILE), or save that as .safetensors; then "
            "--pretrained FILE",
        ) from error
    except Exception as error:  # readers of foreign tensors raise a dozen kinds, assertions among them
        raise InputError(
            f"the checkpoint can't be loaded into the model {model}",
            where=path,
            found="no named tensors" if isinstance(error, AttributeError) else first_line(error, 12),
        ) from error


def tensors(path: Path, model: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by name, on the CPU, with the wrappers of training scripts taken off."""
    import torch

    kind = check_checkpoint(path)
    with reading(path, model):
        if kind == "safetensors":
            from safetensors.torch import load_file

            loaded: Any = load_file(path, device="cpu")
        elif kind == "torchscript":
            loaded = torchscript_tensors(path)
        elif kind == "numpy":
            raise ValueError("it is a NumPy archive; only open_clip's own loader reads those")
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        for wrapper in ("state_dict_ema", "model_ema", "state_dict", "model"):
            if isinstance(loaded, Mapping) and isinstance(loaded.get(wrapper), Mapping):
                loaded = loaded[wrapper]
                break
        if not isinstance(loaded, Mapping) or not loaded:
            raise ValueError(f"it holds a {type(loaded).__name__}, not named tensors")
    named = {str(name): value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    for prefix in ("_orig_mod.", "module.", "_orig_mod."):
        if named and all(name.startswith(prefix) for name in named):
            named = {name.removeprefix(prefix): value for name, value in named.items()}
    return named


def torchscript_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a TorchScript archive, such as OpenAI's own CLIP files, without running the model."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.jit", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=r".*torch\.jit", category=FutureWarning)
        return dict(torch.jit.load(str(path), map_location="cpu").state_dict())


def refuse_other_keys(missing: Iterable[str], unexpected: Iterable[str], *, path: Path, model: str) -> None:
    """InputError that lists tensors which only the model or only the checkpoint has, where there are any."""
    missing, unexpected = list(missing), list(unexpected)
    if not missing and not unexpected:
        return
    raise InputError(
        f"the checkpoint doesn't fit the model {model}",
        where=path,
        expected=f"{len(missing)} tensors that it lacks: {listing(missing)}" if missing else None,
        found=f"{len(unexpected)} tensors too many: {listing(unexpected)}" if unexpected else None,
        fix="check --model, or rename the tensors",
    )


def state_sha256(module: torch.nn.Module) -> str:
    """SHA-256 over a module's tensors: names, dtypes, shapes and bytes, in order of name."""
    import torch

    total = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        whole = value.detach().cpu().contiguous()
        total.update(f"{name} {whole.dtype} {tuple(whole.shape)}\n".encode())
        total.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
    return total.hexdigest()


def first_line(error: BaseException, lines: int = 1) -> str:
    """The start of an error's message on one line without colours, or its kind where it has none."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or type(error).__name__
    return " ".join(" ".join(text.splitlines()[:lines]).split())[:500]


if TYPE_CHECKING:
    from ncm_cli.images.encoder import EncoderRequest

CHECKPOINT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar", ".th")


def facts(request: EncoderRequest) -> dict[str, Any]:
    """The part of a request's key that says which weights and configuration, by content where they are local.

    A path that isn't there counts by its text: loading it will say what is wrong.
    """
    from ncm_cli.images.encoder import effective_pretrained

    if request.random_init:
        found: dict[str, Any] = {"weights": {"random_init": request.seed}}
    else:
        named = effective_pretrained(request)
        found = {"weights": digest(named) if named and names_a_file(named) else named}
    if names_a_config(request.model) and Path(request.model).expanduser().is_file():
        found |= {"model": Path(request.model).stem, "config": digest(request.model)}
    elif request.model.startswith("local-dir:"):
        folder = Path(request.model.removeprefix("local-dir:")).expanduser()
        files = sorted(path for path in folder.glob("*") if path.is_file()) if folder.is_dir() else []
        found |= {"model": f"local-dir:{folder.name}", "files": {path.name: digest(path) for path in files}}
    return found


def names_a_config(model: str) -> bool:
    """Whether ``--model`` is written like the path of an open_clip configuration."""
    return model.endswith(".json")


def names_a_file(pretrained: str) -> bool:
    """Whether ``--pretrained`` is an existing file rather than a tag.

    A tag never has a suffix or a separator, so a stray file called ``openai`` doesn't hide the tag.
    """
    return looks_like_a_path(pretrained) and Path(pretrained).expanduser().is_file()


def looks_like_a_path(pretrained: str) -> bool:
    """Whether ``--pretrained`` is written like a path: with a separator, a suffix or a tilde."""
    return bool(Path(pretrained).suffix) or os.sep in pretrained or pretrained.startswith(("~", "."))


def digest(path: str | Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file, remembered while its size and time of change stay the same."""
    state = Path(path).expanduser().stat()
    return {"size": state.st_size, "sha256": _sha256(str(path), state.st_size, state.st_mtime_ns)}


@lru_cache(maxsize=64)
def _sha256(path: str, size: int, mtime_ns: int) -> str:
    return sha256_file(Path(path).expanduser())


def resolve(
    pretrained: str, tags: Collection[str], *, model: str, tag_of: Callable[[str], str] = str
) -> Path | str:
    """The checkpoint file or the tag that ``--pretrained`` names.

    Parameters
    ----------
    tags
        The tags that the model has.
    tag_of
        A tag's usual spelling, so that ``LAION2b-s34b`` finds ``laion2b_s34b``.

    Raises
    ------
    InputError
        A folder, a missing file, a file that is no checkpoint, an unknown tag: each has its own message.
    """
    path = Path(pretrained).expanduser()
    if names_a_file(pretrained):
        check_checkpoint(path)
        return path
    if tag_of(pretrained) in tags:
        return tag_of(pretrained)
    if path.is_dir():
        files = [found.name for found in sorted(path.iterdir()) if found.suffix in CHECKPOINT_SUFFIXES]
        raise InputError(
            "--pretrained names a folder, not a checkpoint file",
            where=path,
            expected="a file, or a tag",
            fix=f"one of its files: {listing(files)}" if files else None,
        )
    if path.is_file():
        check_checkpoint(path)
        return path
    if looks_like_a_path(pretrained):
        beside = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
        close = nearest(path.name, beside)
        raise InputError(
            "no such checkpoint file",
            where=path,
            found=None if path.parent.is_dir() else f"the folder {path.parent} is not there either",
            fix=f"did you mean {path.parent / close}?" if close else None,
        )
    close = nearest(pretrained, tags)
    raise InputError(
        f"no tag or file named {pretrained!r} for the model {model}",
        where="--pretrained",
        expected=f"a checkpoint file, or one of the tags: {listing(tags, 40)}",
        fix=f"did you mean {close!r}?" if close else None,
    )


def require_weights(pretrained: str | None, *, model: str, example: str) -> str:
    """``pretrained``, or the error for a model without weights: random features must be asked for."""
    if pretrained is None or not pretrained.strip():
        raise InputError(
            f"no weights given for the model {model}",
            where="--pretrained",
            expected=example,
            fix="name the weights, or ask for random ones with --random-init",
        )
    return pretrained
