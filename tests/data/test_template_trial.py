"""Chat templates that take too much are refused before anything is rendered with them."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from rlpost.data.template_choice import named_template, own_templates
from rlpost.data.template_trial import greed_of
from rlpost.errors import ConfigError
from rlpost.model.load import load_tokenizer

MUCH = {
    "nested loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 5 s"),
    "a long product": ("{{ 'a' * 3000000000 }}", "more than 1 GiB of memory"),
    "a long product unseen": ("{% set x = 'a' * 3000000000 %}{{ messages[0].content }}", "more than 1 GiB of memory"),
    "a wide field": ("{{ 'a' | center(3000000000) }}", "more than 1 GiB of memory"),
    "doubling": (
        "{% set n = namespace(x='a') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "more than 1 GiB of memory",
    ),
    "a long text": ("{{ 'a' * 30000000 }}", "writes more than 1,000,000 characters"),
    "only behind tools": ("{% if tools %}{{ 'a' * 3000000000 }}{% endif %}", "more than 1 GiB of memory"),
    "a deep expression": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deep"),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deep"),
    "a long template": ("a" * 1_000_001, "longer than 1,000,000 characters"),
}


@pytest.mark.parametrize("name", MUCH)
def test_a_template_that_takes_too_much_is_refused(name: str) -> None:
    template, found = MUCH[name]
    began = time.monotonic()
    assert found in (greed_of(template) or "")
    assert time.monotonic() - began < 100


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }}", "{% for", "{{ raise_exception('no') }}", "{{ 1/0 }}"]
)
def test_one_that_takes_little_or_only_fails_is_left_to_what_renders_with_it(template: str) -> None:
    assert greed_of(template) is None


@pytest.mark.parametrize("said", [5, [{"name": "default", "template": 5}], {"default": None}])
def test_a_model_whose_template_is_no_text_is_refused_by_name(said: object, tmp_path: Path, tiny_folder: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": said}))
    with pytest.raises(ConfigError, match=r"the chat template of model is no text.*tokenizer_config\.json"):
        load_tokenizer(folder)


def test_no_template_of_our_own_takes_too_much() -> None:
    assert len(own_templates()) > 5
    assert [greed_of(template) for template in own_templates()] == [None] * len(own_templates())


def test_a_model_and_a_file_with_such_a_template_are_refused_by_name(tmp_path: Path, tiny_folder: Path) -> None:
    template, _ = MUCH["a long product"]
    file = tmp_path / "greedy.jinja"
    file.write_text(template)
    with pytest.raises(ConfigError, match=r"model\.chat_template=.*greedy\.jinja takes more than 1 GiB of memory"):
        named_template(str(file))
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match="the chat template of model takes more than 1 GiB of memory"):
        load_tokenizer(folder)
