"""The labels that the rows of the vendors' pages carry."""

from __future__ import annotations


def amd(card: int, part: int = 0, mode: str = "spx", pod: str = "", **more: str) -> str:
    """The labels of a row of AMD's page."""
    labels = {
        "gpu_id": str(8 * card + part),
        "serial_number": f"SN{card}",
        "card_model": "102-G30211-0C",
        "hostname": "h",
        "gpu_partition_id": str(part),
        "gpu_compute_partition_type": mode,
        "gpu_memory_partition_type": "nps1",
        "deployment_mode": "baremetal",
        "namespace": "ml" if pod else "",
        "pod": pod,
        "container": "main" if pod else "",
        "job_id": "",
        **more,
    }
    return "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def ascend(chip: int, pod: str = "", **more: str) -> str:
    """The labels of a row of the npu-exporter's page."""
    labels = {
        "id": str(chip),
        "model_name": "910B3",
        "vdie_id": f"VDIE-{chip}",
        "pcie_bus_info": f"0000:C{chip}:00.0",
        "namespace": "ml" if pod else "",
        "pod_name": pod,
        "container_name": "main" if pod else "",
        **more,
    }
    return "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def intel(name: str, tile: str = "", **more: str) -> str:
    """The labels of a row of xpumd's page."""
    labels = {"hw_id": "1234-0", "pci_bdf": "0000:05:00.0", "com_intel_subdevice_id": tile, "hw_name": name, **more}
    return "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"
