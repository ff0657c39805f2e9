"""The configuration: which keys there are, where their values come from, and what names an experiment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from isostep import InputError
from isostep.cli import main
from isostep.config import EXCLUSIVE, Config, PipelineSchedule, expected_of, hash_of, keys, load
from isostep.config_page import reference
from isostep.schedule.generate import NAMES

KEYS: list[tuple[str, Any, str]] = [
    ("update.examples_per_update", 64, "32"),
    ("update.tokens_per_update", None, "5000"),
    ("update.objective", "causal-lm", "causal-lm"),
    ("update.last_group", "keep", "drop"),
    ("update.seed", 0, "1"),
    ("layout.replicas", None, "2"),
    ("layout.stages", 1, "2"),
    ("layout.schedule", "1f1b", "zb-v"),
    ("layout.chunks", None, "3"),
    ("layout.tokens_per_microbatch", 4096, "2048"),
    ("layout.examples_per_microbatch", None, "auto"),
    ("layout.overlap", True, "false"),
    ("layout.activation_checkpointing", False, "true"),
    ("precision.dtype", "float32", "bfloat16"),
    ("model.context_length", 384, "385"),
    ("model.width", 128, "256"),
    ("model.depth", 4, "5"),
    ("model.heads", 4, "8"),
    ("model.initial_seed", 0, "1"),
    ("data.source", "stdlib", "data.jsonl"),
    ("data.validation", None, "other.jsonl"),
    ("data.validation_percent", 5.0, "6"),
    ("data.too_long", "refuse", "cut"),
    ("optimizer.name", "adamw", "muon"),
    ("optimizer.learning_rate", 3e-3, "1e-3"),
    ("optimizer.weight_decay", 0.1, "0"),
    ("optimizer.betas", (0.9, 0.95), "[0.9, 0.99]"),
    ("optimizer.momentum", 0.95, "0.5"),
    ("optimizer.clip_norm", 1.0, "0"),
    ("optimizer.ema_decay", 0.0, "0.9"),
    ("schedule.shape", "cosine", "warmup-stable-decay"),
    ("schedule.unit", "updates", "examples"),
    ("schedule.warmup", None, "0"),
    ("schedule.decay", None, "5"),
    ("schedule.total", None, "100"),
    ("schedule.final_factor", 0.0, "0.5"),
    ("validation.every", 25, "0"),
    ("checkpoint.every", 25, "0"),
    ("checkpoint.keep", 2, "3"),
    ("run.dir", "runs/default", "runs/other"),
    ("run.epochs", 2, "3"),
    ("run.updates", None, "7"),
    ("run.purpose", "trial", "accepted"),
    ("run.track", (), "wandb"),
    ("run.x_axis", "updates", "examples"),
    ("run.timeline", False, "true"),
    ("run.timeout", 300.0, "60"),
    ("run.grace", 15.0, "0"),
    ("quality.axis", "supervised_tokens", "updates"),
    ("quality.metric", "validation_loss", "training_loss"),
    ("quality.accept_if", None, "< 2.0 at 2e6"),
]
"""Every key with its default and another value. People's files hold these: change them on purpose only."""

WHAT = ("update", "precision", "model", "optimizer", "schedule")
UNDER = {
    "optimizer.momentum": {"optimizer.name": "sgd"},
    "schedule.decay": {"schedule.shape": "warmup-stable-decay"},
}
"""Settings under which a key has an effect, where it has none by default."""


def value_of(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def written(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


def test_keys_and_defaults_are_these() -> None:
    assert [(key, value_of(Config(), key)) for key, _ in keys()] == [(key, default) for key, default, _ in KEYS]


def test_schedules_are_those_that_can_be_generated() -> None:
    assert get_args(PipelineSchedule) == NAMES


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ({"layout.activation_checkpointing": "[true]", "layout.stages": "2"}, "layout.activation_checkpointing"),
        ({"layout.schedule": "zb-9"}, "layout.schedule"),
        ({"layout.stages": "0"}, "layout.stages"),
    ],
)
def test_layouts_of_stages_that_cannot_be(flags: dict[str, str], refused: str) -> None:
    with pytest.raises(InputError, match=f"^{refused}: got "):
        load(None, flags)


