"""The command line: exit codes, what goes where, what gets imported."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from gpulens import __version__
from gpulens.pipeline.cli import main

REPO = Path(__file__).resolve().parents[2]

QUIET = """
receivers: {otlp_json_file: {include: [nothing-here.jsonl]}}
exporters: {debug: }
service: {pipelines: {metrics: {receivers: [otlp_json_file], exporters: [debug]}}}
"""
SECRET = """
receivers: {dcgm: {endpoint: "http://127.0.0.1:1", headers: {authorization: "Bearer ${env:TOKEN}"}}}
exporters: {debug: }
service: {pipelines: {metrics: {receivers: [dcgm], exporters: [debug]}}}
"""
FIVE_ERRORS = """\
receivers:
  dcgm:
    endpoint: http://127.0.0.1:1
    colection_interval: 10s
processors:
  atribution:
exporters:
  debug: {verbosity: loud}
service:
  pipelines:
    metrics:
      receivers: [dcgm, gke]
      exporters: [debgu]
"""


@pytest.fixture
def path(tmp_path: Path) -> Callable[[str], str]:
    """A function that writes a config file and gives its path."""

    def write(text: str) -> str:
        file = tmp_path / "config.yaml"
        file.write_text(text, encoding="utf-8")
        return str(file)

    return write


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """A gpulens process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "gpulens", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A function that starts `gpulens run` and waits until it is ready; what still runs at the end is killed."""
    processes: list[subprocess.Popen[str]] = []

    def run(config: str) -> subprocess.Popen[str]:
        process = start("run", "--config", config, cwd=tmp_path)
        processes.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if "Everything is ready" in line:
                break
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def error_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What went to stderr; stdout must be empty."""
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


