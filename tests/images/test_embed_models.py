"""``ncm embed`` with a network: resumed runs are the same bits, unchanged ones never see torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ncm_cli.errors import InputError
from ncm_cli.store.features import FeatureStore
from tests.world import run_light

from .conftest import contents

pytestmark = pytest.mark.slow

MODEL = {"model": "timm:test_vit", "random_init": True, "device": "cpu"}


def test_no_weights_and_no_cuda_are_errors_before_any_image(make_pictures: Any) -> None:
    torch = pytest.importorskip("torch")
    pictures = make_pictures(2)
    with pytest.raises(InputError, match="weights"):
        pictures.embed(model="timm:test_vit", device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="CUDA"):
            pictures.embed(**MODEL | {"device": "cuda"})
    assert {path.suffix for path in pictures.folder.iterdir()} == {".png", ".csv"}


def test_a_resumed_run_gives_the_bits_of_a_clean_one(
    make_pictures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ncm_cli.images import network

    pictures = make_pictures(30)
    (pictures.folder / "9.png").write_bytes(b"broken")
    pictures.embed(output=pictures.folder / "clean.h5", batch_size="7", **MODEL)
    plain = network.TorchEncoder.start
    for last in (1, 2, 1):
        seen = []

        def start(self: Any, items: Any, seen: list[int] = seen, last: int = last) -> Any:
            if len(seen) == last:
                raise KeyboardInterrupt
            seen.append(len(items))
            return plain(self, items)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(network.TorchEncoder, "start", start)
            pictures.embed(batch_size="7", **MODEL)
    pictures.embed(batch_size="7", **MODEL)
    assert contents(pictures.output) == contents(pictures.folder / "clean.h5")


def test_batches_and_workers_do_not_move_a_feature(make_pictures: Any) -> None:
    pictures = make_pictures(12)
    stores = []
    for batch_size, workers in (("1", "0"), ("5", "4"), ("12", "1")):
        output = pictures.folder / f"{batch_size}.h5"
        pictures.embed(output=output, batch_size=batch_size, workers=workers, **MODEL)
        with FeatureStore(output) as store:
            stores.append(store.read())
    assert np.ptp(stores[0], axis=0).max() > 1e-3  # the positive control: the pictures differ
    for other in stores[1:]:
        np.testing.assert_allclose(other, stores[0], atol=1e-5)


def test_an_unchanged_run_never_imports_torch(make_pictures: Any) -> None:
    pictures = make_pictures(3)
    pictures.embed(**MODEL)
    arguments = ["embed", str(pictures.manifest), "-o", str(pictures.output)]
    arguments += ["--model", "timm:test_vit", "--random-init", "--device", "cpu"]
    said = run_light(f"from ncm_cli.main import run\nassert run({arguments!r}) == 0")
    assert "already up to date" in said
