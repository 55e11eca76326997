from __future__ import annotations

import json
import math
import struct

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Exemplar, NumberDataPoint, ResourceMetrics

from gpulens.pipeline.errors import DecodeError
from gpulens.pipeline.otlp_json import (
    MAX_DEPTH,
    decode_json,
    decode_json_message,
    encode_json,
    mark_departed,
    strip_departed,
)

U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def points(draw: st.DrawFn) -> NumberDataPoint:
    """A point of any value, with attributes of the common types."""
    point = NumberDataPoint(time_unix_nano=draw(U64), start_time_unix_nano=draw(U64), flags=draw(st.integers(0, 1)))
    kind = draw(st.sampled_from(["int", "double", "none"]))
    if kind == "int":
        point.as_int = draw(I64)
    elif kind == "double":
        point.as_double = draw(st.floats(allow_nan=False))
    for key in draw(st.lists(TEXT, max_size=3)):
        value = point.attributes.add(key=key).value
        match draw(st.integers(0, 5)):
            case 0:
                value.string_value = draw(TEXT)
            case 1:
                value.int_value = draw(I64)
            case 2:
                value.bytes_value = draw(st.binary(max_size=9))
            case 3:
                value.array_value.values.add().double_value = draw(st.floats(allow_nan=False))
            case 4:
                value.kvlist_value.values.add(key="k").value.bool_value = draw(st.booleans())
            case _:
                pass
    return point


@st.composite
def requests(draw: st.DrawFn) -> ExportMetricsServiceRequest:
    """A request with gauges and sums."""
    request = ExportMetricsServiceRequest()
    for _ in range(draw(st.integers(0, 2))):
        resource_metrics = request.resource_metrics.add(schema_url=draw(TEXT))
        scope_metrics = resource_metrics.scope_metrics.add()
        scope_metrics.scope.name = draw(TEXT)
        metric = scope_metrics.metrics.add(name=draw(TEXT), unit=draw(TEXT))
        if draw(st.booleans()):
            metric.gauge.data_points.extend(draw(st.lists(points(), max_size=3)))
        else:
            metric.sum.aggregation_temporality = draw(st.integers(0, 2))  # type: ignore[assignment] # a number is fine
            metric.sum.is_monotonic = draw(st.booleans())
            metric.sum.data_points.extend(draw(st.lists(points(), max_size=3)))
    return request


@given(requests())
def test_what_is_written_reads_back(request: ExportMetricsServiceRequest) -> None:
    """Every message comes back bit by bit, from one line of ASCII."""
    line = encode_json(request)
    assert decode_json(line).SerializeToString(deterministic=True) == request.SerializeToString(deterministic=True)
    assert line.isascii()
    assert b"\n" not in line
    assert encode_json(request.SerializeToString()) == line


@given(requests())
def test_protobufs_own_json_agrees(request: ExportMetricsServiceRequest) -> None:
    """Protobuf's JSON (enums as integers) says the same, and each side reads the other's."""
    theirs = json_format.MessageToDict(request, use_integers_for_enums=True)
    assert json.loads(encode_json(request)) == theirs
    assert decode_json(json.dumps(theirs).encode()) == request


def test_a_line_looks_as_the_specification_says() -> None:
    """Keys are lowerCamelCase, 64-bit integers and odd doubles are texts, enums are numbers, bytes are
    base64."""
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="m")
    metric.sum.aggregation_temporality = 2  # type: ignore[assignment] # a number is fine
    for value in (1.5, math.nan, math.inf, -math.inf):
        metric.sum.data_points.add(time_unix_nano=1, as_double=value)
    point = metric.sum.data_points.add(as_int=-5)
    point.attributes.add(key="b").value.bytes_value = b"\xff\xee"
    exemplar = point.exemplars.add(trace_id=bytes(15) + b"\xab", span_id=b"\x01" * 8)
    exemplar.as_int = 7
    assert encode_json(request) == (
        b'{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{"name":"m","sum":{"dataPoints":['
        b'{"timeUnixNano":"1","asDouble":1.5},{"timeUnixNano":"1","asDouble":"NaN"},'
        b'{"timeUnixNano":"1","asDouble":"Infinity"},{"timeUnixNano":"1","asDouble":"-Infinity"},'
        b'{"exemplars":[{"spanId":"0101010101010101","traceId":"000000000000000000000000000000ab","asInt":"7"}],'
        b'"asInt":"-5","attributes":[{"key":"b","value":{"bytesValue":"/+4="}}]}'
        b'],"aggregationTemporality":2}}]}]}]}'
    )


