"""The `nvml:` block, and the environment that follows from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

import gpulens
from gpulens.nvml.launch import environment
from gpulens.nvml.protocol import Tier
from gpulens.receivers.nvml.config import NvmlConfig
from gpulens.receivers.nvml.trouble import explain


def test_every_key_has_a_default() -> None:
    """`nvml: {}` is a whole block; each tier has its interval, a tick its deadline."""
    config = NvmlConfig.model_validate({})
    assert [config.interval_of(tier) for tier in Tier] == [10, 15, 30, 60]
    assert config.patience_of(Tier.FAST) == 5
    assert NvmlConfig.model_validate({"timeout": 0}).patience_of(Tier.ERRORS) == 30


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"process_interval": "0s"}, "'process_interval' must be positive"),
        ({"collection_interval": "-1s"}, "'collection_interval' must be positive"),
        ({"call_timeout": "0s"}, "'call_timeout' must be positive"),
        ({"host_proc": "proc"}, "whole path"),
        ({"library_path": ["lib64"]}, "whole paths"),
        ({"library_path": ["/a:/b"]}, "whole paths"),
        ({"host_pid": "maybe"}, "'auto', 'true' or 'false'"),
    ],
)
def test_wrong_values_are_refused(block: dict[str, object], words: str) -> None:
    """Each with what it must be."""
    with pytest.raises(ValidationError, match=words):
        NvmlConfig.model_validate(block)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("gpu.sm.actve", "did you mean gpu.sm.active?"),
        ("hw.gpu.utilisation*", "did you mean hw.gpu.utilization?"),
        ("gpu.xid.*", "no effect on gpu.xid.errors, which is always told"),
        ("zzz", 'names "zzz", and no metric of this receiver is called so'),
        ("gpu.sm.*", ""),
        ("hw.*", ""),
    ],
)
def test_a_drop_that_drops_nothing_is_told(pattern: str, words: str) -> None:
    """With the nearest name; a pattern that fits a metric is fine."""
    doubts = NvmlConfig.model_validate({"drop": [pattern]}).doubts()
    assert len(doubts) == bool(words)
    assert not words or words in doubts[0]


@pytest.mark.parametrize(("given", "taken"), [(True, "true"), (False, "false"), ("auto", "auto"), ("true", "true")])
def test_host_pid_is_a_switch_with_a_third_position(given: object, taken: str) -> None:
    """YAML's true and the text are the same."""
    assert NvmlConfig.model_validate({"host_pid": given}).host_pid == taken


def test_the_child_finds_the_library_and_our_package(tmp_path: Path) -> None:
    """Named folders come before what was there; everything else is inherited."""
    env = environment({"LD_LIBRARY_PATH": "/x", "PYTHONPATH": "/y", "HOME": "/root"}, [str(tmp_path)])
    assert env["LD_LIBRARY_PATH"] == f"{tmp_path}{os.pathsep}/x"
    assert env["PYTHONPATH"] == f"{Path(gpulens.__file__).parent.parent}{os.pathsep}/y"
    assert env["HOME"] == "/root"


def test_an_unknown_trouble_is_told_in_the_process_own_words() -> None:
    """Nothing is made up."""
    assert explain("error", 23, "no resources") == "NVML can't be used: no resources"
    assert "does not say why" in explain("", 0, "")
