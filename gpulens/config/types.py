"""Field types and base classes for component configurations.

Invariant: what a user writes is taken at its word. Scalars are never converted (the text "true" is no
boolean, 5 is no string), unknown keys are errors, and a null keeps the default.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    PlainSerializer,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapSerializer,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError, core_schema

from gpulens.config.durations import format_duration, parse_duration

REDACTED: Final = "[REDACTED]"
UNREDACTED_CONTEXT: Final = "unredacted"
"""Serialization context key: true prints secrets."""

_STRICT_SCALARS = ("int", "float", "bool")


def _make_strict(schema: object) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in _STRICT_SCALARS:
            schema.setdefault("strict", True)
        for key, inner in schema.items():
            if key not in ("default", "metadata", "serialization"):
                _make_strict(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            _make_strict(inner)


class Block(BaseModel):
    """A map in the configuration with fixed keys; base of every nested block."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Makes scalars strict wherever they stand in the model, while lists still become tuples and texts
        enums."""
        schema = handler(source)
        _make_strict(schema)
        return schema

    def doubts(self) -> tuple[str, ...]:
        """What is valid and probably not meant: warnings. Each quotes the key it is about first ('timeout')."""
        return ()

    @model_validator(mode="before")
    @classmethod
    def _null_keeps_the_default(cls, data: object) -> object:
        """A null is the same as an absent key, except that it turns an optional block on."""
        if not isinstance(data, dict):
            return data
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        result: dict[str, object] = {}
        for key, value in data.items():
            field = fields.get(key)
            if value is not None or field is None:
                result[key] = value
            elif OPTIONAL in field.metadata and field.get_default() is None:
                result[key] = {}
        return result


class ComponentConfig(Block):
    """Base of every component's configuration.

    A field's validator that raises ValueError is reported at the value, a model's at the first key that its text
    quotes ('key' or `key`), else at the block. A model's validators run only once every field is right, so what
    concerns one key belongs to the field (see `gpulens.config.ranges`).
    """

    derives: ClassVar[bool] = False
    """Makes series of its own (idle): two pipelines that do so may not write into one exporter."""
    allocation_source: ClassVar[bool] = False
    """A receiver that says who holds which device."""
    names_owners_for: ClassVar[frozenset[str]] = frozenset()
    """Types of receivers that say who holds which device where this receiver is in the pipeline, too."""
    needs_allocation_source: ClassVar[bool] = False
    """A processor that has nothing to join without one; `resolve` warns."""

    def destination(self) -> str | None:
        """What this exporter writes to (endpoint, project, path); two exporters of one signal may not share
        it."""
        return None

    def tells_owners(self) -> bool:
        """Whether a receiver with this configuration says who holds which device."""
        return self.allocation_source

    def needs_extensions(self) -> tuple[tuple[str, str], ...]:
        """Extensions without which this block can't start: (path of the key that names it, as in
        `discovery::observer`; the extension's id)."""
        return ()


class OptionalMark:
    """Marks a block that can be off; one instance, `OPTIONAL`."""

    def __repr__(self) -> str:
        return "OPTIONAL"


OPTIONAL: Final = OptionalMark()

T = TypeVar("T")


SWITCH: Final = "enabled"
"""The key that turns such a block on and off."""


def _switch(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    if not isinstance(value, dict) or SWITCH not in value:
        return handler(value)
    enabled = value[SWITCH]
    rest = {key: inner for key, inner in value.items() if key != SWITCH}
    if enabled is False:
        return None  # off and cleared: what else stands in it does not matter
    if isinstance(enabled, bool | None):
        return handler(rest)
    wrong = [InitErrorDetails(type="bool_type", loc=(SWITCH,), input=enabled)]
    try:
        handler(rest)
    except ValidationError as error:
        wrong += [_again(details) for details in error.errors(include_url=False)]
    raise ValidationError.from_exception_data(SWITCH, wrong)


def _again(details: ErrorDetails) -> InitErrorDetails:
    """An error as the details to raise it with once more."""
    kind = PydanticCustomError(details["type"], details["msg"], details.get("ctx"))
    return InitErrorDetails(type=kind, loc=details["loc"], input=details["input"])


def _print_switch(value: object, handler: SerializerFunctionWrapHandler) -> object:
    return {"enabled": False} if value is None else handler(value)


OptionalBlock = Annotated[T | None, WrapValidator(_switch), WrapSerializer(_print_switch, when_used="json"), OPTIONAL]
"""A block that can be off. With the default None it is off when absent and on with its defaults for `{}` or
null; with a block as the default it is on. `enabled: false` inside turns it off either way. The block's own
class has no field `enabled`. For a block without defaults (`tls`) write `TLS | None = None` instead: null
leaves it off."""


def _read_duration(value: object) -> object:
    if isinstance(value, str):
        return parse_duration(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and value != 0:
        raise PydanticCustomError(
            "duration_without_unit",
            '{value} has no unit; the Collector would read it as {value} nanoseconds; write "{value}s"',
            {"value": value},
        )
    return value


Duration = Annotated[
    float,
    BeforeValidator(_read_duration),
    PlainSerializer(format_duration, return_type=str, when_used="json"),
]
"""Seconds; written as Go durations ("1m30s"). A bare number other than 0 is refused, since the Collector
takes it for nanoseconds. A default is given in seconds."""


def _read_list(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",")) if value else ()
    return tuple(value) if isinstance(value, list) else value


StringList = Annotated[tuple[str, ...], BeforeValidator(_read_list)]
"""Texts; a comma-separated text is taken too, as in the Collector."""


class Secret:
    """A text that never shows: not in repr, logs, errors, nor in print-config unless asked for."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The text itself, for the one call that sends it."""
        return self._value

    def __repr__(self) -> str:
        return REDACTED

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A strict string on the way in, `[REDACTED]` on the way out."""
        text = core_schema.str_schema(strict=True)
        return core_schema.no_info_wrap_validator_function(
            cls._validate,
            text,
            serialization=core_schema.plain_serializer_function_ser_schema(cls._serialize, info_arg=True),
        )

    @classmethod
    def _validate(cls, value: object, handler: ValidatorFunctionWrapHandler) -> Secret:
        return value if isinstance(value, Secret) else cls(handler(value))

    def _serialize(self, info: SerializationInfo) -> str:
        context = info.context
        return self._value if isinstance(context, dict) and context.get(UNREDACTED_CONTEXT) else REDACTED
