"""What the world says is true."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gpulens.simulator.churn import ChurnMode, churn_world
from gpulens.simulator.models import MIB
from gpulens.simulator.world import World

HANDOVER = """
seed: 3
gpus:
  - {model: H100, minor: 5}
pods:
  - {name: a, devices: ['0'], start: -1h, end: 100s, phases: [{profile: training}]}
  - {name: b, devices: ['0'], start: 100s, end: 200s, phases: [{profile: parked}]}
"""


def names(owners: object) -> set[str]:
    """Pod names of a set of owners."""
    assert isinstance(owners, frozenset)
    return {o.pod for o in owners}


def test_holds_are_half_open() -> None:
    """At the instant of a handover the new pod has the device and the old one hasn't."""
    world = World.load(HANDOVER)
    key, t = world.keys()[0], world.start_s
    assert names(world.owners(key, t + 100, t + 100)) == {"b"}
    assert names(world.owners(key, t + 99, t + 100)) == {"a", "b"}
    assert names(world.held_throughout(key, t + 50, t + 99.9)) == {"a"}
    assert names(world.held_throughout(key, t + 50, t + 100)) == set()
    assert names(world.owners(key, t + 200, t + 300)) == set()


def test_the_owner_knows_its_uid() -> None:
    """Two pods have two UIDs, and the same world gives the same ones again."""
    first, second = (World.load(HANDOVER) for _ in range(2))
    assert [h.owner for h in first.holds()] == [h.owner for h in second.holds()]
    assert len({h.owner.uid for h in first.holds()}) == 2


def test_activity_follows_the_pod() -> None:
    """Training, parked and nobody give their own figures, power and memory."""
    world = World.load(HANDOVER)
    key, t = world.keys()[0], world.start_s
    training, parked, free = (world.activity(key, t + s) for s in (50, 150, 250))
    assert (training.residency, training.sm, training.tensor) == (0.98, 0.70, 0.35)
    assert training.power_w == pytest.approx(620, abs=8)
    assert (parked.residency, parked.sm, parked.memory_bytes) == (0, 0, 448 * MIB)
    assert parked.power_w == pytest.approx(120, abs=4)
    assert free.memory_bytes == 0
    assert free.power_w == pytest.approx(69, abs=4)


def test_energy_is_the_integral_of_power() -> None:
    """The counter grows by the mean power over any window, also across an end and a square wave."""
    world = World.load(
        "gpus:\n  - {model: L4}\npods:\n"
        "  - {name: w, devices: ['0'], start: -5m, end: 90s, phases: [{profile: data_loading}]}\n"
    )
    uuid = world.devices()[0].uuid
    t0, t1, step = world.start_s - 7.3, world.start_s + 140, 0.01
    count = round((t1 - t0) / step)
    summed = sum(world.activity(uuid, t0 + (i + 0.5) * step).power_w or 0.0 for i in range(count)) * step
    assert world.energy_j(uuid, t1) - world.energy_j(uuid, t0) == pytest.approx(summed, rel=1e-4)


def test_means_are_exact_over_a_wave() -> None:
    """Five busy seconds a minute at 60 % are 5 % over whole minutes."""
    world = World.load(
        "gpus:\n  - {model: T4}\npods:\n  - {name: i, request: 1, phases: [{profile: inference_bursty}]}\n"
    )
    key, t = world.keys()[0], world.start_s
    assert world.mean_activity(key, t, t + 600).residency == pytest.approx(0.05)
    assert world.mean_activity(key, t + 1, t + 4).residency == pytest.approx(0.6)
    assert world.activity(key, t + 30).residency == 0


def test_mig_parts_add_up_to_the_board() -> None:
    """The board's engine sums its instances by slices; it has no residency, instances have no power."""
    world = World.load(
        "gpus:\n  - {model: A100, mig: [3g.20gb, 2g.10gb, 1g.5gb]}\npods:\n"
        "  - {name: a, devices: ['0/gi1'], phases: [{profile: training}]}\n"
        "  - {name: b, devices: ['0/gi3'], phases: [{profile: decode}]}\n"
    )
    device, t = world.devices()[0], world.start_s + 60
    board = world.activity(device.uuid, t)
    parts = {i.gi: world.activity(i.key, t) for i in device.mig}
    weights = {i.gi: i.profile.compute / 7 for i in device.mig}
    assert sorted(parts) == [1, 3, 7]
    assert board.residency is None
    assert all(p.residency is None and p.power_w is None for p in parts.values())
    assert board.engine == pytest.approx(sum(weights[gi] * p.engine for gi, p in parts.items()))
    assert board.memory_bytes == sum(p.memory_bytes for p in parts.values())
    assert sum(i.memory_bytes for i in device.mig) <= device.memory_bytes


