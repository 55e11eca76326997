"""Where configuration text comes from: file:, env:, yaml: and preset: URIs.

Invariant: what can't be had is a SourceError whose text says what and why; nothing is read beyond the size
cap.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from gpulens.config.suggest import closest
from gpulens.config.yaml_nodes import MAX_BYTES

SCHEMES: Final = ("env", "file", "preset", "yaml")
_REMOTE: Final = ("http", "https")
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?P<opaque>.*)", re.DOTALL)
_ENV_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_PRESET_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


class SourceError(ValueError):
    """A source can't be had. Line and column count from 1 and are 0 where the whole source is at fault."""

    def __init__(self, message: str, line: int = 0, column: int = 0, suggestion: str = "") -> None:
        super().__init__(message)
        self.line = line
        self.column = column
        self.suggestion = suggestion


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Text from a source. `text` is None for an unset environment variable (`unset` has its name).

    `source` names what has lines of its own to point at; empty for a value without. `literal` means that the
    text is a string even where YAML reads something else in it.
    """

    text: str | None
    source: str = ""
    unset: str = ""
    literal: bool = False


def retrieve(uri: str, environ: Mapping[str, str], default_scheme: str) -> Retrieved:
    """The text behind a URI; one without a scheme belongs to `default_scheme` (file or env).

    Raises SourceError: unknown scheme, unreadable or over-long file, bytes that are not UTF-8, bad variable
    name.
    """
    scheme, opaque = _split(uri, default_scheme)
    if scheme == "env":
        return _from_env(opaque, environ)
    if scheme == "file":
        return Retrieved(_read_file(opaque), source=opaque)
    if scheme == "preset":
        return Retrieved(_read_preset(opaque), source=f"preset:{opaque}")
    if scheme == "yaml":
        return Retrieved(opaque)
    if scheme in _REMOTE:
        raise SourceError(
            f'unsupported scheme on URI "{uri}": gpulens fetches no configuration over the network; '
            "save the file first and name its path"
        )
    raise SourceError(f'unsupported scheme on URI "{uri}" (valid values: [{" ".join(SCHEMES)}])')


def source_name(uri: str) -> str:
    """How messages name a `--config` value: the path of a file, the URI of the rest, without inline YAML."""
    scheme, opaque = _split(uri, "file")
    if scheme == "file":
        return opaque
    return "yaml" if scheme == "yaml" else uri


def presets() -> Sequence[str]:
    """Names of the configurations that ship with gpulens."""
    folder = files("gpulens.config") / "presets"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def _split(uri: str, default_scheme: str) -> tuple[str, str]:
    match = _SCHEME.fullmatch(uri)
    if match is None:
        # No colon, or one letter before it: a path, where one letter is a drive.
        return default_scheme, uri
    if default_scheme == "env" and match["scheme"] not in (*SCHEMES, *_REMOTE) and match["opaque"][:1] == "-":
        return "env", uri
    return match["scheme"], match["opaque"]


def _from_env(opaque: str, environ: Mapping[str, str]) -> Retrieved:
    name, has_default, default = opaque.partition(":-")
    if not _ENV_NAME.fullmatch(name):
        raise SourceError(
            f'environment variable "{name}" has invalid name: must match regex ^[a-zA-Z_][a-zA-Z0-9_]*$ '
            '(a literal "${" is written "$${")'
        )
    if name in environ:
        return Retrieved(environ[name])
    if has_default:
        return Retrieved(default, literal=not default)
    return Retrieved(None, unset=name)


def _read_file(path: str) -> str:
    failed = f"cannot retrieve the configuration: unable to read the file file:{path}"
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SourceError(f"{failed}: open {path}: {(error.strerror or str(error)).lower()}") from error
    except ValueError as error:
        raise SourceError(f"{failed}: {error}") from error
    if len(content) > MAX_BYTES:
        raise SourceError(f"{failed}: it is larger than {MAX_BYTES // 1024} KiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        message = f"{failed}: it is not UTF-8 text (byte 0x{content[error.start]:02x})"
        raise SourceError(message, line, column) from error


def _read_preset(name: str) -> str:
    names = presets()
    if not _PRESET_NAME.fullmatch(name) or name not in names:
        message = f'unknown preset "{name}" (valid values: [{" ".join(names)}])'
        raise SourceError(message, suggestion=closest(name, names))
    return (files("gpulens.config") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
