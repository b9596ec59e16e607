"""GRPO over conversations of several turns: what is trained on is exactly what was sampled, turn after turn."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from copy import copy
from itertools import groupby, pairwise
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
from rlpost.runs.rollouts import read_rollouts
from rlpost.settings.base import TOOLS
from rlpost.train.assemble import evaluate_command
from tests.model_folders import write_weights
from tests.says import Says
from tests.trainings import ends_alike, metrics, train_in, train_in_parts

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


@pytest.fixture(scope="module", autouse=True)
def echo() -> Iterator[None]:
    register_tool("echo", Echo)
    yield
    del TOOLS["echo"]


EVALUATED = [
    *["model=tiny", "policy=transformers", "tools.use=[echo]"],
    *["env.max_turns=3", "env.max_prompt_tokens=400", "env.max_completion_tokens=120"],
]
TRAINED = ["model.autocast=none", "prompts_per_step=2", "group_size=3", "eval.enabled=false", "steps=2"]
WORDS = [*EVALUATED, *TRAINED]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several") / "run"
    assert train_in(TRAIN_GRPO, folder, WORDS) == 0
    return folder


# earlier answers are shortened, as other templates remove thoughts
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
def shortened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose template renders every prompt anew."""
    folder = tmp_path_factory.mktemp("shortened")
    (folder / "shortens.jinja").write_text(SHORTENS)
    more = [f"model.chat_template={folder / 'shortens.jinja'}", "loss=gspo", "steps=1"]
    assert train_in(TRAIN_GRPO, folder / "run", [*WORDS, *more]) == 0
    return folder / "run"


def test_sampler_and_trainer_agree_on_every_token_of_every_turn(trained: Path, shortened: Path) -> None:
    lines = [*metrics(trained), *metrics(shortened)]
    assert len(lines) == 3
    for line in lines:
        assert line["turns/mean"] > 1
        assert line["tools/calls_mean"] == pytest.approx(line["turns/mean"] - 1)  # a last turn's calls are not run
        assert line["tools/errors_mean"] == 0
        assert line["sampler/logprob_gap"] < 1e-5
    assert OPEN == []  # tools are closed at the end


def test_mask_covers_exactly_what_the_model_said(trained: Path, tiny_tokenizer: Any) -> None:
    longest = 0
    for row in read_rollouts(trained, 2):
        assert '"name": "echo"' in row["prompt"]
        said = [turn["content"] for turn in row["turns"] if turn["role"] == "assistant"]
        pairs = zip(row["token_ids"], row["mask"], strict=True)
        runs = [[token for token, _ in run] for own, run in groupby(pairs, key=lambda pair: pair[1]) if own]
        assert [tiny_tokenizer.decode(ids, skip_special_tokens=True) for ids in runs] == said
        assert said[-1] == row["completion"]
        assert all(ids[-1] == tiny_tokenizer.eos_token_id for ids in runs[:-1])
        observed = [turn["content"] for turn in row["turns"] if turn["role"] == "user"]
        assert [text.rpartition("\n")[2] for text in observed] == [f"{len(text)} characters" for text in said[:-1]]
        assert len(row["log_probs"]) == len(row["token_ids"])
        longest = max(longest, len(said))
    assert longest > 1


def test_each_turn_follows_the_prompt_that_the_template_renders(shortened: Path, tiny_tokenizer: Any) -> None:
    renderer = copy(tiny_tokenizer)
    renderer.chat_template = SHORTENS
    seen = 0
    for row in read_rollouts(shortened, 1):
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


def test_resumed_run_is_the_unbroken_one(tmp_path: Path) -> None:
    more = ["deterministic=true", "optim.lr=1e-3", "optim.schedule=constant", "passes=2"]
    whole, parted = train_in_parts(TRAIN_GRPO, tmp_path, [*WORDS, *more], steps=2)
    assert ends_alike(whole, parted)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["env.max_turns=1"], "env.max_turns=2"),
        (["tools.use=[echoe]"], "echoe"),
        (["tools.use=[]"], "env.max_turns=3"),
        (["tools.python_persistent=true"], "tools.use=python"),
        (["tools.use=[mcp]"], "tools.mcp_file"),
        (["tools.use=[browser]"], "tools.allowed_domains"),
    ],
    ids=["one turn", "a typo", "no tool", "another tool's key", "mcp", "browser"],
)
def test_impossible_tools_are_refused(words: list[str], key: str, tmp_path: Path, says: Says) -> None:
    with says.refused("train", ConfigError, key):
        train_in(TRAIN_GRPO, tmp_path / "r", [*WORDS, *words])


@pytest.mark.parametrize("verb", ["train", "eval"])
def test_template_that_refuses_a_second_turn_is_named_at_once(verb: str, tiny_folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_folder, tmp_path / "single")
    template = "{% if messages | length > 3 %}{{ raise_exception('only one') }}{% endif %}"
    (model / "chat_template.jinja").write_text(template + load_tokenizer(model).chat_template)
    write_weights(model / "model.safetensors", "model.embed_tokens.weight")  # which cannot be loaded
    begin: dict[str, Callable[[], object]] = {
        "train": lambda: train_in(TRAIN_GRPO, tmp_path / "r", [*WORDS, f"model={model}"]),
        "eval": lambda: evaluate_command(compose(EVAL, [*EVALUATED, f"model={model}"]).settings),
    }
    with pytest.raises(DataError, match="only one"):
        begin[verb]()
    assert OPEN == []
