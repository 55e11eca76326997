"""OTLP's JSON both ways: messages to one line of text, text to messages.

Invariant: a message read back is the message that was written, bit by bit, but for the payload of a NaN.

OTLP's JSON is protobuf's with these rules of its own (opentelemetry-proto docs/specification.md, "JSON
Protobuf Encoding"): keys are lowerCamelCase only, 64-bit integers are texts (numbers are read too), enums
are integers only, trace and span ids are hexadecimal, other bytes base64, NaN and infinities texts, unknown
keys are ignored.

The walk follows the messages' descriptors, so every OTLP message can be read and written. Reading goes
through nested dictionaries that protobuf takes in one call: setting fields one by one costs three times as
much.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, NoReturn, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError as ProtobufDecodeError
from google.protobuf.message import Message
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics, ScopeMetrics

from gpulens.pipeline.errors import DecodeError

M = TypeVar("M", bound=Message)

MAX_DEPTH: Final = 90
"""Levels of nesting that are read; protobuf's own limit is 100."""

_HEX_IDS = frozenset({"trace_id", "span_id", "parent_span_id"})
_INT64 = {
    FieldDescriptor.TYPE_INT64: True,
    FieldDescriptor.TYPE_SINT64: True,
    FieldDescriptor.TYPE_SFIXED64: True,
    FieldDescriptor.TYPE_UINT64: False,
    FieldDescriptor.TYPE_FIXED64: False,
}
_INT32 = {
    FieldDescriptor.TYPE_INT32: True,
    FieldDescriptor.TYPE_SINT32: True,
    FieldDescriptor.TYPE_SFIXED32: True,
    FieldDescriptor.TYPE_ENUM: True,
    FieldDescriptor.TYPE_UINT32: False,
    FieldDescriptor.TYPE_FIXED32: False,
}
_INTEGER = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_FLOAT_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _is_repeated(field: FieldDescriptor) -> bool:
    if hasattr(field, "is_repeated"):
        return field.is_repeated
    # Protobuf before 30 has only the label; the stubs know only what came after it.
    label: int = getattr(field, "label")  # noqa: B009
    return label == 3  # LABEL_REPEATED


# --- writing


def encode_json(request: Message | bytes) -> bytes:
    """A message as one line of JSON without its end; bytes are taken as an encoded
    ExportMetricsServiceRequest.

    Equal messages give equal bytes. Raises DecodeError for bytes that are no such request.
    """
    if isinstance(request, bytes):
        try:
            request = ExportMetricsServiceRequest.FromString(request)
        except ProtobufDecodeError as error:
            raise DecodeError(f"not an OTLP ExportMetricsServiceRequest: {error}") from error
    return _write_message(request).encode("ascii")


def json_text(text: str) -> str:
    """A text as JSON, in ASCII."""
    return json.dumps(text)


def json_double(number: float) -> str:
    """A double as JSON: the shortest text that reads back as the same number; NaN and infinities in
    quotes."""
    if math.isfinite(number):
        return repr(number)
    return '"NaN"' if math.isnan(number) else '"Infinity"' if number > 0 else '"-Infinity"'


def _write_message(message: Message) -> str:
    writers = _writers(message.DESCRIPTOR)
    return "{" + ",".join([writers[field.number](value) for field, value in message.ListFields()]) + "}"


@cache
def _writers(descriptor: Descriptor) -> Mapping[int, Callable[[object], str]]:
    """For each field number: a function from the value to `"key":value`."""
    return {field.number: _field_writer(field) for field in descriptor.fields}


def _field_writer(field: FieldDescriptor) -> Callable[[object], str]:
    head = f'"{field.json_name}":'
    one = _value_writer(field)
    if _is_repeated(field):
        return lambda values: head + "[" + ",".join([one(value) for value in _items(values)]) + "]"
    return lambda value: head + one(value)


def _items(values: object) -> list[object]:
    return list(values)  # type: ignore[call-overload, no-any-return] # ListFields gives a container for a repeated field


