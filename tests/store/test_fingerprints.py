"""The fingerprint of an encoder, and what is said when two encoders differ."""

from __future__ import annotations

import numpy as np
import pytest

from ncm_cli.errors import MismatchError
from ncm_cli.probes.evaluate import logits, scale_like
from ncm_cli.store.digests import ABSENT, differing_fields, fingerprint, require_same_encoder

from .conftest import make_probe

CLIP = {
    "kind": "open_clip",
    "activation": "quick_gelu",
    "preprocess": {"resize": 224, "mean": [0.5, 0.5, 0.5]},
}


def test_a_fingerprint_depends_on_values_alone() -> None:
    again = {
        "preprocess": {"mean": (0.5, 0.5, 0.5), "resize": 224},
        "activation": "quick_gelu",
        "kind": "open_clip",
    }
    assert fingerprint(CLIP) == fingerprint(again)
    assert len(fingerprint(CLIP)) == 64
    for change in ({"activation": "gelu"}, {"preprocess": {"resize": 256}}, {"precision": "bf16"}):
        assert fingerprint(CLIP | change) != fingerprint(CLIP)


def test_differing_fields_are_named() -> None:
    other = {
        **CLIP,
        "activation": "gelu",
        "preprocess": {"resize": 256, "mean": [0.5, 0.5, 0.5]},
        "view": {"seed": 1},
    }
    assert differing_fields(CLIP, CLIP) == []
    assert differing_fields(CLIP, other) == [
        ("activation", "quick_gelu", "gelu"),
        ("preprocess.resize", 224, 256),
        ("view.seed", ABSENT, 1),
    ]
    assert [name for name, _, _ in differing_fields(CLIP, other, ignore_view=True)] == [
        "activation",
        "preprocess.resize",
    ]


def test_encoders_that_differ_are_refused() -> None:
    """openai/CLIP#85."""
    require_same_encoder("a.h5", CLIP, "b.h5", dict(CLIP))
    require_same_encoder("a.h5", CLIP, "b.h5", CLIP | {"view": {"seed": 1}}, ignore_view=True)
    with pytest.raises(MismatchError, match="different encoders") as error:
        require_same_encoder("a.h5", CLIP | {"normalize": True}, "b.h5", CLIP | {"normalize": False})
    assert error.value.where == "a.h5 and b.h5"
    assert error.value.found == "normalize: true in the first, false in the second"


def test_a_probe_scales_as_it_was_trained() -> None:
    X = np.array([[3.0, 4, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    probe = make_probe()
    np.testing.assert_allclose(scale_like(probe, X), [[6, 8, 0, 0, 0, 0], [0] * 6])
    np.testing.assert_allclose(logits(probe, X)[1], probe.bias)
    with pytest.raises(MismatchError, match="another width"):
        scale_like(probe, X[:, :5])