def point_of(text: str) -> NumberDataPoint:
    """The only point of a line made around this text."""
    line = f'{{"resourceMetrics":[{{"scopeMetrics":[{{"metrics":[{{"gauge":{{"dataPoints":[{text}]}}}}]}}]}}]}}'
    return decode_json(line.encode()).resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"asInt":"9223372036854775807"}', NumberDataPoint(as_int=2**63 - 1)),
        ('{"asInt":-9223372036854775808}', NumberDataPoint(as_int=-(2**63))),
        ('{"timeUnixNano":1700000000000000001}', NumberDataPoint(time_unix_nano=1700000000000000001)),
        ('{"timeUnixNano":1e9}', NumberDataPoint(time_unix_nano=10**9)),
        ('{"asDouble":3}', NumberDataPoint(as_double=3.0)),
        ('{"asDouble":"2.5"}', NumberDataPoint(as_double=2.5)),
        ('{"asDouble":"-Infinity"}', NumberDataPoint(as_double=-math.inf)),
        ('{"asDouble":null,"asInt":"1"}', NumberDataPoint(as_int=1)),
        ('{"newField":[{"x":1}],"asInt":"1"}', NumberDataPoint(as_int=1)),
        ('{"as_int":"1","time_unix_nano":"1"}', NumberDataPoint()),
        ('{"exemplars":[{"traceId":"AbCd","spanId":""}]}', NumberDataPoint(exemplars=[Exemplar(trace_id=b"\xab\xcd")])),
    ],
)
def test_what_others_write_is_read(text: str, expected: NumberDataPoint) -> None:
    """Numbers for texts, unknown keys, nulls, either case of hexadecimal: all as the specification allows."""
    assert point_of(text) == expected


def test_the_sign_of_zero_survives() -> None:
    """-0.0 is another double than 0.0."""
    value = point_of('{"asDouble":-0.0}').as_double
    assert struct.pack("<d", value) == struct.pack("<d", -0.0)


def test_base64_is_read_in_both_alphabets() -> None:
    """URL-safe letters and missing padding are read too."""
    texts = ['"/+4="', '"_-4"', '"_-4="']
    found = [point_of(f'{{"attributes":[{{"key":"k","value":{{"bytesValue":{t}}}}}]}}') for t in texts]
    assert [point.attributes[0].value.bytes_value for point in found] == [b"\xff\xee"] * 3


AT_POINT = r"resourceMetrics\[0\]\.scopeMetrics\[0\]\.metrics\[0\]\.gauge\.dataPoints\[0\]"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"asInt":"1.5"}', rf"{AT_POINT}\.asInt: must be an integer, not \"1\.5\""),
        ('{"asInt":"1_000"}', "must be an integer"),
        ('{"asInt":true}', "must be an integer"),
        ('{"asInt":"9223372036854775808"}', "out of range"),
        ('{"timeUnixNano":"-1"}', rf"{AT_POINT}\.timeUnixNano: is out of range"),
        ('{"flags":4294967296}', "out of range"),
        ('{"asDouble":"one"}', "must be a number"),
        ('{"asDouble":1e999}', "must be a number"),
        ('{"asDouble":[]}', "not a list"),
        ('{"attributes":{}}', rf"{AT_POINT}\.attributes: must be a list, not an object"),
        ('{"attributes":[{"key":5}]}', rf"{AT_POINT}\.attributes\[0\]\.key: must be a text"),
        ('{"attributes":[{"value":{"boolValue":"true"}}]}', "must be true or false"),
        ('{"attributes":[{"value":{"bytesValue":"?"}}]}', "must be base64"),
        ('{"exemplars":[{"traceId":"xy"}]}', "must be hexadecimal"),
        ('{"attributes":[{"key":"\\ud800"}]}', "surrogate"),
        ("[]", rf"{AT_POINT}: must be an object, not a list"),
        ('{"asDouble":NaN}', "must stand in quotes"),
    ],
)
def test_wrong_values_say_where_they_stand(text: str, where: str) -> None:
    """The message names the path of the key and what should stand there."""
    with pytest.raises(DecodeError, match=where):
        point_of(text)


