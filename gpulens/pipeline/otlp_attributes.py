"""Attributes in OTLP's form and ours: AnyValue of every type, both ways.

Invariant: a value comes back with its type (true is not 1, 1 is not 1.0, an empty list is not absent); a value
that is not set is None. Source: opentelemetry-proto 1.x, common/v1/common.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from gpulens.pipeline.data import Attributes, AttributeValue, KeyValues, attributes

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer


class HasAttributes(Protocol):
    """A message with a list of attributes: Resource, InstrumentationScope, NumberDataPoint."""

    @property
    def attributes(self) -> RepeatedCompositeFieldContainer[KeyValue]:
        """The list."""


def write_attributes(pairs: Attributes, target: HasAttributes) -> None:
    """Adds attributes to a Resource, InstrumentationScope or point."""
    for key, value in pairs:
        pair = target.attributes.add(key=key)
        if isinstance(value, str):
            pair.value.string_value = value
        else:
            pair.value.SetInParent()
            _write_value(value, pair.value)


def _write_value(value: AttributeValue, target: AnyValue) -> None:
    match value:
        case None:
            pass
        case str():
            target.string_value = value
        case bool():
            target.bool_value = value
        case int():
            target.int_value = value
        case float():
            target.double_value = value
        case bytes():
            target.bytes_value = value
        case tuple():
            target.array_value.SetInParent()
            for item in value:
                _write_value(item, target.array_value.values.add())
        case KeyValues():
            target.kvlist_value.SetInParent()
            for key, item in value.items:
                pair = target.kvlist_value.values.add(key=key)
                pair.value.SetInParent()
                _write_value(item, pair.value)


def read_attributes(pairs: Sequence[KeyValue]) -> Attributes:
    """Attributes sorted by key; the last of equal keys wins."""
    return attributes([(pair.key, _read_value(pair.value)) for pair in pairs])


def _read_value(value: AnyValue) -> AttributeValue:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "bytes_value":
            return value.bytes_value
        case "array_value":
            return tuple(_read_value(item) for item in value.array_value.values)
        case "kvlist_value":
            return KeyValues(read_attributes(value.kvlist_value.values))
        case _:  # not set, or a form that only profiles use
            return None
