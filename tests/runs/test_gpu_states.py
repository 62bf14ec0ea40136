# SPDX-License-Identifier: Apache-2.0
"""What nvidia-smi prints, with all that it prints for what it does not know."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.runs.environment import QUERIES, GpuState, command, of_run, parse_states

NEWEST, EVENTS, OLDEST = QUERIES
UUIDS = ("GPU-6f4e1c1e-5d6b-9a3b-1f0a-000000000001", "GPU-6f4e1c1e-5d6b-9a3b-1f0a-000000000002")
H100 = (
    "{index}, 580.65.06, {uuid}, NVIDIA H100 80GB HBM3, Enabled, Disabled, Enabled, 700.00, 700.00, 412.53, 61, 1755, "
    "2619, 1980, 2619, 1980, 2619, 0x0000000000000024, 91403239, 0, 1200, 0, 0"
)


def test_a_node_of_two_gpus() -> None:
    text = "".join(H100.format(index=index, uuid=uuid) + "\n" for index, uuid in enumerate(UUIDS))
    driver, gpus = parse_states(text, NEWEST, "node1")
    assert driver == "580.65.06"
    assert [gpu.uuid for gpu in gpus] == list(UUIDS)
    assert gpus[0] == GpuState(
        node="node1",
        index=0,
        uuid=UUIDS[0],
        name="NVIDIA H100 80GB HBM3",
        persistence_mode="Enabled",
        mig_mode="Disabled",
        ecc_mode="Enabled",
        power_limit_w=700,
        default_power_limit_w=700,
        power_w=412.53,
        temperature_c=61,
        sm_clock_mhz=1755,
        memory_clock_mhz=2619,
        max_sm_clock_mhz=1980,
        max_memory_clock_mhz=2619,
        application_sm_clock_mhz=1980,
        application_memory_clock_mhz=2619,
        throttle_reasons=("sw_power_cap", "sw_thermal_slowdown"),
        throttled_us={
            "sw_power_cap": 91403239,
            "sync_boost": 0,
            "sw_thermal_slowdown": 1200,
            "hw_thermal_slowdown": 0,
            "hw_power_brake_slowdown": 0,
        },
    )


@pytest.mark.parametrize("word", ["[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[GPU requires reset]", ""])
def test_what_is_not_supported_is_none(word: str) -> None:
    """As on a consumer's GPU, or on one in MIG mode."""
    text = f"0, 535.183.01, GPU-x, NVIDIA A30, {', '.join([word] * (len(NEWEST) - 4))}\n"
    (gpu,) = parse_states(text, NEWEST, "n").gpus
    assert gpu == GpuState(node="n", index=0, uuid="GPU-x", name="NVIDIA A30")


def test_an_older_driver_has_no_counters_and_says_throttled() -> None:
    text = "0, 525.60.13, GPU-x, Tesla V100, Disabled, [N/A], Enabled, 300.00, 300.00, 25 W, 31, 135, 877, 1530, 877, "
    (gpu,) = parse_states(f"{text}1290, 877, 0x0000000000000001\n", OLDEST, "n").gpus
    assert gpu.throttle_reasons == ("gpu_idle",)
    assert gpu.throttled_us is None
    assert gpu.power_w == 25  # with its unit, although none was asked for
    assert gpu.application_sm_clock_mhz == 1290
    assert parse_states(f"{text}1290, 877, 0x0\n", EVENTS, "n").gpus[0].throttle_reasons == ()


@pytest.mark.parametrize("text", ["", "No devices were found\n", "Unable to determine the device handle\n", "0, 1\n"])
def test_other_output_describes_no_gpu(text: str) -> None:
    assert parse_states(text, NEWEST, "n") == (None, ())


VALUES = st.sampled_from(["", "[N/A]", "nan", "1e999", "0x", "²", "-1", "0x4", " 7 W"]) | st.text("x%\0é", max_size=3)


@given(st.lists(VALUES, min_size=23, max_size=23))
def test_any_output_describes_one_gpu_or_none(values: list[str]) -> None:
    assert len(parse_states(",".join(values), NEWEST, "n").gpus) <= 1


def test_only_the_gpus_of_the_run_are_kept() -> None:
    gpus = [GpuState(node="n", index=index, uuid=uuid) for index, uuid in enumerate(UUIDS)]
    assert of_run(gpus, [UUIDS[1].removeprefix("GPU-")]) == (gpus[1],)  # torch leaves out the prefix
    assert of_run(gpus, UUIDS) == tuple(gpus)
    assert of_run(gpus, ["MIG-1"]) == tuple(gpus)
    assert of_run(gpus, [None]) == tuple(gpus)
    assert of_run([], [None]) == ()


def test_the_query_prints_values_alone() -> None:
    assert command(("index", "uuid")) == ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader,nounits"]
    assert all(len(set(fields)) == len(fields) for fields in QUERIES)
