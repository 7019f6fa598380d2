"""The bytes that a refit sends."""

import torch

from nemo_rl.weight_manifests import LocalWeights, WeightEntry, WeightManifest, WeightStream, bytes_of


def test_bytes_of_weights_by_how_they_travel() -> None:
    assert bytes_of(LocalWeights((("a", torch.zeros(3, 5)), ("b", torch.zeros(2, dtype=torch.bfloat16))))) == 64
    entries = (WeightEntry("a", "bfloat16", (3, 5), 0), WeightEntry("b", "float32", (2,), 64))
    assert bytes_of(WeightManifest("file", entries)) == 38
    assert bytes_of(WeightManifest("file", (WeightEntry("a", "float8_e4m3fn", (3,), 0),))) is None
    assert bytes_of(WeightStream("host", 1, 1, ("policy",), "engine 0", "gloo", 1.0)) is None