def test_an_enum_is_a_number() -> None:
    """Names of enums are not valid in OTLP's JSON."""
    line = '{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{"sum":{"aggregationTemporality":%s}}]}]}]}'
    metric = decode_json((line % "1").encode()).resource_metrics[0].scope_metrics[0].metrics[0]
    assert metric.sum.aggregation_temporality == 1
    with pytest.raises(DecodeError, match="must be the enum's number"):
        decode_json((line % '"AGGREGATION_TEMPORALITY_DELTA"').encode())


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"resourceMetrics":[}', "not JSON at line 1 column 21"),
        (b"", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"x":' + b"9" * 5000 + b"}", "can't be read|digits"),
        (b"5", "document: must be an object"),
    ],
)
def test_what_is_no_json_says_so(line: bytes, text: str) -> None:
    """Anything that is no JSON is a DecodeError with the place in the text."""
    with pytest.raises(DecodeError, match=text):
        decode_json(line)


def test_nesting_is_bounded() -> None:
    """Values nested deeper than protobuf itself reads are refused, not followed."""
    value = '{"arrayValue":{"values":[' * MAX_DEPTH + "{}" + "]}}" * MAX_DEPTH
    with pytest.raises(DecodeError, match="nested deeper than"):
        point_of(f'{{"attributes":[{{"key":"k","value":{value}}}]}}')


@given(st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
def test_any_bytes_are_a_request_or_a_decode_error(data: bytes) -> None:
    """Nothing but DecodeError ever comes out of hostile bytes."""
    try:
        request: ExportMetricsServiceRequest | None = decode_json(data)
    except DecodeError:
        request = None
    assert request is None or isinstance(request, ExportMetricsServiceRequest)


def test_other_messages_of_otlp_are_read_too() -> None:
    """Responses and log requests go through the same walk."""
    response = decode_json_message(b'{"partialSuccess":{"rejectedDataPoints":"3"}}', ExportMetricsServiceResponse)
    assert response.partial_success.rejected_data_points == 3
    logs = ExportLogsServiceRequest()
    record = logs.resource_logs.add().scope_logs.add().log_records.add(trace_id=b"\x0a" * 16)
    record.body.string_value = "xid"
    assert decode_json_message(encode_json(logs), ExportLogsServiceRequest) == logs


def test_bytes_that_are_no_request_are_refused() -> None:
    """Encoding takes bytes, but only those of a request."""
    with pytest.raises(DecodeError, match="ExportMetricsServiceRequest"):
        encode_json(b"\xff\xff")


def test_marked_departures_are_stripped() -> None:
    """What a recording says of departed series, for other readers, is left out again; the rest stays as it
    was."""
    request = ExportMetricsServiceRequest()
    kept = request.resource_metrics.add()
    kept.scope_metrics.add().metrics.add(name="stays")
    gone = ResourceMetrics()
    gone.scope_metrics.add().metrics.add(name="left")
    request.resource_metrics.append(ResourceMetrics.FromString(mark_departed(gone.SerializeToString())))
    request.resource_metrics[0].scope_metrics.append(request.resource_metrics[1].scope_metrics[0])
    strip_departed(request)
    assert [[part.metrics[0].name for part in each.scope_metrics] for each in request.resource_metrics] == [
        ["stays"],
        [],
    ]
