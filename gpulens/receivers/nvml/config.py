"""The `nvml:` block."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from gpulens.config.ranges import POSITIVE
from gpulens.config.suggest import closest
from gpulens.config.types import Duration, StringList
from gpulens.nvml.places import LIBRARY_FOLDERS
from gpulens.nvml.protocol import Tier
from gpulens.nvml.table import ROWS
from gpulens.pipeline.scraping import ScrapeConfig

_READ: Final = frozenset(row.metric for row in ROWS)
_MADE: Final = ("hw.status", "gpu.xid.errors", "gpu.process.visible")
"""Metrics that the receiver makes itself and always tells."""


def _doubt(pattern: str) -> str:
    """What is wrong with a pattern of `drop`; empty when nothing."""
    if any(fnmatchcase(name, pattern) for name in _READ):
        return ""
    made = next((name for name in _MADE if fnmatchcase(name, pattern)), "")
    if made:
        return f"'drop' has no effect on {made}, which is always told"
    near = closest(pattern, sorted(_READ)) or closest(pattern.rstrip(".*"), sorted(_READ))
    return f"'drop' names \"{pattern}\", and no metric of this receiver is called so" + (
        f": did you mean {near}?" if near else ""
    )


class NvmlConfig(ScrapeConfig):
    """Reads this node's NVIDIA GPUs through the driver's own library.

    It says who holds which GPU only where processes can be seen and their pods are known, so it does not count as an
    allocation source: a pipeline with nothing but this receiver is worth the warning.
    """

    collection_interval: Annotated[
        Duration, Field(description="Time between two readings of activity, memory, power, clocks and temperatures.")
    ] = 10.0
    initial_delay: Annotated[Duration, Field(description="Wait before the first readings.")] = 1.0
    process_interval: Annotated[Duration, POSITIVE, Field(description="Time between two readings of processes.")] = 15.0
    error_interval: Annotated[
        Duration, POSITIVE, Field(description="Time between two readings of error counters, rows and links.")
    ] = 30.0
    inventory_interval: Annotated[
        Duration, POSITIVE, Field(description="Time between two looks at which GPUs and MIG instances there are.")
    ] = 60.0
    timeout: Annotated[
        Duration, Field(description="How long a tick waits for the GPUs that were asked; 0 is one interval.")
    ] = 5.0
    call_timeout: Annotated[
        Duration,
        POSITIVE,
        Field(description="How long one call of the driver's library may take before its GPU is left out."),
    ] = 5.0
    processes: Annotated[bool, Field(description="Whether processes are read at all.")] = True
    drop: Annotated[
        StringList,
        Field(
            description="Metrics to leave, by name or with `*`: those that a dcgm-exporter beside this receiver "
            "reports."
        ),
    ] = ()
    host_proc: Annotated[
        str, Field(description="The `/proc` in which processes are looked up (a mount of the host's, or our own).")
    ] = "/proc"
    host_pid: Annotated[
        Literal["auto", "true", "false"],
        BeforeValidator(lambda value: str(value).lower() if isinstance(value, bool) else value),
        Field(description="Whether every process of the node can be seen; `auto` looks at our own PID namespace."),
    ] = "auto"
    library_path: Annotated[
        StringList,
        Field(
            description="Folders in which `libnvidia-ml.so.1` is looked for first. Without it "
            f"{' and '.join(f'`{folder}`' for folder in LIBRARY_FOLDERS)}, where they exist."
        ),
    ] = ()

    @field_validator("host_proc")
    @classmethod
    def _is_whole_path(cls, path: str) -> str:
        if not path.startswith("/"):
            raise ValueError(f"'host_proc' must be a whole path, not \"{path}\"")
        return path

    @field_validator("library_path")
    @classmethod
    def _are_whole_paths(cls, folders: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for folder in folders:
            if not folder.startswith("/") or ":" in folder:
                raise ValueError(f"'{info.field_name}' must name folders by their whole paths, not \"{folder}\"")
        return folders

    def doubts(self) -> tuple[str, ...]:
        return (*super().doubts(), *(doubt for pattern in self.drop if (doubt := _doubt(pattern))))

    def keeps(self, name: str) -> bool:
        """Whether a metric is wanted."""
        return not any(fnmatchcase(name, pattern) for pattern in self.drop)

    def interval_of(self, tier: Tier) -> float:
        """Seconds between two readings of a tier."""
        return {
            Tier.FAST: self.collection_interval,
            Tier.PROCESSES: self.process_interval,
            Tier.ERRORS: self.error_interval,
            Tier.INVENTORY: self.inventory_interval,
        }[tier]

    def patience_of(self, tier: Tier) -> float:
        """Seconds that a tick of a tier waits for answers."""
        return self.timeout or self.interval_of(tier)
