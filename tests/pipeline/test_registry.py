"""The registry: which components exist, imported only when named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulens.config.ids import Kind, Signal
from gpulens.pipeline import registry as registry_module
from gpulens.pipeline.errors import StartError
from gpulens.pipeline.registry import ALIASES, BUILT_IN, Registry
from tests.connectors.relay import RELAY
from tests.pipeline.parts import Bench

REPO = Path(__file__).resolve().parents[2]
COMPONENTS = ("gpulens.receivers.", "gpulens.processors.", "gpulens.exporters.", "gpulens.extensions.")


def modules_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has after running this code."""
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    environ = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environ, timeout=60
    )
    return set(done.stdout.split())


def test_importing_the_registry_imports_no_component() -> None:
    """Neither a component nor the libraries that only components need; listing names imports nothing either."""
    loaded = modules_after("from gpulens.pipeline.registry import Registry\nfor k in __import__("
                           "'gpulens.config.ids').config.ids.Kind: Registry().types(k)")  # fmt: skip
    assert "gpulens.pipeline.registry" in loaded
    assert not [name for name in loaded if name.startswith(COMPONENTS)]
    assert not {"aiohttp", "grpc", "opentelemetry"} & loaded


def test_asking_for_one_component_imports_no_other() -> None:
    """A sibling is not even looked at."""
    loaded = modules_after(
        "from gpulens.pipeline.registry import Registry\nfrom gpulens.config.ids import Kind\n"
        "Registry().factory(Kind.EXPORTERS, 'debug')"
    )
    owners = {".".join(name.split(".")[:3]) for name in loaded if name.startswith(COMPONENTS)}
    assert owners == {"gpulens.exporters.debug"}


BUILT = [(kind, name) for kind, names in BUILT_IN.items() for name in names]


@pytest.mark.parametrize(("kind", "name"), BUILT, ids=[f"{kind}/{name}" for kind, name in BUILT])
def test_every_built_in_is_there_under_its_own_name(kind: Kind, name: str) -> None:
    """The table's name is the factory's, and asking twice gives the same factory."""
    registry = Registry()
    factory = registry.factory(kind, name)
    assert factory.name == name
    assert registry.factory(kind, name) is factory
    assert registry.canonical(kind, name) == (name, False)


def test_the_alias_table_is_what_the_factories_say() -> None:
    """Every alias of a factory is in the table and no other, and it leads to its factory as deprecated."""
    registry = Registry()
    of_factories = {
        (kind, factory.alias): name for kind, name in BUILT if (factory := registry.factory(kind, name)).alias
    }
    assert of_factories == dict(ALIASES)
    for (kind, alias), name in ALIASES.items():
        assert registry.canonical(kind, alias) == (name, True)


def test_an_alias_belongs_to_its_kind() -> None:
    """An exporter's old name is unknown among receivers."""
    with pytest.raises(KeyError):
        Registry().canonical(Kind.RECEIVERS, "otlphttp")


def test_unknown_names_are_key_errors() -> None:
    """Whoever asks says where the name stands and what it could have meant."""
    for kind in Kind:
        with pytest.raises(KeyError):
            Registry().canonical(kind, "no_such_component")
        with pytest.raises(KeyError):
            Registry().factory(kind, "no_such_component")


def test_extra_factories_stand_beside_the_built_in_ones() -> None:
    """Under their own names, with the signals that they can make."""
    registry = Bench(extra=(RELAY,)).registry()
    assert {"src", "dcgm"} <= set(registry.types(Kind.RECEIVERS))
    assert registry.types(Kind.RECEIVERS) == sorted(registry.types(Kind.RECEIVERS))
    assert registry.signals(Kind.RECEIVERS, "src") == {Signal.METRICS, Signal.LOGS}
    assert registry.signals(Kind.RECEIVERS, "metrics_only") == {Signal.METRICS}
    assert registry.signals(Kind.EXTENSIONS, "ext") == frozenset()
    metrics, logs = Signal.METRICS, Signal.LOGS
    assert registry.connector_pairs("relay") == {(metrics, metrics), (metrics, logs), (logs, logs)}
    assert registry.signals(Kind.CONNECTORS, "relay") == {metrics, logs}


# --- third parties

GOOD_MODULE = """
from gpulens.config.types import ComponentConfig
from gpulens.pipeline.component import ReceiverFactory, Stability
FACTORY = ReceiverFactory(name="acme", config=ComponentConfig, stability=Stability.ALPHA, alias="acme_old")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str], None]]:
    """A function that installs a distribution with one module and one entry point `name = target` among receivers."""
    monkeypatch.syspath_prepend(str(tmp_path))
    installed: list[str] = []

    def make(name: str, target: str, source: str) -> None:
        module = target.partition(":")[0]
        (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[gpulens.receivers]\n{name} = {target}\n", encoding="utf-8")
        installed.append(module)
        registry_module._third_party.cache_clear()

    yield make
    for module in installed:
        sys.modules.pop(module, None)
    registry_module._third_party.cache_clear()


def test_an_entry_point_adds_a_component(install: Callable[[str, str, str], None]) -> None:
    """It is listed without being imported, found by name and alias, and usable like a built-in one."""
    install("acme", "acme_receiver_a:FACTORY", GOOD_MODULE)
    registry = Registry()
    assert "acme" in registry.types(Kind.RECEIVERS)
    assert "acme_receiver_a" not in sys.modules
    assert registry.canonical(Kind.RECEIVERS, "acme") == ("acme", False)
    assert registry.canonical(Kind.RECEIVERS, "acme_old") == ("acme", True)
    assert registry.factory(Kind.RECEIVERS, "acme").name == "acme"


def test_a_built_in_name_can_not_be_taken_over(install: Callable[[str, str, str], None]) -> None:
    """An entry point called `dcgm` changes nothing."""
    install("dcgm", "acme_receiver_b:FACTORY", GOOD_MODULE)
    assert Registry().factory(Kind.RECEIVERS, "dcgm").name == "dcgm"
    assert "acme_receiver_b" not in sys.modules


@pytest.mark.parametrize(
    ("target", "source", "complaint"),
    [
        ("acme_c:FACTORY", "import a_library_that_nobody_has", "install the extra that brings it"),
        ("acme_d:FACTORY", "raise RuntimeError('no GPU library')", "no GPU library"),
        ("acme_e:FACTORY", "this is no python", "can't be imported"),
        ("acme_f:FACTORY", "FACTORY = 7", "acme_f:FACTORY is no ReceiverFactory"),
        ("acme_g:FACTORY", "", "is no ReceiverFactory"),
        ("acme_h", "", "is no ReceiverFactory"),
    ],
)
def test_a_broken_component_is_a_start_error_that_names_it(
    install: Callable[[str, str, str], None], target: str, source: str, complaint: str
) -> None:
    """Whatever is wrong with the module, the message says which component and what to do."""
    install("acme", target, source)
    with pytest.raises(StartError, match=complaint) as raised:
        Registry().factory(Kind.RECEIVERS, "acme")
    assert str(raised.value).startswith("receivers::acme: ")


def test_a_broken_component_harms_no_config_that_does_not_name_it(install: Callable[[str, str, str], None]) -> None:
    """Others are still found, and a name that nobody has is still an unknown name."""
    install("acme", "acme_i:FACTORY", "raise RuntimeError('broken')")
    with pytest.raises(KeyError):
        Registry().canonical(Kind.RECEIVERS, "dcmg")
    assert Registry().canonical(Kind.RECEIVERS, "dcgm") == ("dcgm", False)
