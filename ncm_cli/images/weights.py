"""The weights that a request names, identified by content, and the contents of checkpoint files.

No code from a file is run: only safetensors, ``torch.load(weights_only=True)`` and the tensors of TorchScript
archives are read. Errors of other libraries while weights are fetched or read become `InputError` only here.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import logging
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncm_cli.errors import InputError, NcmError, listing, nearest
from ncm_cli.images.torchscript import torchscript_tensors
from ncm_cli.store.digests import damaged, digest_of, parse_json, require_version
from ncm_cli.store.files import (
    DIGEST,
    one_line,
    read_json,
    require_file,
    sha256_file,
    write_bytes,
    write_json,
)
from ncm_cli.store.probe import TUNED, safetensors_metadata
from ncm_cli.store.sniff import HEAD_BYTES, sniff

if TYPE_CHECKING:
    import torch

    from ncm_cli.images.request import EncoderRequest

_ALWAYS_ALLOWED_BYTES, _MAX_RATIO = 64 << 20, 8
"""Limit of an archive's unpacked size: this many bytes, plus this many times the archive's size."""

_TUNED_FACTS = {"ncm_format", "ncm_format_version", "model", "representation", "image_size", DIGEST}
"""The metadata of a checkpoint of ``ncm finetune``. Others are refused: one may be a misspelt digest."""

CHECKPOINT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar", ".th")

MIN_REMEMBERED_BYTES = 1 << 25
"""Size in bytes from which a file's digest is remembered for later runs."""

_NO_FOLDER = {errno.ENOENT, errno.ENOTDIR, errno.EEXIST}
_CACHE_ERRORS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC} | _NO_FOLDER)


def request_facts(request: EncoderRequest) -> dict[str, Any]:
    """The weights and configuration in a request's key, by content if they are local.

    A missing path is taken as text; loading it reports the error.
    """
    named, model = request.weights, request.model
    facts: dict[str, Any] = {"weights": digest(named) if named and names_a_file(named) else named}
    if request.random_init:
        facts = {"weights": {"random_init": request.seed}}
    if model.endswith(".json") and Path(model).expanduser().is_file():
        facts |= {"model": Path(model).stem, "config": digest(model)}
    elif model.startswith("local-dir:"):
        folder = Path(model.removeprefix("local-dir:")).expanduser()
        files = sorted(path for path in folder.glob("*") if path.is_file())
        facts |= {"model": f"local-dir:{folder.name}", "files": {path.name: digest(path) for path in files}}
    return facts


