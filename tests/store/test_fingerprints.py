"""The fingerprint of an encoder, and what is said when two encoders differ."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ncm_cli.errors import MismatchError
from ncm_cli.progress import Reporter
from ncm_cli.stages.common import labels_as, logits, predict_codes, require_same_encoder, scale_like
from ncm_cli.store.features import Column
from ncm_cli.store.fingerprint import ABSENT, differing_fields, fingerprint

CLIP = {
    "kind": "open_clip",
    "activation": "quick_gelu",
    "preprocess": {"resize": 224, "mean": [0.5, 0.5, 0.5]},
}


class Warnings(Reporter):
    def __init__(self) -> None:
        self.said: list[str] = []

    def warn(self, message: str) -> None:
        self.said.append(message)


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


def test_c47_encoders_that_differ_are_refused() -> None:
    require_same_encoder("a.h5", CLIP, "b.h5", dict(CLIP))
    require_same_encoder("a.h5", CLIP, "b.h5", CLIP | {"view": {"seed": 1}}, ignore_view=True)
    with pytest.raises(MismatchError, match="different encoders") as error:
        require_same_encoder("a.h5", CLIP | {"normalize": True}, "b.h5", CLIP | {"normalize": False})
    assert error.value.where == "a.h5 and b.h5"
    assert error.value.found == "normalize: True against False"


def test_a_probe_scales_as_it_was_trained(samples: SimpleNamespace) -> None:
    X = np.array([[3.0, 4, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    probe = samples.make_probe()
    np.testing.assert_allclose(scale_like(probe, X), [[6, 8, 0, 0, 0, 0], [0] * 6])
    np.testing.assert_allclose(logits(probe, X)[1], probe.bias)
    with pytest.raises(MismatchError, match="another width"):
        scale_like(probe, X[:, :5])


def test_codes_and_labels_follow_the_probes_classes(samples: SimpleNamespace) -> None:
    two, three = samples.make_probe(("no", "yes")), samples.make_probe(("a", "b", "c"))
    assert predict_codes(two, np.array([[-1.0], [0.0], [1e-9]])).tolist() == [0, 0, 1]
    assert predict_codes(three, np.array([[0.0, 2, 1], [1, 1, 0]])).tolist() == [1, 0]
    column = Column("label", np.array([0, 1, 2, -1], np.int32), ("yes", "maybe", "no"))
    said = Warnings()
    assert labels_as(two, column, reporter=said).tolist() == [1, -1, 0, -1]
    assert said.said == ["column 'label' has labels that the probe doesn't know, left out: maybe (1 rows)"]
    with pytest.raises(MismatchError, match="none of the probe's classes"):
        labels_as(three, column)
