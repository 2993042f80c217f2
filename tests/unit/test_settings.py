from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lorahost.environment import engine_flags
from lorahost.errors import InvalidRequestError
from lorahost.settings import ModelChoice, Settings, known_variables, load_settings
from lorahost.start_log import shown_environment


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = load_settings({})
    assert (settings.host, settings.port, settings.engine, settings.lora) == ("0.0.0.0", 8080, "vllm", True)
    assert settings.lmi_max_new_tokens == 30
    assert settings.adapter_roots == []
    assert settings.threads == settings.max_running + settings.max_queued + settings.spare_threads


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAHOST_MAX_RUNNING", "7")
    assert load_settings().max_running == 7


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("LORAHOST_MAX_QUEUED", "0", "max_queued", 0),
        ("LORAHOST_MAX_BODY_MB", "0.5", "max_body_mb", 0.5),
        ("LORAHOST_PROBE", "refuse", "probe", "refuse"),
        ("LORAHOST_ADAPTERS_DIR", "/srv/adapters", "adapters_dir", Path("/srv/adapters")),
        ("LORAHOST_ADAPTER_ROOTS", "/a:/b:", "adapter_roots", [Path("/a"), Path("/b")]),
        ("LORAHOST_TGI_COMPAT", "true", "tgi_compat", True),
        ("LORAHOST_MAX_QUEUED", "", "max_queued", 256),
        ("SM_VLLM_HOST", "127.0.0.1", "host", "127.0.0.1"),
        ("SAGEMAKER_ENABLE_STATEFUL_SESSIONS", "true", "sessions", True),
        ("SAGEMAKER_SESSIONS_EXPIRATION", "60", "session_ttl_s", 60),
        ("SM_VLLM_ENABLE_LORA", "false", "lora", False),
        ("OPTION_ENABLE_LORA", "false", "lora", False),
        ("SM_VLLM_ENABLE_LORA", "", "lora", True),
    ],
)
def test_values_from_their_variables(variable: str, text: str, field: str, value: Any) -> None:
    assert getattr(load_settings({variable: text}), field) == value


def test_the_port_that_the_platform_gives_loses_only_to_our_own() -> None:
    environ = {"SM_VLLM_PORT": "1001"}
    assert load_settings(environ).port == 1001
    environ["SAGEMAKER_BIND_TO_PORT"] = "1002"
    assert load_settings(environ).port == 1002
    environ["LORAHOST_PORT"] = "1003"
    assert load_settings(environ).port == 1003


