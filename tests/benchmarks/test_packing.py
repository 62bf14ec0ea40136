# SPDX-License-Identifier: Apache-2.0
"""The benchmark of packing compares packers on the same samples; how long they take is not for a test."""

from benchmarks.packing import measure


def test_packers_are_compared_on_the_same_samples() -> None:
    cases = list(measure(3000))
    assert {(case["packer"], case["seq_len"]) for case in cases} >= {
        (name, seq_len) for name in ("llmb", "first-fit scan (NeMo)") for seq_len in (2048, 4096)
    }
    ours, scan = cases[0], cases[1]
    assert ours["fill"] >= 0.98
    assert abs(ours["packs"] - scan["packs"]) <= 1
