"""YAML that would fill the memory, or never end, is refused before it is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.config.schema import check_plain, describe, options, recipes
from rlpost.errors import ConfigError

BOMB = "\n".join(
    ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)), "env.operations: *a9"]
)
HEAD = "command: train grpo\nmodel: tiny\n"
BAD = {
    "aliases of aliases": (BOMB, r"line 4: \*a0 stands for another place"),
    "itself": ("env.operations: &x [add, *x]", r"line 3: \*x stands for another place"),
    "depth": ("model: " + "[" * 100_000 + "]" * 100_000, "line 3: nested deeper than 20"),
    "length": ("# " + "x" * 1_000_001, "more than settings take"),
}


@pytest.mark.parametrize("way", BAD)
def test_a_recipe_that_grows_when_it_is_read_is_refused(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, said = BAD[way]
    Path("r.yaml").write_text(HEAD + text)
    with pytest.raises(ConfigError, match=said):
        compose(TRAIN_GRPO, ["recipe=./r.yaml"])


def test_a_file_of_conf_that_grows_when_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf/env").mkdir(parents=True)
    Path("conf/env/mine.yaml").write_text("defaults: [arithmetic_schema, _self_]\noperations: &x [add, *x]\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml, line 2: \*x stands for another place"):
        compose(TRAIN_GRPO, ["env=mine"])


@pytest.mark.parametrize("way", ["depth", "aliases of aliases"])
@pytest.mark.parametrize("place", ["[deep, _self_]", "[/env/deep, _self_]", "[{/env@_here_: deep}, _self_]"])
def test_a_file_that_a_file_of_conf_leads_on_to_is_refused_too(
    place: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf/env").mkdir(parents=True)
    Path("conf/env/mine.yaml").write_text(f"defaults: {place}\n")
    Path("conf/env/deep.yaml").write_text("defaults: [arithmetic_schema, _self_]\n\n" + BAD[way][0])
    with pytest.raises(ConfigError, match=r"deep\.yaml, " + BAD[way][1]):
        compose(TRAIN_GRPO, ["env=mine"])


def test_a_file_of_conf_beside_the_chosen_one_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf/env").mkdir(parents=True)
    Path("conf/env/deep.yaml").write_text("defaults: " + "[" * 100_000 + "]" * 100_000)
    Path("conf/env/bomb.yaml").write_text(BOMB.replace("env.operations", "defaults"))
    assert compose(TRAIN_GRPO, ["env=arithmetic"]).choices["env"] == "arithmetic"
    with pytest.raises(ConfigError, match=r"deep\.yaml, line 1: nested deeper than 20"):
        compose(TRAIN_GRPO, ["env=deep"])


def test_a_file_of_conf_that_cannot_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf/env").mkdir(parents=True)
    Path("conf/env/mine.yaml").write_bytes("# Größe\ndefaults: [arithmetic_schema, _self_]\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"mine\.yaml cannot be read: .*utf-8"):
        compose(TRAIN_GRPO, ["env=mine"])


def test_a_file_of_conf_copies_nothing_out_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf/env").mkdir(parents=True)
    text = 'defaults: [arithmetic_schema, _self_]\nprompt_template: "${ oc.env:SECRET } {question}"\n'
    Path("conf/env/mine.yaml").write_text(text)
    monkeypatch.setenv("SECRET", "s3cret")
    with pytest.raises(ConfigError, match=r"env\.prompt_template stands in conf/ and calls \$\{oc\.env:\.\.\.\}"):
        compose(TRAIN_GRPO, ["env=mine"])


def test_what_is_no_yaml_is_left_to_what_reads_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: [")
    check_plain(tmp_path / "a.yaml")
    with pytest.raises(FileNotFoundError):
        check_plain(tmp_path / "missing.yaml")


@pytest.mark.parametrize("defaults", ["3", "arithmetic_schema", "[[a, b], null, {null: null}]", "[{c: [d, e]}]"])
def test_defaults_that_lead_nowhere_are_named(defaults: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf/env").mkdir(parents=True)
    Path("conf/env/mine.yaml").write_text(f"defaults: {defaults}\n")
    with pytest.raises(ConfigError, match=r"conf/ does not compose|names no schema|defaults: is a list"):
        compose(TRAIN_GRPO, ["env=mine"])


@pytest.mark.parametrize(
    "text",
    [
        "defaults: [{a: {b: c}}]",
        "defaults: [{a: b, c: d}]",
        "5",
        "defaults: [mine]",
        "defaults: [other, _self_]",
        f"defaults: [arithmetic_schema, _self_]\nlimit: {'9' * 5000}",
        "defaults: [arithmetic_schema, _self_]\nlimit: !!timestamp 2024-99-99",
    ],
)
def test_a_file_of_conf_that_hydra_cannot_take_is_told_in_one_line(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf/env").mkdir(parents=True)
    Path("conf/env/mine.yaml").write_text(text + "\n")
    Path("conf/env/other.yaml").write_text("defaults: [mine, _self_]\n")  # and back again
    with pytest.raises(ConfigError, match=r"conf/ does not compose|names no schema"):
        compose(TRAIN_GRPO, ["env=mine"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("yes: 1", "True is no key"),
        ("0: 5", "0 is no key"),
        (f"seed: {'9' * 5000}", "cannot be read"),
        ("seed: !!int abc", "cannot be read"),
        ("seed: !!bool abc", "cannot be read"),
        ("seed: !!timestamp abc", "cannot be read"),
        ("model.chat_template_kwargs: {a: !!binary YQ==}", "cannot be read"),
    ],
)
def test_a_line_that_yaml_cannot_make_a_value_of_is_told(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(HEAD + line + "\n")
    with pytest.raises(ConfigError, match=rf"r\.yaml.*{said}"):
        compose(TRAIN_GRPO, ["recipe=./r.yaml"])


def test_what_editors_leave_in_conf_and_recipes_is_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (Path("conf/env"), Path("recipes")):
        folder.mkdir(parents=True)
        (folder / ".#mine.yaml").symlink_to("user@host.1")
        (folder / ".old.yaml").write_text("defaults: [arithmetic_schema, _self_]\n")
        (folder / "folder.yaml").mkdir()
        (folder / "latin.yaml").write_bytes(b"# \xe9\ndefaults: [arithmetic_schema, _self_]\n")
    odd = {"folder", ".old", ".#mine"}
    assert not odd & ({*options("env")} | {*recipes()})
    assert "\ufffd" in describe("env", "latin")


def test_a_conf_that_links_to_itself_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf").symlink_to("conf")
    Path("recipes").symlink_to("recipes")
    assert recipes()
    assert compose(TRAIN_GRPO).choices["env"] in options("env")
