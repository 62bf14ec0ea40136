# SPDX-License-Identifier: Apache-2.0
"""GPUs of a fit node, and of nodes with one thing wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_node import RecordedNode

from llmb.base.tools import Output
from llmb.catalogue.catalogue import Catalogue
from llmb.nodes.doctor.check_records import Check, NotChecked
from llmb.nodes.doctor.checks.gpus import gpu_checks
from llmb.nodes.doctor.checks.nvidia_smi import LinkErrors, parse_link_errors, parse_links, read_gpus
from llmb.nodes.doctor.facts import TargetFacts
from llmb.nodes.doctor.rules import names_of, rules

CATALOGUE = Catalogue().gpus
H100 = TargetFacts(catalogue=CATALOGUE, gpu=CATALOGUE["h100"], gpu_type_by="--gpu-type", gpus=8, gpus_by="--gpus")
ANY = TargetFacts(catalogue=CATALOGUE)
Change = Callable[[RecordedNode], object]


def checked(node: RecordedNode, target: TargetFacts = H100) -> dict[str, Check | NotChecked]:
    findings = list(gpu_checks(read_gpus(node.source, "node1"), target))
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


@pytest.fixture
def node(tmp_path: Path) -> RecordedNode:
    return RecordedNode(tmp_path)


def test_a_fit_node_passes_every_check(node: RecordedNode) -> None:
    found = checked(node)
    assert [*found] == names_of("gpu")
    assert {name: finding for name, finding in found.items() if getattr(finding, "status", "") != "pass"} == {}
    values = {name: finding.value for name, finding in found.items() if isinstance(finding, Check)}
    assert values["gpu_count"] == "8 of 8"
    assert values["gpu_driver"] == "570.124.06"
    assert values["gpu_nvlink"] == "18 links per GPU, 956 GB/s"
    assert values["gpu_power_limit"] == "700 W"
    assert all(finding.advice is None for finding in found.values() if isinstance(finding, Check))


def of(index: int, **values: str) -> Change:
    """Changes fields of a GPU; two underscores stand for a period."""
    return lambda node: node.gpus[index].update({name.replace("__", "."): text for name, text in values.items()})


def of_all(**values: str) -> Change:
    return lambda node: [of(index, **values)(node) for index in range(8)]


def without_link(node: RecordedNode) -> None:
    node.links[3][7:9] = [0.0, 0.0]


# The check, its status, parts of its value and of its advice, and what is wrong with the node.
UNFIT: dict[str, tuple[str, str, str, str, Change]] = {
    "one is missing": ("gpu_count", "fail", "7 of 8 (--gpus); 8 on the PCI bus", "Xid 79",
        lambda node: node.gpus.pop()),
    "one more": ("gpu_count", "warn", "9; 8 exp", "--gp",
        lambda node: node.gpus.append({**node.gpus[0], "index": "8"})),
    "one needs a reset": ("gpu_state", "fail", "GPU requires reset (GPU 3)", "reset the GPU",
        of(3, temperature__gpu="[GPU requires reset]")),
    "another type": ("gpu_type", "fail", "NVIDIA H200, not h100 (--gpu-type)", "--gpu-type",
        of_all(name="NVIDIA H200")),
    "mixed types": ("gpu_type", "fail", "1 x NVIDIA H200", "slowest", of(5, name="NVIDIA H200")),
    "ECC off": ("gpu_ecc_mode", "warn", "disabled on GPU 2", "nvidia-smi -e 1", of(2, ecc__mode__current="Disabled")),
    "ECC errors": ("gpu_ecc_errors", "fail", "uncorrected: 3 on GPU 6", "drain",
        of(6, ecc__errors__uncorrected__volatile__total="3")),
    "remapping failed": ("gpu_row_remapping", "fail", "failed on GPU 1", "replace",
        of(1, remapped_rows__failure="Yes")),
    "remapping pending": ("gpu_row_remapping", "warn", "pending on GPU 1", "reset",
        of(1, remapped_rows__pending="Yes")),
    "remapping pending, as older drivers say it": ("gpu_row_remapping", "warn", "pending on GPU 1", "reset",
        of(1, remapped_rows__pending="1")),
    "lower clocks set": ("gpu_clocks", "warn", "set below the maximum on GPU 0", "-rac",
        of(0, clocks_event_reasons__active="0x0000000000000002")),
    "different clocks": ("gpu_clocks", "warn", "1830 MHz, 1980 MHz", "VBIOS", of(0, clocks__max__sm="1830")),
    "throttled by the hardware": ("gpu_throttling", "fail", "hw_slowdown on GPU 4, hw_thermal_slowdown on GPU 4",
        "cooling", of(4, clocks_event_reasons__active="0x0000000000000048")),
    "throttled by the driver": ("gpu_throttling", "warn", "sw_thermal_slowdown on GPU 4", "cooling",
        of(4, clocks_event_reasons__active="0x0000000000000020")),
    "throttled before": ("gpu_throttled_time", "warn", "at most 900 s (hw_thermal_slowdown, GPU 4) of 240.0 h",
        "cooling", of(4, clocks_event_reasons_counters__hw_thermal_slowdown="900000000")),
    "warm": ("gpu_temperature", "warn", "81 °C (GPU 4)", "cooling", of(4, temperature__gpu="81")),
    "hot": ("gpu_temperature", "fail", "91 °C (GPU 4)", "cooling", of(4, temperature__gpu="91")),
    "no persistence": ("gpu_persistence", "warn", "disabled on GPUs 0, 1", "-pm 1",
        of_all(persistence_mode="Disabled")),
    "MIG": ("gpu_mig", "fail", "enabled on GPU 7", "-mig 0", of(7, mig__mode__current="Enabled")),
    "power limited": ("gpu_power_limit", "warn", "500 W of 700 W on GPU 7", "-pl", of(7, power__limit="500.00")),
    "power limited for all, and as default": ("gpu_power_limit", "warn", "650 W of 700 W on GPU 0", "-pl",
        of_all(power__limit="650.00", power__default_limit="650.00")),
    "in use": ("gpu_processes", "warn", "4711 python", "end them",
        lambda node: node.said.update({"nvidia-smi --query-compute-apps": "4711, python\n4711, python\n"})),
    "links down": ("gpu_nvlink", "fail", "inactive: 2 of 18 on GPU 3", "nvidia-fabricmanager", without_link),
    "slow link": ("gpu_nvlink", "fail", "from 928 to 956 GB/s", "nvidia-fabricmanager",
        lambda node: node.links[2].__setitem__(0, 12.5)),
    "no links": ("gpu_nvlink", "fail", "no links; h100 has 900 GB/s", "nvidia-fabric", lambda node: node.links.clear()),
    "links recovered": ("gpu_nvlink_errors", "fail", "2 Recovery Errors on GPU 2", "drain",
        lambda node: node.link_errors[2].update(Recovery=2, Replay=5)),
    "links retried": ("gpu_nvlink_errors", "warn", "5 Replay Errors on GPU 2", "grow",
        lambda node: node.link_errors[2].update(Replay=5)),
    "fabric not ready": ("gpu_fabric", "fail", "In Progress, status unknown on GPU 0", "nvidia-fabricmanager",
        of_all(fabric__state="In Progress", fabric__status="N/A")),
    "fabric failed": ("gpu_fabric", "fail", "Insufficient", "imex", of(0, fabric__status="Insufficient Resources")),
    "fewer lanes": ("gpu_pcie", "warn", "x8 of x16 on GPU 3", "reseat", of(3, pcie__link__width__current="8")),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_an_unfit_gpu_is_named_with_advice(node: RecordedNode, case: str) -> None:
    name, status, text, advice, change = UNFIT[case]
    change(node)
    found = checked(node)
    finding = found.pop(name)
    assert isinstance(finding, Check)
    assert finding.status == status
    assert text in str(finding.value)
    assert advice in str(finding.advice)
    if name != "gpu_count":
        assert {one.name for one in found.values() if getattr(one, "status", "pass") == "fail"} == set()


def test_every_check_that_can_fail_or_warn_has_a_case() -> None:
    target = {(rule.name, "fail") for rule in rules().values() if rule.area == "gpu" and rule.fails_if}
    target |= {(rule.name, "warn") for rule in rules().values() if rule.area == "gpu" and rule.warns_if}
    tested = {(name, status) for name, status, *_ in UNFIT.values()}
    assert target - tested == {("gpu_type", "warn")}, "which has a test of its own"


def test_gpus_that_the_catalogue_does_not_know(node: RecordedNode) -> None:
    of_all(name="NVIDIA L40S")(node)
    finding = checked(node, ANY)["gpu_type"]
    assert isinstance(finding, Check)
    assert (finding.status, finding.value) == ("warn", "NVIDIA L40S")


def test_fewer_than_usual_only_warns_where_no_number_is_expected(node: RecordedNode) -> None:
    del node.gpus[1:]
    found = checked(node, ANY)
    count = found["gpu_count"]
    assert isinstance(count, Check)
    assert (count.status, count.value) == ("warn", "1; nodes of h100 have 8")
    assert isinstance(found["gpu_nvlink"], NotChecked), "one GPU has no other"


def test_without_gpus_nothing_is_checked(tmp_path: Path) -> None:
    node = RecordedNode(tmp_path)
    node.said = {"nvidia-smi": Output("", "nvidia-smi was not found")}
    for device in (tmp_path / "sys/bus/pci/devices").iterdir():
        (device / "vendor").write_text("0x8086\n")
    found = checked(node, ANY)
    assert [*found] == names_of("gpu")
    assert {getattr(one, "reason", None) for one in found.values()} == {"no GPU: nvidia-smi was not found"}


@pytest.mark.parametrize(
    ("said", "on_bus", "value", "advice"),
    [
        (Output("", "nvidia-smi was not found"), 0, "0 of 8 (--gpus): nvidia-smi was not found",
         "login node"),
        (Output("", "nvidia-smi: Make sure that the latest NVIDIA driver is installed and running."), 8,
         "0 of 8 (--gpus): nvidia-smi: Make sure that the latest NVIDIA driver is installed and running.; 8 on the",
         "modprobe nvidia"),
        (Output("", "nvidia-smi did not answer within 30 s", timed_out=True), 8, "did not answer", "reboot"),
        (Output("No devices were found\n"), 0, "nvidia-smi reports no GPU", "login node"),
    ],
)  # fmt: skip
def test_missing_gpus_that_should_be_here_fail(
    tmp_path: Path, said: Output, on_bus: int, value: str, advice: str
) -> None:
    node = RecordedNode(tmp_path)
    node.said = {"nvidia-smi": said}
    if not on_bus:
        for device in (tmp_path / "sys/bus/pci/devices").iterdir():
            (device / "class").write_text("0x020000\n")
    found = checked(node)
    count = found.pop("gpu_count")
    assert isinstance(count, Check)
    assert count.status == "fail"
    assert value in str(count.value)
    assert advice in str(count.advice)
    assert {type(one) for one in found.values()} == {NotChecked}


def test_a_hung_nvidia_smi_is_asked_once(node: RecordedNode) -> None:
    """Each query would wait for its time limit."""
    asked = []
    source = node.source

    def ask(command: list[str], limit_s: float) -> Output:
        asked.append(command)
        return Output("", "nvidia-smi did not answer within 30 s", timed_out=True)

    object.__setattr__(source, "ask", ask)
    assert read_gpus(source, "node1").hung
    assert len(asked) == 1


def test_nothing_more_is_asked_of_an_nvidia_smi_that_hung(node: RecordedNode) -> None:
    problem = "nvidia-smi did not answer within 30 s"
    node.said["nvidia-smi nvlink --status"] = Output("", problem, timed_out=True)
    found = checked(node)
    state = found["gpu_state"]
    assert isinstance(state, Check)
    assert (state.status, state.value) == ("fail", problem)
    assert found["gpu_nvlink_errors"] == NotChecked(name="gpu_nvlink_errors", reason=problem)
    assert getattr(found["gpu_ecc_errors"], "status", None) == "pass", "which was asked for before"


def test_an_older_driver_lacks_fields(node: RecordedNode) -> None:
    for gpu in node.gpus:
        for field in ("fabric.state", "fabric.status", *(field for field in [*gpu] if "event_reasons" in field)):
            del gpu[field]
        gpu["clocks_throttle_reasons.active"] = "0x0000000000000000"
    found = checked(node)
    reason = "this driver's nvidia-smi does not report it"
    assert found["gpu_fabric"] == NotChecked(name="gpu_fabric", reason=reason)
    assert found["gpu_throttled_time"] == NotChecked(name="gpu_throttled_time", reason="nvidia-smi does not report it")
    assert found["gpu_throttling"].name == "gpu_throttling"
    assert {one.name for one in found.values() if isinstance(one, NotChecked)} == {"gpu_fabric", "gpu_throttled_time"}


def test_what_a_gpu_does_not_support_is_not_checked(node: RecordedNode) -> None:
    for gpu in node.gpus:
        gpu.update({field: "[N/A]" for field in gpu if field not in ("index", "uuid", "name")})
    node.links = node.link_errors = []
    passed = {one.name for one in checked(node, ANY).values() if isinstance(one, Check) and one.status == "pass"}
    assert passed == {"gpu_count", "gpu_state", "gpu_type", "gpu_processes"}


def test_links_and_their_errors_as_several_generations_print_them() -> None:
    text = (
        "GPU 0: NVIDIA H100 PCIe (UUID: GPU-6968dfc2-d444-d92c-c36b-6abe53445cb9)\n"
        "         Link 0: 26.562 GB/s\n         Link 1: <inactive>\n"
        "GPU 1: NVIDIA H100 PCIe (UUID: GPU-0)\n\t Link 0: 0 GB/s\n"
    )
    assert [tuple(one) for one in parse_links(text)] == [(0, (26.562, None)), (1, (None,))]
    text = (
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-0)\n"
        "\t Link 0: Replay Errors: 1\n\t Link 0: Recovery Errors: 0\n\t Link 0: CRC Flit Errors: 2\n\n"
        "\t Link 1: Replay Errors: 3\n"
        "GPU 1: NVIDIA B200 (UUID: GPU-1)\n"
        "\t Link 0: Tx packets: 17\n\t Link 0: Malformed packet Errors: 4\n\t Link 0: Effective BER: 15e-255\n"
    )
    assert parse_link_errors(text) == (
        LinkErrors(0, {"Replay Errors": 4, "Recovery Errors": 0, "CRC Flit Errors": 2}),
        LinkErrors(1, {"Malformed packet Errors": 4}),
    )


@pytest.fixture(scope="module")
def odd_node(tmp_path_factory: pytest.TempPathFactory) -> RecordedNode:
    return RecordedNode(tmp_path_factory.mktemp("odd"))


@settings(max_examples=30)
@given(text=st.text())
def test_whatever_nvidia_smi_says_every_check_is_reported(odd_node: RecordedNode, text: str) -> None:
    odd_node.said = {"nvidia-smi": text}
    assert [*checked(odd_node, ANY)] == names_of("gpu")
