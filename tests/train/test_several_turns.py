"""GRPO over conversations of several turns: what is trained on is exactly what was sampled, turn after turn."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlpost import register_tool
from rlpost.catalog import EVAL, TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.data.conversation import Conversation
from rlpost.envs.base import ToolCall, ToolResult, ToolTransform
from rlpost.errors import ConfigError, DataError
from rlpost.model.tokenizer import load_tokenizer
from rlpost.policies import transformers
from rlpost.settings.base import TOOLS
from rlpost.settings.commands import RunRequest

OPEN: list[Any] = []  # tools that were started and not closed


class Echo(ToolTransform):
    """Answers every reply with how long it is: a model of random weights calls no tool."""

    def start(self) -> None:
        if self not in OPEN:
            OPEN.append(self)

    def close(self) -> None:
        if self in OPEN:
            OPEN.remove(self)

    def schemas(self) -> list[dict[str, Any]]:
        parameters = {"type": "object", "properties": {}}
        return [{"type": "function", "function": {"name": "echo", "description": "Echo.", "parameters": parameters}}]

    def calls_in(self, reply: str) -> list[ToolCall]:
        return [ToolCall("echo", {}, 0)]

    def call(self, conversation: Conversation, call: ToolCall) -> ToolResult:
        return ToolResult(f"{len(conversation.response_text)} characters")


@pytest.fixture(autouse=True)
def echo() -> Iterator[None]:
    register_tool("echo", Echo)
    yield
    del TOOLS["echo"]


WORDS = [
    "model=tiny",
    "policy=transformers",
    "model.autocast=none",
    "prompts_per_step=2",
    "group_size=3",
    "env.max_turns=3",
    "env.max_prompt_tokens=400",
    "env.max_completion_tokens=120",
    "tools.use=[echo]",
    "eval.enabled=false",
    "steps=2",
]


EVALUATED = [word for word in WORDS if word.startswith(("model=", "policy=", "env.", "tools."))]


def run(folder: Path, *words: str, resume: str | None = None) -> int:
    composed = compose(TRAIN_GRPO, [*WORDS, *words])
    request = RunRequest(folder, resume, composed.overrides, ["rlpost", "train", "grpo"], composed.yaml)
    return TRAIN_GRPO.train(composed.settings, request)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    register_tool("echo", Echo)
    folder = tmp_path_factory.mktemp("several") / "run"
    try:
        assert run(folder) == 0
    finally:
        del TOOLS["echo"]
    return folder


def test_sampler_and_trainer_agree_on_every_sampled_token_of_every_turn(trained: Path) -> None:
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line["turns/mean"] > 1
        assert line["tools/calls_mean"] == pytest.approx(line["turns/mean"] - 1)  # a last turn's calls are not run
        assert line["tools/errors_mean"] == 0
        assert line["sampler/logprob_gap"] < 1e-5


def test_the_mask_covers_exactly_what_the_model_said(trained: Path, tiny_tokenizer: Any) -> None:
    from rlpost.runs.rollouts import read_rollouts

    longest = 0
    for row in read_rollouts(trained, 2):
        said = [turn["content"] for turn in row["turns"] if turn["role"] == "assistant"]
        runs: list[list[int]] = []
        for place, (token, own) in enumerate(zip(row["token_ids"], row["mask"], strict=True)):
            if own and (place == 0 or not row["mask"][place - 1]):
                runs.append([])
            if own:
                runs[-1].append(token)
        assert [tiny_tokenizer.decode(ids, skip_special_tokens=True) for ids in runs] == said
        assert said[-1] == row["completion"]
        assert all(ids[-1] == tiny_tokenizer.eos_token_id for ids in runs[:-1])
        observed = [turn["content"] for turn in row["turns"] if turn["role"] == "user"]
        assert observed == [f"Tool echo executed successfully:\n{len(text)} characters" for text in said[:-1]]
        assert len(row["log_probs"]) == len(row["token_ids"])
        longest = max(longest, len(said))
    assert longest > 1


def test_the_model_is_shown_its_tools(trained: Path) -> None:
    from rlpost.runs.rollouts import read_rollouts

    assert '"name": "echo"' in read_rollouts(trained, 1)[0]["prompt"]


def test_what_tools_hold_is_given_back(trained: Path) -> None:
    assert OPEN == []


# earlier answers are cut short, as other templates remove thoughts
SHORTENS = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set said = m.content[:2] if m.role == 'assistant' and loop.index0 < ns.last else m.content -%}
{{- '<|im_start|>' + m.role + '\n' + said + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


@pytest.fixture(scope="module")
def as_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    register_tool("echo", Echo)
    folder = tmp_path_factory.mktemp("as_template")
    (folder / "shortens.jinja").write_text(SHORTENS)
    try:
        assert run(folder / "run", f"model.chat_template={folder / 'shortens.jinja'}", "loss=gspo") == 0
    finally:
        del TOOLS["echo"]
    return folder / "run"


def test_each_turn_is_sampled_behind_the_prompt_that_the_template_renders(
    as_template: Path, tiny_tokenizer: Any
) -> None:
    from rlpost.runs.rollouts import read_rollouts

    renderer = copy(tiny_tokenizer)
    renderer.chat_template = SHORTENS
    seen = 0
    for row in read_rollouts(as_template, 1):
        told = row["prompt"].partition("<|im_end|>")[0].removeprefix("<|im_start|>system\n")
        asked = row["prompt"].partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        said = [{"role": "user", "content": asked}, *row["turns"]]
        for start in row["restarts"]:
            before = row["mask"][:start]
            answered = sum(own and not earlier for earlier, own in pairwise([0, *before]))
            chat = [{"role": "system", "content": told}, *said[: 2 * answered + 1]]
            text = renderer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            prompt = renderer(text, add_special_tokens=False)["input_ids"]
            assert row["token_ids"][start : start + len(prompt)] == prompt
            assert not any(row["mask"][start : start + len(prompt)])
            seen += 1
    assert seen > 0


def test_sampler_and_trainer_agree_where_prompts_are_rendered_anew(as_template: Path) -> None:
    lines = [json.loads(line) for line in (as_template / "metrics.jsonl").read_text().splitlines()]
    assert all(line["sampler/logprob_gap"] < 1e-5 for line in lines)
    assert all(line["turns/mean"] > 1 for line in lines)


def test_a_resumed_run_is_the_unbroken_one(tmp_path: Path) -> None:
    words = ["deterministic=true", "optim.lr=1e-3", "optim.schedule=constant", "passes=2"]
    assert run(tmp_path / "unbroken", *words, "steps=3") == 0
    assert run(tmp_path / "resumed", *words, "steps=1") == 0
    assert run(tmp_path / "resumed", *words, "steps=3", resume="auto") == 0

    def figures(name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]

    assert figures("unbroken") == figures("resumed")
    assert len(figures("unbroken")) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env.max_turns=1"], r"leaves no turn in which an answer is read: add env\.max_turns=2"),
        (["tools.use=[echoe]"], "tools.use names echoe, which is not a tool; did you mean echo"),
        (["tools.use=[]"], "gives turns that nothing answers"),
        (["tools.python_persistent=true"], r"means nothing without its tool: add tools\.use=python"),
        (["tools.use=[mcp]"], r"needs tools\.mcp_file"),
        (["tools.use=[browser]"], r"name tools\.allowed_domains"),
    ],
)
def test_settings_that_cannot_be_are_refused(words: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        run(tmp_path / "r", *words)


@pytest.mark.parametrize("does", ["trains", "evaluates"])
def test_a_template_that_refuses_a_second_turn_is_named_before_a_model_is_loaded(
    does: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlpost.model import trainable
    from rlpost.train import assemble

    def unwanted(*arguments: Any) -> None:
        raise AssertionError("the model was loaded")

    def command() -> Any:
        if does == "trains":
            return run(tmp_path / "r", f"model={model}")
        return assemble.evaluate_command(compose(EVAL, [*EVALUATED, f"model={model}"]).settings)

    model = shutil.copytree(tiny_folder, tmp_path / "single")
    template = "{% if messages | length > 3 %}{{ raise_exception('one turn only') }}{% endif %}"
    (model / "chat_template.jinja").write_text(template + load_tokenizer(model).chat_template)
    for module in (transformers, trainable):
        monkeypatch.setattr(module, "load_model", unwanted)
    with pytest.raises(DataError, match=r"the chat template of single refuses this conversation: one turn only"):
        command()
    assert OPEN == []