def test_defaults_are_a_configuration() -> None:
    assert load() == Config() == Config.model_validate(Config().model_dump())


def test_the_reference_page_is_up_to_date() -> None:
    assert Path("docs/config.md").read_text(encoding="utf-8") == reference()


def test_every_key_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    words = capsys.readouterr().out.split()
    assert [key for key, _ in keys() if f"--{key.replace('_', '-')}" not in words] == []


def test_every_key_says_what_it_takes_and_means() -> None:
    for key, field in keys():
        assert field.description, key
        assert expected_of(field), key


# ---------------------------------------------------------------------------------------------- file and flags


@pytest.mark.parametrize(("key", "default", "other"), KEYS)
def test_a_flag_sets_its_key(key: str, default: Any, other: str) -> None:
    config = load(None, {key: other})
    assert (value_of(config, key) != default) == (key != "update.objective")
    left = {name for name, _ in keys() if value_of(config, name) != value_of(Config(), name)}
    assert left <= {key, EXCLUSIVE.get(key)}


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, '[run]\nepochs = 3\nupdates = 9\n[optimizer]\nname = "sgd"\nlearning_rate = 1\n')
    config = load(path, {"run.epochs": "4"})
    assert (config.run.epochs, config.run.updates, config.run.purpose) == (4, 9, "trial")
    assert (config.optimizer.name, config.optimizer.learning_rate) == ("sgd", 1.0)


@pytest.mark.parametrize(("key", "other"), EXCLUSIVE.items())
def test_a_flag_of_one_budget_replaces_the_other_of_the_file(tmp_path: Path, key: str, other: str) -> None:
    section, _, name = other.partition(".")
    path = written(tmp_path, f"[{section}]\n{name} = 700\n")
    assert (value_of(load(path), key), value_of(load(path), other)) == (None, 700)
    config = load(path, {key: "12"})
    assert (value_of(config, key), value_of(config, other)) == (12, None)


def test_a_flag_of_none_takes_a_value_away(tmp_path: Path) -> None:
    path = written(tmp_path, "[run]\nupdates = 9\n")
    assert load(path, {"run.updates": "none"}).run.updates is None


# -------------------------------------------------------------------------------------------- WHAT, HOW and RUN


def test_what_how_and_run_are_json_that_gives_the_configuration_back() -> None:
    config = load(None, {key: other for key, _, other in KEYS if EXCLUSIVE.get(key) is None})
    documents = config.what("c0"), config.how(2), config.about_run()
    what, how, run = json.loads(json.dumps(documents))
    assert (what, how, run) == documents
    assert run["data"].pop("validation_content_hash") == ""
    assert what.pop("data") == {"content_hash": "c0"}
    assert Config.model_validate({**what, "layout": how, **run}) == config


@pytest.mark.parametrize(("key", "default", "other"), KEYS)
def test_the_hash_changes_with_what_and_with_nothing_else(key: str, default: Any, other: str) -> None:
    under = UNDER.get(key, {})
    before, after = (hash_of(load(None, flags).what("c0")) for flags in (under, under | {key: other}))
    changes = key.partition(".")[0] in WHAT and key != "update.objective"
    assert (before != after) == changes


@pytest.mark.parametrize("key", UNDER)
def test_the_hash_does_not_change_with_a_key_that_has_no_effect(key: str) -> None:
    other = next(other for name, _, other in KEYS if name == key)
    assert hash_of(load(None, {key: other}).what("c0")) == hash_of(Config().what("c0"))


def test_the_hash_changes_with_the_data_wherever_they_lie() -> None:
    assert hash_of(Config().what("c0")) != hash_of(Config().what("c1"))
    assert hash_of(Config().what("c0")) == hash_of(load(None, {"data.source": "moved.jsonl"}).what("c0"))


def test_the_hash_of_the_defaults_is_this() -> None:
    """Ledgers hold it: another one keeps every run from resuming."""
    assert hash_of(Config().what("c0"))[:16] == "6d12d381089fa622"