def _value_writer(field: FieldDescriptor) -> Callable[..., str]:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return _write_message
    if field.type == FieldDescriptor.TYPE_STRING:
        return json_text
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _write_hex if field.name in _HEX_IDS else _write_base64
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return json_double
    if field.type == FieldDescriptor.TYPE_BOOL:
        return lambda value: "true" if value else "false"
    return '"{}"'.format if field.type in _INT64 else str


def _write_hex(value: bytes) -> str:
    return f'"{value.hex()}"'


def _write_base64(value: bytes) -> str:
    return f'"{base64.b64encode(value).decode("ascii")}"'


# --- reading


def decode_json(line: bytes) -> ExportMetricsServiceRequest:
    """One line as a request. Raises DecodeError that says where in the text, or at which key, it is wrong."""
    return decode_json_message(line, ExportMetricsServiceRequest)


def decode_json_message(text: bytes, message_type: type[M]) -> M:
    """As `decode_json`, for any OTLP message."""
    name = message_type.DESCRIPTOR.name
    try:
        document = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise DecodeError(f"not JSON at line {error.lineno} column {error.colno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise DecodeError(f"not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise DecodeError("JSON is nested too deeply") from error
    except ValueError as error:  # an integer with thousands of digits
        raise DecodeError(f"not JSON that can be read: {error}") from error
    try:
        return message_type(**_read_message(document, _readers(message_type.DESCRIPTOR), 0))
    except _Wrong as wrong:
        raise DecodeError(f"not an OTLP {name}: {wrong}") from wrong
    except (ValueError, TypeError) as error:  # what only protobuf sees: a lone surrogate in a text
        raise DecodeError(f"not an OTLP {name}: {error}") from error


class _Wrong(Exception):  # noqa: N818 - never leaves this module
    """A value that does not fit; `path` grows from the inside out."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.path = ""

    def at(self, key: str) -> _Wrong:
        """The same, one level further out."""
        self.path = key + ("." if self.path and not self.path.startswith("[") else "") + self.path
        return self

    def __str__(self) -> str:
        return f"{self.path or 'document'}: {self.message}"


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} must stand in quotes")


@dataclass(frozen=True, slots=True)
class _Reader:
    """How a field is read: `name` is protobuf's; `message` is set for nested messages, else `scalar`."""

    name: str
    repeated: bool
    scalar: Callable[[object], object]
    message: Descriptor | None = None


@cache
def _readers(descriptor: Descriptor) -> Mapping[str, _Reader]:
    """For each key as JSON spells it: how its value is read."""
    return {field.json_name: _reader(field) for field in descriptor.fields}


def _reader(field: FieldDescriptor) -> _Reader:
    nested = field.message_type if field.type == FieldDescriptor.TYPE_MESSAGE else None
    return _Reader(field.name, _is_repeated(field), _scalar_reader(field), nested)


def _read_message(value: object, readers: Mapping[str, _Reader], depth: int) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _Wrong(f"must be an object, not {_shown(value)}")
    if depth > MAX_DEPTH:
        raise _Wrong(f"is nested deeper than {MAX_DEPTH} levels")
    fields: dict[str, object] = {}
    for key, inner in value.items():
        reader = readers.get(key)
        if reader is None or inner is None:  # unknown keys are ignored, null is the default
            continue
        try:
            fields[reader.name] = (
                _read_list(inner, reader, depth) if reader.repeated else _read_one(inner, reader, depth)
            )
        except _Wrong as wrong:
            raise wrong.at(key) from None
    return fields


def _read_one(value: object, reader: _Reader, depth: int) -> object:
    if reader.message is None:
        return reader.scalar(value)
    return _read_message(value, _readers(reader.message), depth + 1)


def _read_list(value: object, reader: _Reader, depth: int) -> list[object]:
    if not isinstance(value, list):
        raise _Wrong(f"must be a list, not {_shown(value)}")
    items: list[object] = []
    if reader.message is None:
        read, inside = reader.scalar, None
    else:
        read, inside = reader.scalar, _readers(reader.message)
    for item in value:
        try:
            items.append(read(item) if inside is None else _read_message(item, inside, depth + 1))
        except _Wrong as wrong:
            raise wrong.at(f"[{len(items)}]") from None
    return items


def _scalar_reader(field: FieldDescriptor) -> Callable[[object], object]:
    if field.type == FieldDescriptor.TYPE_STRING:
        return _read_text
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _read_hex if field.name in _HEX_IDS else _read_base64
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return _read_double
    if field.type == FieldDescriptor.TYPE_BOOL:
        return _read_bool
    if field.type == FieldDescriptor.TYPE_ENUM:
        return _read_enum
    bits, signed = (64, _INT64[field.type]) if field.type in _INT64 else (32, _INT32.get(field.type, True))
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return lambda value: _read_int(value, low, high)


def _read_int(value: object, low: int, high: int) -> int:
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        number = int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    else:
        raise _Wrong(f"must be an integer, not {_shown(value)}")
    if not low <= number <= high:
        raise _Wrong(f"is out of range: {_shown(value)}")
    return number


def _read_enum(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and -(1 << 31) <= value < 1 << 31:
        return value
    raise _Wrong(f"must be the enum's number, not {_shown(value)}")


def _read_double(value: object) -> float:
    if isinstance(value, float) and math.isfinite(value):  # 1e999 is read as infinity
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    if isinstance(value, str):
        if value in _FLOAT_WORDS:
            return _FLOAT_WORDS[value]
        if value.isascii() and value.strip() == value and "_" not in value:
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if math.isfinite(number):
                return number
    raise _Wrong(f"must be a number, not {_shown(value)}")


def _read_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise _Wrong(f"must be true or false, not {_shown(value)}")


def _read_text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise _Wrong(f"must be a text, not {_shown(value)}")


def _read_hex(value: object) -> bytes:
    try:
        return bytes.fromhex(_read_text(value))
    except ValueError:
        raise _Wrong(f"must be hexadecimal, not {_shown(value)}") from None


def _read_base64(value: object) -> bytes:
    text = _read_text(value).replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise _Wrong(f"must be base64, not {_shown(value)}") from None


def _shown(value: object) -> str:
    """The value as JSON, short enough for a message."""
    text = json.dumps(value) if not isinstance(value, dict | list) else ("an object", "a list")[isinstance(value, list)]
    return text if len(text) <= 40 else text[:40] + "..."


# --- recordings


DEPARTED_KEY: Final = "gpulens.departed"
"""Scope attribute of a recording's scopes that only say, for other readers, which series have left."""

TIME_KEY: Final = "gpulens.time"
"""Scope attribute with the time of a batch that has no points to say it (ns since 1970)."""


def mark_time(request: ExportMetricsServiceRequest, time_ns: int) -> None:
    """Writes the time of an empty batch on its only scope."""
    request.resource_metrics[0].scope_metrics[0].scope.attributes.add(key=TIME_KEY).value.int_value = time_ns


def marked_time(request: ExportMetricsServiceRequest) -> int | None:
    """The time that an empty batch was marked with; None where there is none."""
    for resource_metrics in request.resource_metrics:
        for part in resource_metrics.scope_metrics:
            for pair in part.scope.attributes:
                if pair.key == TIME_KEY and pair.value.int_value > 0:
                    return pair.value.int_value
    return None


def mark_departed(resource_metrics: bytes) -> bytes:
    """An encoded ResourceMetrics with every scope marked as saying only what left."""
    message = ResourceMetrics.FromString(resource_metrics)
    for part in message.scope_metrics:
        part.scope.attributes.add(key=DEPARTED_KEY).value.bool_value = True
    return message.SerializeToString()


def strip_departed(request: ExportMetricsServiceRequest) -> None:
    """Takes the marked scopes out of a recording's line: its complete batches say the same by leaving
    series out."""
    for resource_metrics in request.resource_metrics:
        kept = [part for part in resource_metrics.scope_metrics if not _is_departed(part)]
        if len(kept) < len(resource_metrics.scope_metrics):
            del resource_metrics.scope_metrics[:]
            resource_metrics.scope_metrics.extend(kept)


def _is_departed(part: ScopeMetrics) -> bool:
    return any(pair.key == DEPARTED_KEY and pair.value.bool_value for pair in part.scope.attributes)
