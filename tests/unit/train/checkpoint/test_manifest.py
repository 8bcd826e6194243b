"""Plain values survive JSON exactly."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dearmpi.train.checkpoint import manifest

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$float", "$tuple", "a"]), inner, max_size=2)
    ),
    max_leaves=8,
)


@given(value=PLAIN)
def test_plain_values_survive_json_exactly(value: Any) -> None:
    text = json.dumps(manifest.encode(value, where="value"), allow_nan=False)
    # repr tells apart 1 and 1.0, tuples and lists, 0.0 and -0.0, and shows every digit.
    assert repr(manifest.decode(json.loads(text), tensors={})) == repr(value)


def test_float_bits_survive_json() -> None:
    rng = np.random.default_rng(0)
    for bits in rng.integers(0, 2**64, size=2000, dtype=np.uint64):
        value = struct.unpack("<d", struct.pack("<Q", int(bits)))[0]
        if not math.isnan(value):
            stored = json.loads(json.dumps(manifest.encode(value, where="x")))
            assert struct.pack("<d", manifest.decode(stored, tensors={})) == struct.pack(
                "<d", value
            )
