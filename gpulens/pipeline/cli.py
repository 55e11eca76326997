"""The command line: run, validate, components, print-config, demo, simulate, replay, doctor.

Invariant: exit code 0 when all went well (also on SIGTERM), 1 on any failure; messages go to stderr, results to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from gpulens import __version__
from gpulens.config import ServiceConfig, load, render, resolve
from gpulens.config.ids import Kind
from gpulens.pipeline import doctor_report, journal
from gpulens.pipeline.errors import ConfigError, GpulensError, StartError
from gpulens.pipeline.registry import Registry
from gpulens.pipeline.service import Service, node_name

Command = Callable[[argparse.Namespace, Mapping[str, str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    # gRPC's own library writes notes of its own to stderr, between our lines; errors reach us as exceptions.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        command: Command = arguments.command
        return command(arguments, os.environ)
    except SystemExit as stop:
        # argparse ends with 2 on bad usage; here every failure is 1, as the Collector's.
        return 0 if stop.code in (0, None) else 1
    except ConfigError as error:
        for problem in error.problems:
            print(f"Error: {problem}", file=sys.stderr)
        return 1
    except GpulensError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command is _simulate:
        arguments.rest = rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpulens", description="Who holds each GPU, and is it really working?")
    parser.add_argument("--version", action="version", version=f"gpulens {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Command, text: str, *, config: bool) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        if config:
            _config_arguments(sub)
        return sub

    add("run", _run, "run the pipelines of a config until SIGTERM", config=True)
    add("validate", _validate, "check a config and build its pipelines; start nothing", config=True)
    printing = add("print-config", _print_config, "print the effective config, secrets redacted", config=True)
    printing.add_argument("--mode", choices=["redacted", "unredacted"], default="redacted")
    printing.add_argument("--format", choices=["yaml", "json"], default="yaml")
    add("components", _components, "list the components that a config can name", config=False)
    demo = add(
        "demo",
        _demo,
        "the whole pipeline on a simulated node: a table of GPUs and a /metrics page",
        config=False,
    )
    demo.add_argument("--duration", default="20s", help="how long to run, 0s = until Ctrl-C (default 20s)")
    demo.add_argument("--listen", default="127.0.0.1:9464", help="where /metrics is served (default 127.0.0.1:9464)")
    demo.add_argument("--world", default="", help="a world file in place of the built-in one")
    demo.add_argument("--scale", type=float, default=15.0, help="simulated seconds per second (default 15)")
    demo.add_argument("--record", default="", help="folder for a recording: raw.jsonl and out.jsonl")
    checking = add("doctor", _doctor, "say what of this GPU node is there, what is missing, and the fix", config=True)
    checking.description = doctor_report.HELP
    checking.add_argument("--json", action="store_true", help="the report as JSON")
    # The simulator brings its own arguments and is imported only when it is asked for.
    simulating = commands.add_parser("simulate", help="a GPU node as a program, from a world file", add_help=False)
    simulating.set_defaults(command=_simulate)
    replaying = add(
        "replay", _replay, "send a recording through the processors of a config, in event time", config=True
    )
    replaying.add_argument("--input", required=True, help="the recording: OTLP JSON lines")
    replaying.add_argument("--output", required=True, help="where the result is written: OTLP JSON lines")
    replaying.add_argument("--pipeline", default="", help="whose processors, where the config has several pipelines")
    return parser


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", action="append", default=[], metavar="URI",
        help="file, or file: env: yaml: preset: URI; may repeat, later ones win",
    )  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="one setting, after all --config")


def _load(arguments: argparse.Namespace, environ: Mapping[str, str]) -> tuple[ServiceConfig, Registry]:
    document = load(arguments.config, arguments.set, environ)
    registry = Registry()
    try:
        config = resolve(document, registry)
    except ConfigError:
        _warn(document.warnings)  # an unset variable is often the cause
        raise
    _warn(config.warnings)
    return config, registry


def _warn(warnings: Iterable[object]) -> None:
    for warning in warnings:
        print(f"Warning: {warning}", file=sys.stderr)


def _service(config: ServiceConfig, registry: Registry, environ: Mapping[str, str]) -> Service:
    _refuse_slow_protobuf()
    journal.configure(config.telemetry.logs.level, config.telemetry.logs.encoding)
    return Service(config, node_name(config, environ), registry)


def _refuse_slow_protobuf() -> None:
    from google.protobuf.internal import api_implementation

    kind = api_implementation.Type()
    if kind == "python":
        raise StartError(
            "protobuf runs on its pure-Python implementation, which is some 50 times too slow; "
            "install a protobuf wheel for this platform and unset PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
        )


async def serve(service: Service) -> None:
    """Runs a service until SIGTERM, SIGINT or its own end."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stop, signal.Signals(number).name)
    await service.run()


def _run(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    config, registry = _load(arguments, environ)

    async def run() -> None:
        await serve(_service(config, registry, environ))

    asyncio.run(run())
    return 0


def _validate(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    config, registry = _load(arguments, environ)

    async def build() -> None:
        Service(config, node_name(config, environ), registry)

    asyncio.run(build())
    return 0


def _print_config(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    config, _ = _load(arguments, environ)
    print(render(config, mode=arguments.mode, format=arguments.format), end="")
    return 0


def _components(_arguments: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    registry = Registry()
    print(f"buildinfo:\n  command: gpulens\n  version: {__version__}")
    for kind in Kind:
        names = registry.types(kind)
        print(f"{kind}:" + ("" if names else " []"))
        for name in names:
            factory = registry.factory(kind, name)
            signals = ", ".join(f"{each}: {factory.stability}" for each in sorted(registry.signals(kind, name)))
            print(f"  - name: {name}\n    stability: {{{signals}}}")
    print("providers: [env, file, preset, yaml]")
    return 0


def _doctor(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from gpulens.pipeline.doctor import Surroundings, examine

    config = _load(arguments, environ)[0] if arguments.config or arguments.set else None
    report = asyncio.run(examine(Surroundings(environ=environ), config))
    colour = sys.stdout.isatty() and not environ.get("NO_COLOR")
    print(doctor_report.as_json(report) if arguments.json else doctor_report.as_text(report, colour=colour), end="")
    return 0 if report.healthy else 1


def _demo(arguments: argparse.Namespace, _: Mapping[str, str]) -> int:
    from gpulens.simulator.demo import demo

    _refuse_slow_protobuf()
    if arguments.record:
        try:
            Path(arguments.record).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartError(f"--record {arguments.record}: no such folder can be made: {error.strerror}") from error
    asyncio.run(
        demo(
            arguments.duration,
            arguments.listen,
            arguments.world,
            arguments.scale,
            arguments.record,
            sys.stdout,
        )
    )
    return 0


def _simulate(arguments: argparse.Namespace, _: Mapping[str, str]) -> int:
    from gpulens.simulator.command import add_arguments, simulate

    parser = argparse.ArgumentParser(prog="gpulens simulate", description="A GPU node as a program.")
    add_arguments(parser)
    asyncio.run(simulate(**vars(parser.parse_args(arguments.rest))))
    return 0


def _replay(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from gpulens.pipeline.replay import check_read, check_readable, replay_config

    config, registry = _load(arguments, environ)
    replayed = replay_config(config, registry, arguments.input, arguments.output, arguments.pipeline)
    check_readable(arguments.input)  # before the output is opened, which empties it

    async def run() -> None:
        service = _service(replayed, registry, environ)
        await serve(service)
        check_read(service.telemetry, arguments.input)

    asyncio.run(run())
    return 0
