from __future__ import annotations

import pytest

from lorahost.environment import OPTION_FLAGS, EngineFlags, engine_flags, flag_value, tokens


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("max-model-len", "4096", ["--max-model-len", "4096"]),
        ("enforce-eager", "true", ["--enforce-eager"]),
        ("enforce-eager", "True", ["--enforce-eager"]),
        ("enforce-eager", "", ["--enforce-eager"]),
        ("enforce-eager", "false", []),
        ("enforce-eager", "FALSE", []),
        ("lora-modules", '["a=/x", "b=/y"]', ["--lora-modules", "a=/x", "b=/y"]),
        ("lora-modules", ' ["a=/x"] ', ["--lora-modules", "a=/x"]),
        ("cudagraph-capture-sizes", "[1, 2, 4]", ["--cudagraph-capture-sizes", "1", "2", "4"]),
        ("lora-modules", "[]", []),
        ("lora-modules", '[{"name": "a"}, {"name": "b"}]', ["--lora-modules", '{"name": "a"}', '{"name": "b"}']),
        ("hf-overrides", '{"a": [1, 2], "b": "} {"}', ["--hf-overrides", '{"a": [1, 2], "b": "} {"}']),
        ("lora-modules", '{"name": "a"} {"name": "b"}', ["--lora-modules", '{"name": "a"}', '{"name": "b"}']),
        ("lora-modules", '{"a": 1}{"b": 2}\n{"c": 3}', ["--lora-modules", '{"a": 1}', '{"b": 2}', '{"c": 3}']),
        ("chat-template", "{{ messages }}", ["--chat-template", "{{ messages }}"]),
        ("chat-template", '{"a": 1} {broken', ["--chat-template", '{"a": 1} {broken']),
        ("dtype", "[unclosed", ["--dtype", "[unclosed"]),
        ("served-model-name", "two words", ["--served-model-name", "two words"]),
    ],
)
def test_one_value_as_tokens(flag: str, value: str, expected: list[str]) -> None:
    assert tokens(flag, value) == expected


def test_names_become_flags_in_a_stable_order() -> None:
    flags = engine_flags(
        {"SM_VLLM_MAX_MODEL_LEN": "4096", "SM_VLLM_ENFORCE_EAGER": "true", "OPTION_MAX_LORAS": "8", "PATH": "/bin"}
    )
    assert flags == EngineFlags(
        tokens=("--enforce-eager", "--max-loras", "8", "--max-model-len", "4096"),
        sources={
            "--enforce-eager": "SM_VLLM_ENFORCE_EAGER",
            "--max-loras": "OPTION_MAX_LORAS",
            "--max-model-len": "SM_VLLM_MAX_MODEL_LEN",
        },
    )


@pytest.mark.parametrize(
    ("option", "flag"),
    [
        ("OPTION_MAX_LORAS", "--max-loras"),
        ("OPTION_MAX_LORA_RANK", "--max-lora-rank"),
        ("OPTION_MAX_CPU_LORAS", "--max-cpu-loras"),
        ("OPTION_TENSOR_PARALLEL_DEGREE", "--tensor-parallel-size"),
        ("OPTION_MAX_MODEL_LEN", "--max-model-len"),
        ("OPTION_MAX_ROLLING_BATCH_SIZE", "--max-num-seqs"),
    ],
)
def test_the_names_that_lmi_users_know(option: str, flag: str) -> None:
    assert engine_flags({option: "8"}).tokens == (flag, "8")


def test_vllms_own_name_wins_over_lmis() -> None:
    flags = engine_flags({"OPTION_MAX_LORAS": "8", "SM_VLLM_MAX_LORAS": "4"})
    assert flags.tokens == ("--max-loras", "4")
    assert flags.sources == {"--max-loras": "SM_VLLM_MAX_LORAS"}


def test_vllms_false_wins_over_lmis_true() -> None:
    assert engine_flags({"OPTION_ENFORCE_EAGER": "true", "SM_VLLM_ENFORCE_EAGER": "false"}).tokens == ()


def test_unknown_option_names_are_listed_and_not_passed_on() -> None:
    flags = engine_flags({"OPTION_ROLLING_BATCH": "vllm", "OPTION_ENTRYPOINT": "x", "OPTION_DTYPE": "auto"})
    assert flags.unknown == ("OPTION_ENTRYPOINT", "OPTION_ROLLING_BATCH")
    assert flags.tokens == ("--dtype", "auto")


def test_what_the_host_reads_itself_is_neither_passed_on_nor_unknown() -> None:
    names = ("SM_VLLM_MODEL", "SM_VLLM_PORT", "SM_VLLM_HOST", "OPTION_MODEL_ID", "OPTION_ENABLE_LORA")
    assert engine_flags({**dict.fromkeys(names, "x"), "SM_VLLM_ENABLE_LORA": "true"}) == EngineFlags()


def test_every_lmi_name_stands_for_a_flag_of_vllm() -> None:
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.cli_args import FrontendArgs

    fields = set(AsyncEngineArgs.__dataclass_fields__) | set(FrontendArgs.__dataclass_fields__)
    assert {flag for flag in OPTION_FLAGS.values() if flag.replace("-", "_") not in fields} == set()


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (["--tp", "2"], "2"),
        (["--eager", "--tp", "2", "--more"], "2"),
        (["--tp"], None),
        (["--tp", "--eager"], None),
        (["--eager"], None),
    ],
)
def test_what_follows_a_flag(line: list[str], value: str | None) -> None:
    assert flag_value(line, "--tp") == value
