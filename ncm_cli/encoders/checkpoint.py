"""What a checkpoint file holds, read without running anything in it.

Nothing is unpickled freely: safetensors, ``torch.load(weights_only=True)``, and TorchScript archives (whose
reader builds tensors and TorchScript modules only).
"""

from __future__ import annotations

import hashlib
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncm_cli.errors import InputError, listing

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