def test_sharing_divides_the_device() -> None:
    """Two pods on one GPU: the device shows half of each, and memory adds up."""
    world = World.load(
        "gpus:\n  - {model: L4, sharing: time_slicing, replicas: 4}\npods:\n"
        "  - {name: a, devices: ['0::0', '0::2'], phases: [{profile: training, memory_mib: 5000}]}\n"
        "  - {name: b, devices: ['0::1'], phases: [{profile: decode, memory_mib: 3000}]}\n"
    )
    key, t = world.keys()[0], world.start_s + 1
    now = world.activity(key, t)
    assert now.residency == pytest.approx((0.98 + 0.97) / 2)
    assert now.memory_bytes == 8000 * MIB
    assert names(world.owners(key, t, t)) == {"a", "b"}
    assert {o.pod: m // MIB for o, m in world.owner_memory(key, t).items()} == {"a": 5000, "b": 3000}


def test_repeating_phases_go_round() -> None:
    """A pod that repeats its phases is busy again when the round is over."""
    world = World.load(
        "gpus:\n  - {model: T4}\npods:\n  - name: n\n    devices: ['0']\n    repeat: true\n"
        "    phases: [{profile: training, for: 20s}, {profile: parked, for: 40s}]\n"
    )
    key, t = world.keys()[0], world.start_s
    seen = [world.activity(key, t + s).residency for s in (10, 30, 70, 90, 3610)]
    assert seen == [0.98, 0, 0.98, 0, 0.98]
    after_the_horizon = world.activity(key, t + 90000)
    assert (after_the_horizon.residency, after_the_horizon.memory_bytes) == (0, 448 * MIB)


def test_requests_take_what_is_free() -> None:
    """A request waits for nobody: it gets the first free units that fit, and the next pod those after it."""
    world = World.load(
        "gpus:\n  - {model: T4}\n  - {model: L4}\n  - {model: L4}\npods:\n"
        "  - {name: x, request: 1, of: L4}\n  - {name: y, request: 1}\n  - {name: z, request: 1}\n"
    )
    got = {h.owner.pod: h.unit.reference for h in world.holds()}
    assert got == {"x": "1", "y": "0", "z": "2"}


@pytest.mark.parametrize("mode", ["whole", "mig", "time_slicing", "gke", "gke_shared", "gke_mig"])
def test_churn_is_reproducible_and_never_gives_a_unit_twice(mode: ChurnMode) -> None:
    """The same seed gives the same holds; no unit has two pods at once; back-to-back handovers occur."""
    world, again = (churn_world(pods=120, gpus=4, mode=mode, seed=9) for _ in range(2))
    assert [(h.owner, h.start_s, h.unit) for h in world.holds()] == [
        (h.owner, h.start_s, h.unit) for h in again.holds()
    ]
    by_unit: dict[str, list[tuple[float, float]]] = {}
    for hold in world.holds():
        by_unit.setdefault(hold.unit.reference, []).append((hold.start_s, hold.end_s))
    touching = 0
    for times in by_unit.values():
        times.sort()
        for (_, end), (start, _) in pairwise(times):
            assert start >= end
            touching += start == end
    assert touching > 10
    assert len({h.owner for h in world.holds()}) == 120
    assert any(f.kind == "kubelet_gone" for f in world.spec.faults)
    assert all(d.minor != d.index for d in world.devices())


def test_churn_stops_at_its_duration() -> None:
    """With a duration no pod starts after it, and the whole-GPU mode has pods with two GPUs."""
    world = churn_world(pods=500, gpus=8, duration_s=3600, pod_life_s=300)
    assert 0 < len(world.spec.pods) < 500
    assert max(p.start for p in world.spec.pods) < 3600
    assert any(len(p.devices) == 2 for p in world.spec.pods)


def test_recreated_pods_keep_their_name_and_change_their_uid() -> None:
    """A pod that comes back under the same name is another pod, and no name is alive twice."""
    world = churn_world(pods=200, gpus=4, recreated=0.3, seed=5)
    by_name: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for hold in world.holds():
        by_name.setdefault((hold.owner.namespace, hold.owner.pod), []).append(
            (hold.start_s, hold.end_s, hold.owner.uid)
        )
    assert any(len({uid for _, _, uid in lives}) > 1 for lives in by_name.values())
    for lives in by_name.values():
        ordered = sorted({(s, e, uid) for s, e, uid in lives})
        assert all(a[1] <= b[0] for a, b in pairwise(ordered))


def test_every_name_of_a_device_leads_to_its_key() -> None:
    """UUIDs, MIG UUIDs, `<parent>/gi<N>` and kubelet ids resolve; others don't."""
    world = churn_world(pods=4, gpus=2, mode="gke_mig")
    device = world.devices()[0]
    instance = device.mig[1]
    assert world.key_of(f"nvidia{device.minor}/gi{instance.gi}") == instance.key
    assert world.key_of(instance.uuid) == world.key_of(f"{device.uuid}/gi{instance.gi}") == instance.key
    assert world.key_of(device.uuid) == device.uuid
    assert world.key_of("nvidia9") is None