# --- usage


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["rum"], "invalid choice: 'rum'"),
        (["run", "--confg", "x"], "unrecognized arguments: --confg x"),
        (["validate", "extra"], "unrecognized arguments: extra"),
        (["print-config", "--mode", "naked"], "invalid choice: 'naked'"),
        (["replay", "--config", "x"], "the following arguments are required: --input, --output"),
        (["demo", "--scale", "fast"], "invalid float value: 'fast'"),
    ],
)
def test_bad_usage_exits_with_one(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason goes to stderr; the code is 1 as for every failure."""
    assert main(arguments) == 1
    assert complaint in "\n".join(error_lines(capsys))


def test_a_folder_that_can_not_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`demo --record` below a file ends before anything starts, and names the folder."""
    file = tmp_path / "file"
    file.write_text("")
    assert main(["demo", "--record", str(file / "folder")]) == 1
    assert error_lines(capsys) == [f"Error: --record {file}/folder: no such folder can be made: Not a directory"]


@pytest.mark.parametrize("command", ["run", "validate", "print-config"])
def test_no_config_is_an_error(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The text is the Collector's."""
    assert main([command]) == 1
    assert error_lines(capsys) == ["Error: config: at least one config flag must be provided"]


def test_a_missing_file_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the file."""
    assert main(["validate", "--config", "/no/such/file.yaml"]) == 1
    assert "/no/such/file.yaml" in error_lines(capsys)[0]


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_are_no_failures(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They go to stdout with exit code 0."""
    assert main([flag]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert ("usage: gpulens" in out) or out == f"gpulens {__version__}\n"


# --- validate


def test_a_valid_config_says_nothing(path: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    """No news is good news: exit code 0, nothing printed."""
    assert main(["validate", "--config", path(QUIET)]) == 0
    assert error_lines(capsys) == []


def test_every_error_is_shown_with_its_place(path: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    """Five mistakes are five lines of file:line:column, with what was meant, in the order of the file."""
    file = path(FIVE_ERRORS)
    assert main(["validate", "--config", file]) == 1
    lines = error_lines(capsys)
    assert [line.removeprefix(f"Error: {file}:").split(": ", 1)[0] for line in lines] == [
        "4:5", "6:3", "8:22", "12:25", "13:19",
    ]  # fmt: skip
    hints = ["'collection_interval'", "'attribution'", "'verbosity' should be", '"gke"', "'debug'"]
    assert all(hint in line for hint, line in zip(hints, lines, strict=True))


def test_a_deprecated_spelling_is_a_warning(path: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    """The config is valid; the warning goes to stderr."""
    text = QUIET.replace("{otlp_json_file:", "{otlpjsonfile:").replace("[otlp_json_file]", "[otlpjsonfile]")
    assert main(["validate", "--config", path(text)]) == 0
    (line,) = error_lines(capsys)
    assert line.startswith("Warning: ")
    assert '"otlp_json_file"' in line


def test_validate_binds_no_port_and_makes_no_file(path: Callable[[str], str], tmp_path: Path) -> None:
    """A taken port and a folder that is not there are found at the start, not by looking at the config."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        exporters = f"{{prometheus: {{endpoint: '127.0.0.1:{taken.getsockname()[1]}'}}, file: {{path: {tmp_path}/o}}}}"
        text = QUIET.replace("{debug: }", exporters).replace("[debug]", "[prometheus, file]")
        assert main(["validate", "--config", path(text)]) == 0
    assert not (tmp_path / "o").exists()


def test_settings_on_the_command_line_come_last(path: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    """`--set` wins over the files, and its mistakes are named by it."""
    file = path(QUIET)
    assert main(["print-config", "--config", file, "--set", "exporters.debug.verbosity=detailed"]) == 0
    assert "verbosity: detailed" in capsys.readouterr().out
    assert main(["validate", "--config", file, "--set", "exporters.debug.verbosity=loud"]) == 1
    assert "--set exporters.debug.verbosity" in error_lines(capsys)[0]


# --- print-config


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_print_config_hides_secrets(
    form: str, path: Callable[[str], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is printed can be read back, and the secret is not in it unless it is asked for."""
    monkeypatch.setenv("TOKEN", "hunter2")
    arguments = ["print-config", "--config", path(SECRET), "--format", form]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    read = yaml.safe_load(out) if form == "yaml" else json.loads(out)
    assert read["receivers"]["dcgm"]["headers"] == {"authorization": "[REDACTED]"}
    assert main([*arguments, "--mode", "unredacted"]) == 0
    assert "Bearer hunter2" in capsys.readouterr().out


def test_an_error_does_not_show_a_secret(
    path: Callable[[str], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret of the wrong type is reported without its value."""
    monkeypatch.setenv("TOKEN", "hunter2")
    assert main(["validate", "--config", path(SECRET.replace('"Bearer ${env:TOKEN}"', "[hunter2, 3]"))]) == 1
    assert "hunter2" not in "".join(error_lines(capsys))


# --- components


def test_components_lists_what_a_config_can_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Valid YAML with every kind, every registered type and its stability for each signal."""
    from gpulens.pipeline.registry import BUILT_IN

    assert main(["components"]) == 0
    listed = yaml.safe_load(capsys.readouterr().out)
    assert listed["buildinfo"] == {"command": "gpulens", "version": __version__}
    for kind, names in BUILT_IN.items():
        assert {entry["name"] for entry in listed[str(kind)]} >= set(names)
        if str(kind) != "extensions":
            assert all(entry["stability"] for entry in listed[str(kind)])


# --- run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_ends_with_zero_on_a_signal(
    number: int, path: Callable[[str], str], running: Callable[[str], subprocess.Popen[str]]
) -> None:
    """It stops in order and nothing went wrong."""
    process = running(path(QUIET))
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err


def test_a_missing_endpoint_does_not_end_the_process(
    path: Callable[[str], str], running: Callable[[str], subprocess.Popen[str]]
) -> None:
    """Sources and destinations that are not there are said once, and the agent goes on until it is told to end."""
    process = running(
        path("""
receivers:
  dcgm: {endpoint: "http://127.0.0.1:1", collection_interval: 50ms, initial_delay: 0s}
  pod_resources: {endpoint: "unix:///no/such/kubelet.sock", collection_interval: 50ms, initial_delay: 0s}
exporters: {otlp_grpc: {endpoint: "127.0.0.1:1", tls: {insecure: true}}, debug: }
service: {pipelines: {metrics: {receivers: [dcgm, pod_resources], exporters: [otlp_grpc, debug]}}}
""")
    )
    assert process.stderr is not None
    failed: set[str] = set()
    for line in process.stderr:
        failed |= {name for name in ("dcgm", "pod_resources") if "Scrape failed" in line and name in line}
        if len(failed) == 2:
            break
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in err


def test_a_port_in_use_is_told_clearly(path: Callable[[str], str], tmp_path: Path) -> None:
    """Exit code 1 and one line with the component and the address; no traceback."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        text = QUIET.replace("{debug: }", f"{{prometheus: {{endpoint: '{address}'}}}}").replace("debug", "prometheus")
        process = start("run", "--config", path(text), cwd=tmp_path)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "")
    (line,) = [line for line in err.splitlines() if line.startswith("Error: ")]
    assert 'failed to start "prometheus" exporter' in line
    assert address in line
    assert "Traceback" not in err


# --- what is imported


def test_small_commands_import_no_network_library(path: Callable[[str], str], tmp_path: Path) -> None:
    """Validating a config without network components loads neither aiohttp nor grpc nor protobuf's OTLP messages of
    components that it does not name."""
    code = (
        "import sys\nfrom gpulens.pipeline.cli import main\n"
        f"code = main(['validate', '--config', {path(QUIET)!r}])\nprint(code, *sys.modules)"
    )
    environ = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ, timeout=60, cwd=tmp_path
    )
    code_printed, *modules = done.stdout.split()
    assert code_printed == "0"
    assert not {"aiohttp", "grpc"} & set(modules)
    assert not [name for name in modules if name.startswith(("gpulens.receivers.dcgm", "gpulens.simulator"))]