@pytest.mark.parametrize(
    ("variable", "text", "limit"),
    [
        ("LORAHOST_PORT", "70000", "65535"),
        ("SAGEMAKER_BIND_TO_PORT", "http", "integer"),
        ("LORAHOST_MAX_RUNNING", "0", "greater than or equal to 1"),
        ("LORAHOST_PROBE", "loud", "'off', 'warn' or 'refuse'"),
        ("LORAHOST_DRAIN_S", "60", "25"),
        ("SM_VLLM_ENABLE_LORA", "perhaps", "boolean"),
    ],
)
def test_a_bad_value_is_refused_with_name_value_and_limit(variable: str, text: str, limit: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        load_settings({variable: text})
    assert refused.value.code == "bad_setting"
    assert f"{variable}={text!r}" in refused.value.message
    assert limit in refused.value.message


def test_all_bad_values_are_named_at_once() -> None:
    with pytest.raises(InvalidRequestError, match=r"LORAHOST_PORT='x'.*LORAHOST_STALL_S='-1'"):
        load_settings({"LORAHOST_PORT": "x", "LORAHOST_STALL_S": "-1"})


def test_unknown_names_are_refused_with_what_was_meant() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        load_settings({"LORAHOST_MAX_RUNING": "8", "LORAHOST_COLOUR": "red", "OTHER": "1"})
    assert refused.value.code == "unknown_setting"
    assert "LORAHOST_MAX_RUNING (did you mean LORAHOST_MAX_RUNNING?)" in refused.value.message
    assert "LORAHOST_COLOUR," in refused.value.message


def test_the_variable_of_the_client_does_not_stop_the_server() -> None:
    assert load_settings({"LORAHOST_URL": "http://localhost:9000"}) == load_settings({})


def test_settings_are_read_only() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings({}).port = 1  # type: ignore[misc]


def test_every_field_has_a_description_and_a_variable() -> None:
    assert set(known_variables().values()) == set(Settings.model_fields)
    assert [n for n, f in Settings.model_fields.items() if not f.description] == []
    assert [v for v in known_variables() if not v.startswith(("LORAHOST_", "SAGEMAKER_", "SM_VLLM_", "OPTION_"))] == []


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_the_ladder_of_base_models(mounted: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    environ = {"HF_MODEL_ID": "org/hub"}
    empty = tmp_path_factory.mktemp("empty")
    assert ModelChoice(environ, empty).source == "HF_MODEL_ID"
    environ["OPTION_MODEL_ID"] = "org/option"
    assert ModelChoice(environ, empty).source == "OPTION_MODEL_ID"
    assert ModelChoice(environ, mounted).model == str(mounted)
    environ["SM_VLLM_MODEL"] = "org/first"
    choice = ModelChoice(environ, mounted)
    assert (choice.model, choice.source, choice.name) == ("org/first", "SM_VLLM_MODEL", "first")


def test_a_model_folder_with_adapters_only_is_not_the_base(tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    assert ModelChoice({"HF_MODEL_ID": "org/hub"}, tmp_path).model == "org/hub"


def test_no_base_model_at_all(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        ModelChoice({"SM_VLLM_MODEL": ""}, tmp_path)
    assert refused.value.code == "no_model"
    assert str(tmp_path) in refused.value.message
    assert "SM_VLLM_MODEL" in refused.value.message


def test_the_mounted_model_has_no_folder_name_worth_showing() -> None:
    assert ModelChoice({"SM_VLLM_MODEL": "/opt/ml/model"}).name == "base"
    assert ModelChoice({"SM_VLLM_MODEL": "/models/qwen/"}).name == "qwen"


def test_secrets_do_not_reach_the_log() -> None:
    environ = {
        "SM_VLLM_HF_TOKEN": "hf_verysecret",
        "SM_VLLM_API_KEY": '["key-one", "key-two"]',
        "SM_VLLM_TOKENIZER": "org/tokens",
        "SM_VLLM_MAX_NUM_BATCHED_TOKENS": "512",
        "SM_VLLM_SPECULATIVE_CONFIG": '{"model": "m", "api_key": "inner", "more": [{"password": "deep"}], "key": 3}',
        "SM_VLLM_OTLP_TRACES_ENDPOINT": "http://me:pass@host/x",
        "LORAHOST_S3_ENDPOINT_URL": "http://user:pass@store:9000",
        "OPTION_NONSENSE": "1",
    }
    # the key would stop the start: what has come this far must not show it all the same
    taken = {name: value for name, value in environ.items() if name != "SM_VLLM_API_KEY"}
    shown = shown_environment(load_settings(taken), engine_flags(environ))
    text = json.dumps(shown)
    for secret in ("verysecret", "key-one", "key-two", "inner", "deep", "pass@"):
        assert secret not in text
    pairs = dict(zip(shown["vllm"], shown["vllm"][1:], strict=False))
    assert pairs["--hf-token"] == "***"
    assert pairs["--tokenizer"] == "org/tokens"
    assert pairs["--max-num-batched-tokens"] == "512"
    assert json.loads(pairs["--speculative-config"]) == {
        "model": "m",
        "api_key": "***",
        "more": [{"password": "***"}],
        "key": 3,
    }
    assert shown["settings"]["s3_endpoint_url"] == "http://***@store:9000"
    assert shown["settings"]["lmi_max_new_tokens"] == 30
    assert shown["unknown"] == ["OPTION_NONSENSE"]
