"""The pages and replies that a world shows, held against its truth."""

from __future__ import annotations

import re

import pytest

from gpulens.receivers.pod_resources import podresources_pb2 as pb
from gpulens.simulator.churn import ChurnMode, churn_world
from gpulens.simulator.layout import Device
from gpulens.simulator.models import MIB
from gpulens.simulator.number_text import shortest
from gpulens.simulator.world import World
from tests.simulator.pages import one, pick, read_page

MIG = """
gpus:
  - {model: A100, mig: [3g.20gb, 2g.10gb, 1g.5gb]}
pods:
  - {name: a, devices: ['0/gi1'], phases: [{profile: training}]}
"""
SHARED = """
dcgm: {virtual_gpus: VIRTUAL, per_process: PROCESS}
gpus:
  - {model: L4, sharing: time_slicing, replicas: 4}
  - {model: L4, sharing: time_slicing, replicas: 4}
pods:
  - {name: a, namespace: team, devices: ['0::0'], phases: [{profile: training, memory_mib: 5000}]}
  - {name: b, namespace: team, devices: ['0::3'], phases: [{profile: decode, memory_mib: 3000}]}
"""
SIMPLE = """
OPTIONS
gpus:
  - {model: T4, minor: 1}
  - {model: H100, minor: 0}
pods:
  - {name: nb, namespace: research, start: -1h, devices: ['0'], phases: [{profile: parked}]}
  - {name: spin, namespace: vision, start: -1h, end: 100s, devices: ['1'], phases: [{profile: spin}]}
  - {name: next, namespace: vision, start: 100s, devices: ['1'], phases: [{profile: training}]}
"""


def simple(options: str = "") -> World:
    """Two GPUs: a parked notebook, and a spin loop that hands over at 100 s."""
    return World.load(SIMPLE.replace("OPTIONS", options))


def shared(*, virtual: bool, process: bool = False) -> World:
    """Two pods of one namespace on one of two shared GPUs."""
    return World.load(SHARED.replace("VIRTUAL", str(virtual)).replace("PROCESS", str(process)))


@pytest.mark.parametrize("naming", ["old", "'4.9'", "1.x"])
@pytest.mark.parametrize("world", ["demo", "gke"])
def test_every_line_of_every_page_reads(world: str, naming: str) -> None:
    """Pages of all namings read line by line, hold no series twice, and come out the same again."""
    spec = World.load(world).spec
    options = spec.dcgm.model_copy(update={"naming": naming.strip("'")})
    node = World(spec.model_copy(update={"dcgm": options}))
    for t in (node.start_s, node.start_s + 65, node.start_s + 200):
        for page in (node.dcgm_page(t), node.gke_page(t)):
            samples = read_page(page)
            identities = [(s.name, tuple(sorted(s.labels.items()))) for s in samples]
            assert len(set(identities)) == len(identities)
            typed = set(re.findall(r"# TYPE (\S+)", page))
            assert typed == {s.name for s in samples}
        assert World(node.spec).dcgm_page(t) == node.dcgm_page(t)
        assert World(node.spec).pod_resources(t) == node.pod_resources(t)


def test_values_are_of_the_last_refresh_and_labels_of_now() -> None:
    """Ten seconds after a handover the new pod's name stands over the old pod's load."""
    world = simple()
    t = world.start_s
    sample = one(world.dcgm_page(t + 110), "DCGM_FI_PROF_SM_ACTIVE", gpu="1")
    assert sample.labels["pod"] == "next"
    assert sample.value == pytest.approx(0.15, rel=0.02)
    assert one(world.dcgm_page(t + 151), "DCGM_FI_PROF_SM_ACTIVE", pod="next").value == pytest.approx(0.7, rel=0.02)
    assert world.dcgm_page(t + 91).replace("spin", "x") == world.dcgm_page(t + 99).replace("spin", "x")