def digest(path: str | Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file, remembered as long as its size, mtime and ctime are the same."""
    path = Path(path).expanduser().absolute()
    now = path.stat()
    # Programs that copy or unpack files may set mtime, but can't set ctime.
    return {"size": now.st_size, "sha256": _sha256(path, now.st_size, now.st_mtime_ns, now.st_ctime_ns)}


@lru_cache(maxsize=64)
def _sha256(path: Path, *state: int) -> str:
    """SHA-256 of a file in this ``state`` (size and times), kept in the user's cache if the file is large."""
    if not state[0]:  # a file of the kernel has size 0, and reading it may never end
        return hashlib.sha256().hexdigest()
    if state[0] < MIN_REMEMBERED_BYTES:
        return sha256_file(path)
    cache: Path | None = None
    cached_digests: dict[str, Any] = {}
    with contextlib.suppress(OSError, RuntimeError, NcmError):  # an unreadable cache is written anew
        cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
        cache = (cache_home if cache_home.is_absolute() else Path.home() / ".cache") / "ncm" / "digests.json"
        cached_digests = read if isinstance(read := read_json(cache), dict) else {}
    entry = cached_digests.pop(str(path), None)
    if isinstance(entry, list) and entry[:-1] == list(state) and re.fullmatch("[0-9a-f]{64}", str(entry[-1])):
        return str(entry[-1])
    value = sha256_file(path)
    with contextlib.suppress(OSError, NcmError):
        if cache is not None:
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_json(cache, cached_digests | {str(path): [*state, value]})
    return value


def state_sha256(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over a module's tensors in order of name: names, dtypes, shapes and bytes."""
    import torch

    total = hashlib.sha256()
    for name, value in sorted(state.items()):
        whole = value.detach().cpu().contiguous()
        total.update(f"{name} {whole.dtype} {tuple(whole.shape)}\n".encode())
        total.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
    return total.hexdigest()


def relocated(options: Mapping[str, Any], folder: Path, *folders: Path) -> dict[str, Any]:
    """The options of an encoder whose files may have moved together with what was made from them.

    Weights and models that aren't where ``options`` say are looked for at the same relative path from
    ``folder``, where ``options["output"]`` is now, and by name in it and ``folders``. Paths that aren't found
    stay as they were.
    """
    old_folder, updated = Path(options.get("output") or "").parent, dict(options)
    for name in ("model", "pretrained"):
        prefix, path = "", str(options.get(name) or "")
        if path.startswith("local-dir:"):
            prefix, path = "local-dir:", path.removeprefix("local-dir:")
        if not (prefix or looks_like_a_path(path)) or Path(path).expanduser().exists():
            continue
        places = [
            folder / os.path.relpath(path, old_folder),
            *(place / Path(path).name for place in (folder, *folders)),
        ]
        updated[name] = prefix + str(next((place for place in places if place.exists()), path))
    return updated


def names_a_file(pretrained: str) -> bool:
    """Whether ``--pretrained`` is an existing file rather than a tag.

    A tag never has a suffix or a separator, so a stray file called ``openai`` doesn't hide the tag.
    """
    return looks_like_a_path(pretrained) and Path(pretrained).expanduser().is_file()


def looks_like_a_path(pretrained: str) -> bool:
    """Whether ``--pretrained`` can't be a tag."""
    return bool(Path(pretrained).suffix) or os.sep in pretrained or pretrained.startswith(("~", "."))


def chosen_weights(
    request: EncoderRequest, name: str, tags: Collection[str], example: str
) -> Path | str | None:
    """The checkpoint file or tag that a request names; None for random weights, if they are asked for.

    ``name`` is the model's name in messages, ``example`` an example of weights. Case and hyphens in one of
    the model's ``tags`` don't matter: ``LAION2b-s34b`` is ``laion2b_s34b``. Raises `InputError` for no
    weights, a folder, a missing file, a file that is no checkpoint, and an unknown tag.
    """
    if request.random_init:
        return None
    pretrained = request.weights
    if pretrained is None or not pretrained.strip():
        raise InputError(
            f"no weights given for the model {name}",
            where="--pretrained",
            expected=example,
            fix="name the weights, or ask for random ones with --random-init",
        )
    path = Path(pretrained).expanduser()
    tag = next((tag for tag in (pretrained, pretrained.lower().replace("-", "_")) if tag in tags), None)
    if tag is not None and not names_a_file(pretrained):
        return tag
    if path.is_file():
        checkpoint_kind(path)
        return path
    if path.is_dir():
        files = [file.name for file in sorted(path.iterdir()) if file.suffix in CHECKPOINT_SUFFIXES]
        raise InputError(
            "--pretrained names a folder, not a checkpoint file",
            where=path,
            expected="a file, or a tag",
            fix=f"one of its files: {listing(files)}" if files else None,
        )
    if looks_like_a_path(pretrained):
        folder_exists = path.parent.is_dir()
        close = nearest(path.name, [file.name for file in path.parent.iterdir()] if folder_exists else [])
        raise InputError(
            "no such checkpoint file",
            where=path,
            found=None if folder_exists else f"the folder {path.parent} is not there either",
            fix=f"did you mean {path.parent / close}?" if close else None,
        )
    close = nearest(pretrained, tags)
    raise InputError(
        f"no tag or file named {pretrained!r} for the model {name}",
        where="--pretrained",
        expected=f"a checkpoint file, or one of the tags: {listing(tags, 40)}",
        fix=f"did you mean {close!r}?" if close else None,
    )


def checkpoint_kind(path: Path) -> str:
    """``safetensors``, ``torchscript``, ``torch`` or ``numpy``, by content; `InputError` for other files."""
    with require_file(path).open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    kind = sniff(head)
    if kind == "LFS":
        what = "the checkpoint is a Git LFS pointer, not the weights"
        raise InputError(what, where=path, fix="git lfs pull")
    if kind == "zip":
        members = _members(path)
        for end, kind in (("/constants.pkl", "torchscript"), ("data.pkl", "torch"), (".npy", "numpy")):
            if any(member.filename.endswith(end) for member in members):
                if kind == "numpy":
                    refuse_bomb(path, members)
                else:
                    require_stored(path)
                return kind
    if kind == "pickle":
        return "torch"
    if kind == "safetensors":
        return kind
    raise InputError(
        "not a checkpoint file",
        where=path,
        found=f"content that starts with {head[:16]!r}",
        expected="safetensors, a file of torch.save, or a TorchScript archive",
    )


def _members(path: Path) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        what = "the checkpoint file is damaged or cut short"
        raise InputError(what, where=path, fix="copy or download it again") from None


def require_stored(path: Path) -> None:
    """Refuse an archive of torch with compressed or overlapping tensors, which torch never writes."""
    members = [member for member in _members(path) if re.search(r"(^|/)data(\.pkl$|/)", member.filename)]
    packed = [member.filename for member in members if member.compress_type != zipfile.ZIP_STORED]
    if packed or sum(member.file_size for member in members) > path.stat().st_size:
        found = f"compressed members: {listing(packed, 3)}" if packed else "members that lie in one another"
        what = "a file of torch.save that was packed by another program"
        raise InputError(what, where=path, found=found, fix="save it again with torch.save")


def refuse_bomb(path: Path, members: Iterable[zipfile.ZipInfo]) -> None:
    """Refuse an archive whose unpacked size is out of proportion to its own, since it could fill memory."""
    unpacked = sum(member.file_size for member in members)
    if unpacked > _ALWAYS_ALLOWED_BYTES + _MAX_RATIO * path.stat().st_size:
        raise InputError(
            "an archive that unpacks to far more than its size",
            where=path,
            found=f"{unpacked:,} bytes from {path.stat().st_size:,}",
            expected=f"at most {_MAX_RATIO} times its size",
            fix="save it again without compression",
        )


def require_own_numbers(path: Path) -> None:
    """Raise ValueError if a tensor in a file of ``torch.save`` is larger than its storage.

    Such a tensor repeats its numbers by strides; a copy of it could fill memory.
    """
    import torch

    with path.open("rb") as stream:
        mapped = stream.read(2) == b"PK"
    waiting: list[Any] = [torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            if value.layout == torch.strided and value.nbytes > value.untyped_storage().nbytes():
                raise ValueError(f"a tensor of {tuple(value.shape)}, larger than the numbers that it holds")
        elif id(value) not in seen and isinstance(value, dict | list | tuple):
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value


def tensors(path: Path, model: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by name, on the CPU, without the wrappers of training scripts."""
    import torch
    from timm.models import load_state_dict

    with reading_checkpoint(path, model):
        kind = checkpoint_kind(path)
        if kind == "torchscript":
            return torchscript_tensors(path)
        if kind == "numpy":
            raise ValueError("it is a NumPy archive; only open_clip's own loader reads those")
        if kind == "torch":
            require_own_numbers(path)
        try:
            state = load_state_dict(str(path), weights_only=True)
        except AttributeError:  # timm takes any object for a mapping
            type_name = type(torch.load(path, map_location="cpu", weights_only=True)).__name__
            raise ValueError(f"it holds a {type_name}, not named tensors") from None
        if not state:
            raise ValueError("it holds no named tensors")
        return state


def write_tuned(path: Path, module: torch.nn.Module, facts: Mapping[str, Any]) -> None:
    """Write a network's state as safetensors, with its digest and ``facts`` as JSON in the metadata.

    The metadata has one entry, since safetensors writes several in a different order each time.
    """
    from safetensors.torch import save

    state = {name: value.detach().cpu().contiguous() for name, value in module.state_dict().items()}
    head = {"ncm_format": TUNED, "ncm_format_version": 1, **facts}
    text = json.dumps({**head, DIGEST: _tuned_sha256(head, state)})
    write_bytes(path, save(state, {TUNED: text}))


def tuned_facts(source: str | Path | None) -> dict[str, Any]:
    """The facts of a checkpoint that `write_tuned` wrote; empty for any other source of weights.

    Raises `InputError` for facts that `write_tuned` doesn't write.
    """
    if source is None or not names_a_file(str(source)):
        return {}
    path = Path(source).expanduser()
    if not (text := safetensors_metadata(path).get(TUNED)):
        return {}
    try:
        facts = dict(parse_json(text))
        require_version(facts["ncm_format_version"], 1, path)
        width, side = facts["representation"], facts["image_size"]
        if strange := facts.keys() - _TUNED_FACTS:
            raise ValueError(f"facts named {listing(sorted(strange))}")
        # The file holds a layer of this width, so the width can't exceed the file's size.
        if type(width) is not int or not 1 <= width <= path.stat().st_size:
            raise ValueError(f"a representation of {width!r}")
        if side is not None and type(side) is not int:
            raise ValueError(f"pictures of {side!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"{type(error).__name__} {one_line(error)}") from error
    return facts


def require_whole(
    path: Path, facts: Mapping[str, Any], state: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Raise `InputError` if a checkpoint's contents don't match their digest; versions before 0.6 wrote none.

    ``state`` has the checkpoint's tensors if they have been read; otherwise they are read here.
    """
    from safetensors.torch import load_file

    if DIGEST in facts and facts[DIGEST] != _tuned_sha256(facts, load_file(path) if state is None else state):
        raise damaged(path, f"contents that don't match their {DIGEST}")


def _tuned_sha256(facts: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> str:
    stated = {name: value for name, value in facts.items() if name != DIGEST}
    return digest_of({**stated, "tensors": state_sha256(state)})


def require_keys(missing: Iterable[str], unexpected: Iterable[str], *, path: Path, model: str) -> None:
    """Raise `InputError` if there are tensors that only the model or only the checkpoint has."""
    missing, unexpected = list(missing), list(unexpected)
    if missing or unexpected:
        raise InputError(
            f"the checkpoint doesn't fit the model {model}",
            where=path,
            expected=f"{len(missing)} tensors that it lacks: {listing(missing)}" if missing else None,
            found=f"{len(unexpected)} tensors too many: {listing(unexpected)}" if unexpected else None,
            fix="check --model, or rename the tensors",
        )


def pickled_object(error: pickle.UnpicklingError) -> str:
    """The kind of object that a file would unpickle, without torch's advice to load it anyway."""
    match = re.search(r"GLOBAL (\S+)", str(error))
    return f"an object of {match[1]}" if match else "an unreadable object"


@contextlib.contextmanager
def reading_checkpoint(path: Path, model: str) -> Iterator[None]:
    """Turn what readers of checkpoints raise on foreign files into an `InputError` with the file's name."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # readers of checkpoints raise many kinds of errors, assertions included
        for pickled in (error, error.__cause__):  # timm raises an error of its own from it
            if isinstance(pickled, pickle.UnpicklingError):
                scripted = checkpoint_kind(path) == "torchscript"
                raise InputError(
                    "the checkpoint holds Python objects beyond tensors, which are never loaded",
                    where=path,
                    found=pickled_object(pickled),
                    fix="ncm help troubleshooting has a line that converts it, if you trust it"
                    if scripted
                    else "where it was made, torch.save(model.state_dict(), FILE), or save that as "
                    ".safetensors; then --pretrained FILE",
                ) from error
        raise InputError(
            f"the checkpoint can't be loaded into the model {model}",
            where=path,
            found="no named tensors" if isinstance(error, AttributeError) else plain_words(error),
            fix="check --model; remove a damaged file, so that it is fetched or made again",
        ) from error


def plain_words(error: Exception) -> str:
    """The start of a library's message on one line without colours, or the error's class if it is empty."""
    return one_line(re.sub(r"\x1b\[[0-9;]*m", "", str(error)), 500) or type(error).__name__


@contextlib.contextmanager
def fetching(what: str, option: str, cache: str | Path | None = None) -> Iterator[None]:
    """Turn any failure of a download into `InputError`; libraries raise dozens of classes.

    ``option`` names the option that causes the download, ``cache`` its folder if it isn't the hub's. The hub
    client's log lines and messages are dropped, since their advice is for programmers.
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
        status = getattr(getattr(error, "response", None), "status_code", None) or getattr(
            error, "code", None
        )
        if isinstance(error, OSError) and error.errno in _CACHE_ERRORS:
            why = f"the cache can't be written: {os.strerror(error.errno).lower()}"
            fix = "make it writable, or name another with HF_HOME=FOLDER"
        elif cache is None and constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so the network isn't used"
            fix = "unset it once, with a network connection"
        elif status is not None:
            why = f"the server answered {status}"
            fix = "check the name; a private or gated model needs HF_TOKEN=TOKEN"
        else:
            why = f"the server can't be reached ({type(error).__name__})"
            fix = "run once with a network connection"
        raise InputError(
            f"{what} could not be fetched, and can't be found in the cache",
            where=f"{option}; cache folder {cache or constants.HF_HUB_CACHE}",
            found=why,
            fix=f"{fix}; or --pretrained FILE, or --model local-dir:FOLDER, for weights that are here",
        ) from error
    finally:
        log.setLevel(level)


def hub_file(repository: str, filenames: Sequence[str]) -> Path:
    """The first of ``filenames`` that a Hugging Face repository has, from the cache or downloaded.

    Without a connection the hub client retries for most of a minute, so the connection is tested first.
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
