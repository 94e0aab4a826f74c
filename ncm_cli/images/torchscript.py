"""The tensors of a TorchScript archive, such as OpenAI's own CLIP files, without torch's reader of those.

An archive holds code, which that reader runs: a module's ``__setstate__`` may write any file. Here only
``data.pkl`` is read, which says how the tensors are nested: by a subset of pickle in which a module is a
dictionary, nothing is imported and no function is called but the one that makes a tensor.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

_STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
"""The dtype of each of torch's names for a storage."""

_OPCODES = b"\x80.(c\x81RQqrhjN\x88\x89JKM\x8aGXt\x85\x86\x87)]ae}su"
"""The pickle opcodes that TorchScript's writer uses, besides BUILD: none lets a few bytes fill memory."""

_MAX_MODULES = 100_000


class _Module(dict[str, Any]):
    """A module or another object of the archive: its attributes by name."""


class _Reader(pickle._Unpickler):
    """Reads ``data.pkl``; `pickle.UnpicklingError` for all but tensors, modules and plain values.

    It is based on Python's own unpickler, since a few bytes can make the one in C fill memory.
    """

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        self.stack: list[Any] = []
        super().__init__(io.BytesIO(archive.read(f"{root}/data.pkl")))
        self._archive, self._folder = archive, f"{root}/data/"
        self._storages: dict[str, torch.Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        """A placeholder for a name; torch's reader would import or compile it."""
        if module == "__torch__" or module.startswith("__torch__."):
            return _Module
        known: dict[tuple[str, str], Any] = {
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("collections", "OrderedDict"): dict,
            ("torch.jit._pickle", "restore_type_tag"): lambda value, _: value,
        }
        if module == "torch.jit._pickle" and name.startswith("build_") and name.endswith("list"):
            return lambda values: values
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return known[module, name]

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """A storage as a tensor of one dimension, on the CPU."""
        import torch

        _, kind, key, _, length = pid
        if key not in self._storages:
            dtype, member = getattr(torch, kind), self._archive.getinfo(self._folder + key)
            if member.file_size != length * dtype.itemsize:
                raise ValueError(f"{member.filename} of {member.file_size:,} bytes for {length:,} numbers")
            data = bytearray(self._archive.read(member))
            self._storages[key] = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return self._storages[key]

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
        if math.prod(size) > storage.numel():
            raise ValueError(f"a tensor of {size} in a storage of {storage.numel():,} numbers")
        tensor: torch.Tensor = storage.as_strided(size, stride, offset)
        return tensor

    def load_build(self) -> None:
        """Give a module its attributes; nothing else has any."""
        state = self.stack.pop()
        if type(self.stack[-1]) is not _Module or type(state) is not dict:
            raise pickle.UnpicklingError("an object that needs code to be restored")
        self.stack[-1].update(state)

    def _refused(self, *_: Any) -> None:
        raise pickle.UnpicklingError("an object that needs code to be restored")

    dispatch: ClassVar[dict[int, Any]] = {
        **dict.fromkeys(pickle._Unpickler.dispatch, _refused),
        **{code: pickle._Unpickler.dispatch[code] for code in _OPCODES},
        pickle.BUILD[0]: load_build,
    }


def torchscript_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of an archive by the names of its ``state_dict``; none of its code is run.

    Raises `pickle.UnpicklingError` if code would be needed; ValueError, KeyError or others for a damaged
    archive.
    """
    import torch

    with zipfile.ZipFile(path) as archive:
        root = next(name for name in archive.namelist() if name.endswith("/data.pkl")).partition("/")[0]
        top = _Reader(archive, root).load()
    tensors: dict[str, torch.Tensor] = {}
    waiting, seen = [("", top)], 0
    while waiting:
        prefix, module = waiting.pop()
        if (seen := seen + 1) > _MAX_MODULES or type(module) is not _Module:
            raise ValueError("it holds no module" if seen == 1 else f"more than {_MAX_MODULES:,} modules")
        for name, value in module.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{prefix}{name}"] = value
            elif type(value) is _Module:
                waiting.append((f"{prefix}{name}.", value))
    return tensors