def test_the_minor_is_not_the_index() -> None:
    """`gpu` counts positions, `device` carries the minor."""
    sample = one(simple().dcgm_page(simple().start_s), "DCGM_FI_DEV_GPU_TEMP", gpu="0")
    assert sample.labels["device"] == "nvidia1"


def test_residency_is_not_work() -> None:
    """The spin loop reads 100 % on GPU_UTIL and 15 % on SM activity, the parked T4 0 % with 448 MiB."""
    world = simple()
    page = world.dcgm_page(world.start_s + 60)
    assert one(page, "DCGM_FI_DEV_GPU_UTIL", pod="spin").value == 100
    assert one(page, "DCGM_FI_PROF_SM_ACTIVE", pod="spin").value == pytest.approx(0.15, rel=0.02)
    assert one(page, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", pod="spin").value == 0
    assert one(page, "DCGM_FI_DEV_FB_USED", pod="nb").value == 448
    assert one(page, "DCGM_FI_DEV_GPU_UTIL", pod="nb").value == 0


def test_energy_counts_in_mj_or_j() -> None:
    """The old page has whole millijoules, the new one joules, and both are the truth at the refresh."""
    old, new = simple(), simple('dcgm: {naming: "4.9"}')
    t = old.start_s + 60
    true = old.energy_j(old.devices()[1].uuid, t)
    sample = one(old.dcgm_page(t + 5), "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", gpu="1")
    assert sample.text == str(int(true * 1000))
    assert one(new.dcgm_page(t + 5), "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", gpu="1").value == pytest.approx(true)


def test_new_names_carry_base_units() -> None:
    """4.9 has ratios, bytes and hertz, the lower-case hostname and the new driver label."""
    world = simple('dcgm: {naming: "4.9"}')
    page = world.dcgm_page(world.start_s + 60)
    assert one(page, "DCGM_FI_DEV_GPU_UTIL_RATIO", pod="spin").value == 1
    assert one(page, "DCGM_FI_DEV_SM_CLOCK_HERTZ", pod="spin").value == 1.98e9
    used = one(page, "DCGM_FI_DEV_FB_USED_BYTES", pod="nb")
    assert used.value == 448 * MIB
    assert {"hostname", "DCGM_FI_SYSTEM_DRIVER_VERSION"} <= used.labels.keys()
    assert "DCGM_FI_DEV_GPU_UTIL{" not in page


def test_old_exporters_print_blanks_and_empty_owners() -> None:
    """1.x prints a T4's missing memory temperature as a huge number and free GPUs with empty owner labels."""
    world = World.load("dcgm: {naming: 1.x}\ngpus:\n  - {model: T4}\n")
    page = world.dcgm_page(world.start_s)
    sample = one(page, "dcgm_memory_temp")
    assert sample.text == "9223372036854775794"
    assert sample.labels["pod"] == ""
    assert 'gpu="0", UUID=' in page


def test_mig_rows_repeat_what_only_the_board_has() -> None:
    """Power, energy and heat are the same on all rows, GPU_UTIL is on none, memory is the instance's."""
    world = World.load(MIG)
    page = world.dcgm_page(world.start_s + 60)
    for name in ("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_DEV_GPU_TEMP"):
        rows = pick(page, name)
        assert len(rows) == 3
        assert len({r.value for r in rows}) == 1
    for name in ("GPU_UTIL", "MEM_COPY_UTIL", "ENC_UTIL", "DEC_UTIL"):
        assert not pick(page, f"DCGM_FI_DEV_{name}")
    used = {r.labels["GPU_I_ID"]: r.value for r in pick(page, "DCGM_FI_DEV_FB_USED")}
    assert used["1"] > 0
    assert used["3"] == used["7"] == 0
    owned = {r.labels["GPU_I_ID"]: r.labels.get("pod") for r in pick(page, "DCGM_FI_PROF_GR_ENGINE_ACTIVE")}
    assert owned == {"1": "a", "3": None, "7": None}


def test_without_virtual_gpus_the_last_pod_wins() -> None:
    """A shared GPU shows one pod only; the other one vanishes."""
    world = shared(virtual=False)
    rows = pick(world.dcgm_page(world.start_s + 60), "DCGM_FI_DEV_GPU_UTIL")
    assert [r.labels.get("pod") for r in rows] == ["b", None]


def test_virtual_gpus_copy_the_device_value() -> None:
    """Each pod of a shared GPU gets a copy with its vgpu; the free GPU keeps a bare row."""
    world = shared(virtual=True)
    rows = pick(world.dcgm_page(world.start_s + 60), "DCGM_FI_DEV_POWER_USAGE")
    assert [(r.labels.get("pod"), r.labels.get("vgpu")) for r in rows] == [
        ("a", "0"),
        ("b", "3"),
        (None, None),
    ]
    assert rows[0].value == rows[1].value


def test_per_process_rows_stand_beside_the_device_row() -> None:
    """With per-process values the pods' own figures add up to the device's bare row."""
    world = shared(virtual=True, process=True)
    page = world.dcgm_page(world.start_s + 60)
    used = {r.labels.get("pod"): r.value for r in pick(page, "DCGM_FI_DEV_FB_USED", gpu="0")}
    assert used == {None: 8000, "a": 5000, "b": 3000}
    duty = {r.labels.get("pod"): r.value for r in pick(page, "DCGM_FI_DEV_GPU_UTIL", gpu="0")}
    assert duty[None] == pytest.approx(duty["a"] + duty["b"], abs=1)


@pytest.mark.parametrize("view", ["honor_labels", "no_honor_labels"])
def test_seen_through_prometheus_the_exporter_takes_over(view: str) -> None:
    """honorLabels leaves free GPUs to the exporter's pod; without it every GPU is said to be its own."""
    world = World.load(f"dcgm: {{view: {view}}}\n" + MIG.replace("container", "c"))
    rows = {r.labels["GPU_I_ID"]: r.labels for r in pick(world.dcgm_page(world.start_s), "DCGM_FI_DEV_FB_USED")}
    assert rows["7"]["pod"].startswith("dcgm-exporter")
    if view == "honor_labels":
        assert rows["1"]["pod"] == "a"
    else:
        assert rows["1"]["pod"].startswith("dcgm-exporter")
        assert rows["1"]["exported_pod"] == "a"


def test_mapping_by_the_wrong_kind_of_id_matches_nothing() -> None:
    """An exporter that looks for UUIDs on GKE attributes nothing; by device name it does."""
    for ids, expected in (("uid", set()), ("device-name", {"p"})):
        world = World.load(
            f"dcgm: {{ids: {ids}}}\nkubelet: {{plugin: gke}}\ngpus:\n  - {{model: L4}}\n"
            "pods:\n  - {name: p, devices: ['0']}\n"
        )
        rows = read_page(world.dcgm_page(world.start_s))
        assert {r.labels["pod"] for r in rows if "pod" in r.labels} == expected


def test_xids_latch() -> None:
    """The last XID stays on the page; before any, old pages say 0 and new ones nothing."""
    text = "dcgm: {naming: NAMING}\ngpus:\n  - {model: T4, xids: [{at: 60s, code: 31}, {at: 120s, code: 79}]}\n"
    world = World.load(text.replace("NAMING", "old"))
    seen = [one(world.dcgm_page(world.start_s + s), "DCGM_FI_DEV_XID_ERRORS") for s in (30, 90, 150, 9000)]
    assert [s.value for s in seen] == [0, 31, 79, 79]
    assert seen[1].labels["err_code"] == "31"
    new = World.load(text.replace("NAMING", "'4.9'"))
    assert not pick(new.dcgm_page(new.start_s + 30), "DCGM_FI_DEV_XID_ERROR")
    assert one(new.dcgm_page(new.start_s + 90), "DCGM_FI_DEV_XID_ERROR").value == 31


@pytest.mark.parametrize(
    ("kind", "gone", "stays"),
    [
        ("dcgm_no_profiling", "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_DEV_GPU_UTIL"),
        ("gpu_lost", "DCGM_FI_DEV_GPU_TEMP", ""),
    ],
)
def test_faults_that_take_series_away(kind: str, gone: str, stays: str) -> None:
    """Dropped fields and a lost GPU leave no series, only while the fault lasts."""
    world = simple(f"faults:\n  - {{kind: {kind}, from: 60s, to: 120s}}")
    t = world.start_s
    assert pick(world.dcgm_page(t + 30), gone)
    assert not pick(world.dcgm_page(t + 90), gone)
    assert not stays or pick(world.dcgm_page(t + 90), stays)
    assert pick(world.dcgm_page(t + 120), gone)


def test_faults_that_falsify_values() -> None:
    """Blanks are printed as sentinels, false zeros as zeros, on the GPUs named only."""
    world = simple(
        "faults:\n  - {kind: dcgm_blanks, from: 60s, to: 90s, gpus: [1]}\n  - {kind: dcgm_profiling_zero, from: 90s}"
    )
    blank = world.dcgm_page(world.start_s + 60)
    assert one(blank, "DCGM_FI_DEV_POWER_USAGE", gpu="1").text == "140737488355330.000000"
    assert one(blank, "DCGM_FI_DEV_FB_USED", gpu="1").text == "9223372036854775794"
    assert one(blank, "DCGM_FI_DEV_FB_USED", gpu="0").value == 448
    zero = world.dcgm_page(world.start_s + 95)
    assert one(zero, "DCGM_FI_PROF_SM_ACTIVE", gpu="1").value == 0
    assert one(zero, "DCGM_FI_DEV_GPU_UTIL", gpu="1").value == 100


@pytest.mark.parametrize("kind", ["dcgm_unmapped", "kubelet_gone", "kubelet_large"])
def test_without_the_kubelet_all_gpus_look_free(kind: str) -> None:
    """The page goes on without owner labels while the mapping is off or the kubelet can't be asked."""
    world = simple(f"faults:\n  - {{kind: {kind}, from: 10s, to: 20s}}")
    for at, expected in ((5, {"nb", "spin"}), (15, set()), (25, {"nb", "spin"})):
        rows = read_page(world.dcgm_page(world.start_s + at))
        assert {r.labels["pod"] for r in rows if "pod" in r.labels} == expected


def test_a_frozen_page_keeps_its_values() -> None:
    """While the exporter is frozen even the energy counter stands still."""
    world = simple("faults:\n  - {kind: dcgm_frozen, from: 40s, to: 400s}")
    name = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
    seen = [one(world.dcgm_page(world.start_s + s), name, gpu="0").value for s in (30, 90, 390, 400)]
    assert seen[0] == seen[1] == seen[2] < seen[3]


GKE = """
kubelet: {plugin: gke}
gpus:
  - {model: L4, minor: 1}
  - {model: L4, minor: 0}
pods:
  - {name: a, namespace: n, devices: ['0'], end: 125s, phases: [{profile: training}]}
  - {name: b, namespace: n, devices: ['0'], start: 125s, phases: [{profile: parked}]}
FAULTS
"""


def gke(faults: str = "") -> World:
    """A GKE node on which one pod takes over from another at 125 s."""
    return World.load(GKE.replace("FAULTS", faults))


def test_gke_shows_nothing_in_its_first_period() -> None:
    """No family before the first tick; all seven after it."""
    world = gke()
    assert world.gke_page(world.start_s + 29) == ""
    page = world.gke_page(world.start_s + 30)
    assert len({s.name for s in read_page(page)}) == 7
    assert one(page, "duty_cycle", pod="a").text == "98"
    assert one(page, "memory_total_gpu_node", accelerator_id=world.devices()[1].uuid).text == "2.4152899584e+10"
    assert one(page, "request", pod="a").value == 1


def test_gke_keeps_an_ended_pod_up_to_ninety_seconds() -> None:
    """After the handover both pods stand on the page with one device, until the gauges are cleared."""
    world = gke()
    owners = {
        s: {x.labels["pod"] for x in pick(world.gke_page(world.start_s + s), "duty_cycle")}
        for s in (95, 149, 150, 209, 210, 240)
    }
    assert owners[95] == owners[149] == {"a"}
    assert owners[150] == {"a", "b"}
    assert owners[209] == {"a", "b"}
    assert owners[210] == owners[240] == {"b"}


@pytest.mark.parametrize("kind", ["gke_frozen", "kubelet_gone", "kubelet_rate_limited"])
def test_gke_serves_the_old_page_when_a_tick_fails(kind: str) -> None:
    """Byte for byte the same page, node series included, as long as ticks can't be carried through."""
    world = gke(f"faults:\n  - {{kind: {kind}, from: 50s, to: 170s}}")
    pages = [world.gke_page(world.start_s + s) for s in (45, 90, 165)]
    assert pages[0] == pages[1] == pages[2]
    assert "b" in {s.labels.get("pod") for s in read_page(world.gke_page(world.start_s + 181))}


def test_gke_refuses_under_mig_and_off_gke() -> None:
    """A MIG node and a node without GKE's plugin have no such server, unless the world insists."""
    mig = "kubelet: {plugin: gke}\ngpus:\n  - {model: A100, mig: [1g.5gb]}\n"
    assert World.load(mig).gke_refuses()
    assert World.load("gpus:\n  - {model: T4}\n").gke_refuses()
    insisting = World.load("gke: {serve: always}\ngpus:\n  - {model: T4}\n")
    assert not insisting.gke_refuses()
    assert insisting.gke_page(insisting.start_s + 60)


def test_gke_shared_containers_request_zero() -> None:
    """Sharing containers have `request` 0 and no other series; the node's series stay."""
    world = churn_world(pods=8, gpus=2, mode="gke_shared")
    t = world.holds()[0].start_s + 31
    page = world.gke_page(t)
    assert {s.value for s in pick(page, "request")} == {0}
    assert not pick(page, "duty_cycle")
    assert len(pick(page, "duty_cycle_gpu_node")) == 2


IDS = {
    "whole": r"GPU-[0-9a-f-]{36}",
    "mig": r"MIG-[0-9a-f-]{36}",
    "time_slicing": r"GPU-[0-9a-f-]{36}::\d",
    "gke": r"nvidia\d",
    "gke_shared": r"nvidia\d/vgpu\d",
    "gke_mig": r"nvidia\d/gi\d+",
}


def listed(world: World, t: float) -> pb.ListPodResourcesResponse:
    """List as a client decodes it."""
    return pb.ListPodResourcesResponse.FromString(world.pod_resources(t))


def owners_in(reply: pb.ListPodResourcesResponse) -> dict[str, set[str]]:
    """Pods by device id."""
    out: dict[str, set[str]] = {}
    for pod in reply.pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                for device_id in devices.device_ids:
                    out.setdefault(device_id, set()).add(pod.name)
    return out


@pytest.mark.parametrize("mode", list(IDS))
def test_list_says_what_is_true(mode: ChurnMode) -> None:
    """At any instant the ids in List have the mode's form and lead to exactly the true owners."""
    world = churn_world(pods=60, gpus=4, mode=mode, seed=4)
    allocatable = pb.AllocatableResourcesResponse.FromString(world.allocatable(world.start_s))
    everything = {i for d in allocatable.devices for i in d.device_ids}
    assert len(everything) == len(world.units)
    for step in range(0, 2400, 97):
        t = world.start_s + step
        seen = owners_in(listed(world, t))
        by_key: dict[object, set[str]] = {}
        for device_id, pods in seen.items():
            assert re.fullmatch(IDS[mode], device_id)
            assert device_id in everything
            key = world.key_of(device_id)
            assert key is not None
            by_key.setdefault(key, set()).update(pods)
        for key in world.keys():  # noqa: SIM118 - not a mapping
            assert by_key.get(key, set()) == {o.pod for o in world.owners(key, t, t)}


def test_old_mig_ids_and_renamed_resources() -> None:
    """Older drivers' MIG ids, the single strategy and shared resource names appear as asked for."""
    world = World.load("kubelet: {mig_ids: legacy, mig_strategy: single}\n" + MIG.lstrip())
    device = listed(world, world.start_s).pod_resources[0].containers[0].devices[0]
    assert device.device_ids[0] == f"MIG-{world.devices()[0].uuid}/1/0"
    assert device.resource_name == "nvidia.com/gpu"
    renamed = World.load("kubelet: {rename_shared: true}" + SHARED.replace("VIRTUAL", "true").replace("PROCESS", "no"))
    names = {d.resource_name for p in listed(renamed, renamed.start_s).pod_resources for d in p.containers[0].devices}
    assert names == {"nvidia.com/gpu.shared"}


def test_pods_without_devices_and_sidecars_are_listed() -> None:
    """A pod without a GPU is in List with no devices, a sidecar as a container without any."""
    world = World.load("demo")
    pods = {p.name: p for p in listed(world, world.start_s).pod_resources}
    assert not pods["node-agent-x2b"].containers[0].devices
    trainer, shipper = pods["train-llm-0"].containers
    assert trainer.devices
    assert not shipper.devices


def test_old_kubelets_list_finished_pods() -> None:
    """Two pods name one GPU while the finished one lingers; a new kubelet has only the living one."""
    world = simple("faults:\n  - {kind: kubelet_lists_finished, from: 0s, to: 300s}")
    device_id = world.devices()[1].uuid
    seen = [owners_in(listed(world, world.start_s + s))[device_id] for s in (50, 150, 301)]
    assert seen == [{"spin"}, {"spin", "next"}, {"next"}]


def test_a_large_reply_is_beyond_four_mib() -> None:
    """The reply is over 5 MiB and still decodes; unknown fields pass too."""
    world = simple("faults:\n  - {kind: kubelet_large, from: 10s}\n  - {kind: kubelet_unknown_fields, from: 10s}")
    data = world.pod_resources(world.start_s + 10)
    assert 5 * 1024 * 1024 < len(data) < 6 * 1024 * 1024
    assert len(listed(world, world.start_s + 10).pod_resources) == 3


def test_the_page_never_names_an_owner_who_has_left() -> None:
    """With mapping on, the owners on the page are the true ones of that very instant, whatever the values."""
    world = churn_world(pods=80, gpus=4, mode="mig", seed=2, kubelet_restarts=0)

    def true_owner(device: Device, gi: str, t: float) -> set[str]:
        return {o.pod for o in world.owners((device.uuid, int(gi)), t, t)}

    for step in range(0, 2000, 130):
        t = world.start_s + step
        for sample in pick(world.dcgm_page(t), "DCGM_FI_DEV_FB_USED"):
            device = world.devices()[int(sample.labels["gpu"])]
            named = {sample.labels["pod"]} if "pod" in sample.labels else set()
            assert named == true_owner(device, sample.labels["GPU_I_ID"], t)


def test_numbers_are_printed_as_go_prints_them() -> None:
    """Shortest digits, an exponent from 1e6 on and below 1e-4."""
    cases = {0.0: "0", 97.0: "97", 469762048.0: "4.69762048e+08", 1e6: "1e+06", 123456.0: "123456"}
    cases |= {113.611: "113.611", 0.00001: "1e-05", -2.5: "-2.5", 0.15: "0.15"}
    assert {value: shortest(value) for value in cases} == cases
