"""Field types of component configurations, used directly and through YAML."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gpulens.config.types import Secret
from tests.config.fakes import Batch, IdleConfig, OtlpConfig, Queue, ScrapeConfig, exporter


def test_optional_blocks_are_off_when_absent_and_on_when_empty() -> None:
    """Absent is off; `{}` and null are on with defaults; `enabled` decides when it is there."""

    def batch(body: str) -> Batch | None:
        queue = exporter(f"{{endpoint: x, sending_queue: {body}}}").sending_queue
        return queue.batch if queue is not None else None

    assert batch("{}") is None
    assert batch("{batch: }") == batch("{batch: {}}") == batch("{batch: {enabled: true}}") == Batch()
    assert batch("{batch: {enabled: false, min_size: 1}}") is None
    assert batch("{batch: {min_size: 1}}") == Batch(min_size=1)


def test_a_switch_must_be_a_boolean() -> None:
    """`enabled: "false"` is a text, and is not taken for a switch."""
    with pytest.raises(ValidationError, match="valid boolean"):
        OtlpConfig.model_validate({"endpoint": "x", "sending_queue": {"enabled": "false"}})


def test_a_wrong_switch_hides_nothing() -> None:
    """What else is wrong in the block, and in a block in it, is found together with the switch."""
    queue = {"enabled": 1, "queue_size": "many", "num_consumers": 0, "batch": {"enabled": "no", "flush_timeout": 5}}
    with pytest.raises(ValidationError) as raised:
        OtlpConfig.model_validate({"endpoint": "x", "sending_queue": queue})
    found = {error["loc"][1:]: error["msg"] for error in raised.value.errors()}
    assert list(found) == [
        ("enabled",),
        ("num_consumers",),
        ("queue_size",),
        ("batch", "enabled"),
        ("batch", "flush_timeout"),
    ]
    assert "5 has no unit" in found["batch", "flush_timeout"]
    assert found["num_consumers",] == "Value error, `num_consumers` must be positive"


def test_null_for_a_block_with_defaults_keeps_it() -> None:
    """`sending_queue:` with nothing after it is the default queue."""
    assert OtlpConfig.model_validate({"endpoint": "x", "sending_queue": None}).sending_queue == Queue()


@pytest.mark.parametrize(
    "wrong",
    [{"window": "1"}, {"window": True}, {"include": [1]}, {"labels": {"a": 1}}, {"level": "LOW"}, {"on_end": 1}],
)
def test_models_take_no_scalar_for_another(wrong: dict[str, object]) -> None:
    """Strictness holds for models built from plain values, too."""
    with pytest.raises(ValidationError):
        ScrapeConfig.model_validate(wrong)


def test_lists_become_tuples_and_texts_become_enums() -> None:
    """Containers and enums are converted, since YAML has only one kind of each."""
    config = ScrapeConfig.model_validate({"include": ["a"], "on_end": "wait", "window": 2})
    assert (config.include, config.on_end.value, config.window) == (("a",), "wait", 2.0)
    assert IdleConfig.model_validate({"windows": ["5m", "2h"]}).windows == (300.0, 7200.0)


def test_zero_needs_no_unit() -> None:
    """0 is the one bare number that means the same everywhere."""
    assert OtlpConfig.model_validate({"endpoint": "x", "timeout": 0}).timeout == 0.0


def test_secrets_never_show() -> None:
    """Neither the secret nor a config that holds it shows the text; `reveal` does."""
    config = exporter("{endpoint: x, headers: {authorization: '${TOKEN}'}}", {"TOKEN": "12345"})
    secret = config.headers["authorization"]
    assert secret.reveal() == "12345"
    assert secret == Secret("12345")
    assert "12345" not in f"{secret} {secret!r} {config!r} {config} {config.model_dump()} {config.model_dump_json()}"
    assert OtlpConfig(endpoint="x", headers={"a": Secret("b")}).headers["a"].reveal() == "b"


def test_configurations_are_frozen() -> None:
    """A component can't change its configuration."""
    with pytest.raises(ValidationError, match="frozen"):
        ScrapeConfig().window = 2.0  # type: ignore[misc]
