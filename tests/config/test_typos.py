"""Typing mistakes of every word that a command line takes, words of other tools, and the suggestions they get."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from rlpost.catalog import CHOICES, COMMANDS, Command
from rlpost.cli.main import run
from rlpost.config.other_words import NOT_HERE, answers
from rlpost.config.overrides import Override
from rlpost.config.recipes import find_recipe
from rlpost.config.schema import (
    Key,
    all_keys,
    class_of,
    classes_of,
    default_choices,
    groups_of,
    keys_of,
    options,
    recipes,
)
from rlpost.config.unknown import Vocabulary, unknown_option
from rlpost.errors import ConfigError

LETTERS = string.ascii_lowercase + string.digits + "_"
KEYBOARD = ("1234567890", "qwertyuiop", "asdfghjkl", "zxcvbnm")
PROMISED = 0.98  # of a kind of mistakes, by the README


def typos(word: str, sampled: random.Random) -> list[str]:
    """Every deletion, doubling and swap of neighbours; at every position a letter from beside it, and one at random.

    A dash for every underscore, too.
    """
    places = range(len(word))
    made = {word[:i] + word[i + 1 :] for i in places}
    made |= {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in places[:-1]}
    made |= {word[:i] + word[i] + word[i:] for i in places}
    made |= {word[:i] + sampled.choice(beside(word[i])) + word[i + 1 :] for i in places}
    made |= {word.replace("_", "-")}
    made |= {word[:i] + sampled.choice(LETTERS) + word[i:] for i in range(len(word) + 1)}
    return sorted(made - {word, ""})


def beside(letter: str) -> str:
    """The keys to the left and the right of a letter's; any for what has none."""
    row = next((row for row in KEYBOARD if letter in row), "")
    place = row.find(letter)
    return row[max(place - 1, 0) : place] + row[place + 1 : place + 2] or LETTERS


def test_typos_are_one_edit_of_each_kind() -> None:
    made = typos("lr", random.Random(0))
    assert {"l", "r", "rl", "llr", "lrr", "kr"} <= set(made)
    assert {"le", "lt"} & set(made)
    assert sorted(map(len, made))[:5] == [1, 1, 2, 2, 2]
    assert "group-size" in typos("group_size", random.Random(0))


def keys_under(command: Command[Any], choices: Mapping[str, str]) -> dict[str, Key]:
    """The keys of a command under some choices, without the 100 ms that Hydra takes."""
    chosen = {part: class_of(part, name) or classes_of(command, part)[name] for part, name in choices.items()}
    return {key.name: key for key in keys_of(command.settings, chosen=chosen) if key.name not in command.without}


def key_typos(command: Command[Any], sampled: random.Random) -> Iterator[tuple[str, str, str]]:
    """Typo, the message it gets, the word meant: for every key and group under every choice of options."""
    groups = groups_of(command.settings)
    valid = {name for c in COMMANDS for name in (*all_keys(c), *groups_of(c.settings), "recipe")}
    usual = default_choices(command)
    asked: set[str] = set()
    for group, rows in [("", {"": None}), *((group, classes_of(command, group)) for group in groups)]:
        for option in rows:
            choices = usual | ({group: option} if group else {})
            names = keys_under(command, choices)
            words = Vocabulary(command, names, choices)
            for word in {*names, *groups, "recipe"} - asked:
                asked.add(word)
                for typo in [*typos(word, sampled), *misplaced(word, groups)]:
                    if typo not in valid and not any(name.startswith(f"{typo}.") for name in names):
                        yield typo, words.unknown_key(Override(typo, "1")), word
    assert asked >= {*all_keys(command), *groups}


def misplaced(key: str, groups: Sequence[str]) -> list[str]:
    """A dotted key without its group, in each other group, and with a _ for its dot."""
    group, dot, last = key.partition(".")
    return [last, f"{group}_{last}", *(f"{other}.{last}" for other in groups if other != group)] if dot else []


def option_typos(sampled: random.Random) -> Iterator[tuple[str, str, str]]:
    for group in CHOICES:
        known = options(group)
        for option in known:
            for typo in typos(option, sampled):
                if typo not in known:
                    yield f"{group}={typo}", unknown_option(Override(group, typo), known), option


def recipe_typos(sampled: random.Random) -> Iterator[tuple[str, str, str]]:
    for recipe in recipes():
        for typo in typos(recipe, sampled):
            if typo not in recipes():
                with pytest.raises(ConfigError) as caught:
                    find_recipe(typo)
                yield f"recipe={typo}", str(caught.value), recipe


def rate(told: Iterable[tuple[str, str, str]], name: str, capsys: pytest.CaptureFixture[str]) -> float:
    """The share whose message suggests the word meant, printed with those that do not."""
    counted = [(typo, message, word in meant_in(message)) for typo, message, word in told]
    right = sum(ok for _, _, ok in counted)
    with capsys.disabled():
        print(f"\n{name}: {right} of {len(counted)} typos lead back, {right / len(counted):.2%}", end=" ")
    print("\n".join(f"{typo}: {message}" for typo, message, ok in counted if not ok))
    return right / len(counted)


def meant_in(message: str) -> list[str]:
    """The words that a message suggests: two of `did you mean model.path or env.path?`."""
    return message.rpartition("did you mean ")[2].partition("?")[0].split(" or ")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_typo_in_any_key_or_group_leads_back_to_it(command: Command[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert rate(key_typos(command, random.Random(0)), f"keys of {command.verb}", capsys) >= PROMISED


def test_a_typo_in_any_option_leads_back_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert rate(option_typos(random.Random(0)), "options", capsys) >= PROMISED


def test_a_typo_in_any_recipe_leads_back_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert rate(recipe_typos(random.Random(0)), "recipes", capsys) >= PROMISED


# what users of other tools type -> the end of the answer
OTHER_WORDS = {
    "grpo lora_r=16": "lora.rank",
    "grpo lora=true": "lora.enabled=true",
    "grpo use_peft=true": "lora.enabled=true",
    "sft report_to=tensorboard": "tracking=tensorboard",
    "eval batch_size=4": "policy.max_num_seqs",
    "sft gradient_accumulation_steps=8": (
        "minibatch_size (samples per optimizer step) or tokens_per_microbatch (most tokens per forward and backward)"
    ),
    "grpo num_train_epochs=3": "steps (of prompts_per_step prompts each; there are no epochs)",
    "grpo trainer.n_gpus_per_node=8": "cluster.trainer_ranks",
    "sft fsdp=true": "cluster.sharding",
    "sft num_train_epochs=3": "epochs",
    "grpo epochs=3": "steps (of prompts_per_step prompts each; there are no epochs)",
    "grpo max_tokens=99": "env.max_completion_tokens",
    "sft max_seq_length=99": "max_tokens",
    "grpo reward_funcs=accuracy_reward": "env.reward of env=dataset or env=factory (FILE.py:FUNCTION, or a name)",
    "grpo custom_reward_function.path=r.py": "env.reward of env=dataset or env=factory (FILE.py:FUNCTION, or a name)",
    "grpo datasets=x/y": "env=dataset env.path=x/y",
    "sft dataset_name=openai/gsm8k": "env=dataset env.path=openai/gsm8k",
    "sft val_set_size=0.05": "env.held_out (a share of the rows)",
    "sft sample_packing=true": "packing",
    "sft cutoff_len=99": "max_tokens",
    "sft lora_target_linear=true": "lora.target_modules (left out: every linear layer)",
    "expert_iteration reward_model.path=x": "env.reward of env=dataset or env=factory (FILE.py:FUNCTION, or a name)",
    "expert_iteration adam_beta2=0.95": "optim.beta2",
    "eval tasks=gsm8k": "env=gsm8k",
    "grpo dataset=gsm8k": "env=gsm8k",
    "grpo dataset=rows.jsonl": "env=dataset env.path=rows.jsonl",
    "grpo save_steps=10": "checkpoint.every",
    "grpo save_total_limit=2": "checkpoint.keep_last",
    "grpo eval_steps=10": "eval.every",
    "grpo lr_scheduler_type=cosine": "optim.schedule",
    "grpo warmup_ratio=0.1": "optim.warmup_steps (a number of steps, not a share)",
    "grpo gradient_checkpointing=true": "model.activation_checkpointing",
    "grpo bf16=true": "model.autocast=bfloat16",
    "grpo fp16=true": "model.autocast",
    "grpo mask_truncated_completions=true": "overlong.mask",
    "grpo use_vllm=true": "policy=vllm",
    "grpo vllm_gpu_memory_utilization=0.3": "policy.gpu_memory_utilization",
    "grpo output_dir=out": "--out",
    "eval output_dir=out": "--out",
    "grpo resume_from_checkpoint=true": "--resume",
    "grpo data.train_batch_size=64": (
        "prompts_per_step (prompts per step), minibatch_size (completions per optimizer "
        "step) or tokens_per_microbatch (most tokens per forward and backward)"
    ),
    "grpo data.max_response_length=99": "env.max_completion_tokens",
    "grpo actor_rollout_ref.model.path=x": "model.path",
    "grpo actor_rollout_ref.actor.optim.lr=1e-6": "optim.lr",
    "grpo actor_rollout_ref.rollout.n=8": "group_size",
    "grpo actor_rollout_ref.actor.ppo_mini_batch_size=8": "minibatch_size (counted in samples)",
    "grpo actor_rollout_ref.actor.kl_loss_coef=0.001": "loss.kl_coef",
    "grpo algorithm.adv_estimator=grpo": "advantage.estimator",
    "grpo trainer.total_epochs=3": "steps (of prompts_per_step prompts each; there are no epochs)",
    "grpo trainer.save_freq=10": "checkpoint.every",
    "grpo orchestrator.rollouts_per_example=8": "group_size",
    "grpo max_async_level=2": "max_policy_lag",
    "grpo ckpt.interval=5": "checkpoint.every",
    "grpo model.name=Qwen/Qwen3-0.6B": "model.path",
    "sft lora_attn_modules=[q_proj]": "lora.target_modules",
    "grpo n_samples_per_prompt=8": "group_size",
    "grpo model.seed=1": "env.seed or seed",
}


def answer(line: str) -> str:
    """What a word of another tool is answered with, `eval batch_size=4` for one of `rlpost eval`."""
    name, word = line.split()
    command = next(command for command in COMMANDS if command.name == name)
    key, _, text = word.partition("=")
    return Vocabulary.by_default(command).unknown_key(Override(key, text))


def test_words_of_other_tools_lead_to_the_word_here() -> None:
    answers = {line: answer(line) for line in OTHER_WORDS}
    assert {line: told for line, told in answers.items() if f"did you mean {OTHER_WORDS[line]}?" not in told} == {}


def test_what_there_is_nothing_for_is_told_why() -> None:
    assert answer("grpo logging_steps=1").endswith(": every step is recorded, in metrics.jsonl")
    assert answer("grpo trainer.nnodes=2").endswith(" or sample by cluster=ray (docs/scale.md)")
    assert "lora.enabled=true" in answer("sft load_in_4bit=true")
    assert answer("sft lora_dropout=0.1").endswith(": adapters have no dropout, so that trainer and sampler agree")
    assert "nothing is uploaded" in answer("sft push_to_hub=true")
    assert answer("grpo sample_packing=true").endswith(": completions are packed wherever the model allows it")
    assert answer("sft special_tokens.pad_token=x").endswith(": the tokenizer is the model's own")
    assert answer("grpo critic.optim.lr=1").endswith("completions are compared within their group")


def test_a_training_word_in_an_evaluation_names_where_it_belongs() -> None:
    assert answer("eval learning_rate=1").endswith(": optim.lr belongs to rlpost train grpo")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_word_of_the_table_leads_to_a_key_a_group_or_a_flag_of_the_command_or_nowhere(
    command: Command[Any],
) -> None:
    known = {*all_keys(command), *groups_of(command.settings), "recipe", "--out", "--name", "--resume"}
    for word in answers("settings"):
        told = answer(f"{command.name} {word}=1") if word not in known else ""
        if "did you mean" in told:
            told = re.sub(r" \([^)]*\)| of [a-z]+=.*", "", told.rpartition("did you mean ")[2].partition("?")[0])
            assert {meant.partition("=")[0] for meant in re.split(", | or ", told)} <= known
    given = [
        each for said in answers("settings").values() for each in said.split(" | ") if not each.startswith(NOT_HERE)
    ]
    used = {meant.partition("=")[0] for each in given for meant in each.partition(" (")[0].split()}
    assert used <= {"--out", "--name", "--resume"} | {
        k for c in COMMANDS for k in (*all_keys(c), *groups_of(c.settings))
    }


def verbs_of(command: Any, path: Collection[str] = ()) -> Iterator[tuple[list[str], Any]]:
    """The words of every verb, and the verb."""
    yield list(path), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from verbs_of(inner, [*path, name])


def test_a_typo_in_any_verb_or_flag_leads_back_to_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import typer

    from rlpost.cli.main import app

    sampled = random.Random(0)
    told: list[tuple[str, str, str]] = []
    every_verb = typer.main.get_command(app)
    monkeypatch.setattr(typer.main, "get_command", lambda app: every_verb)  # which takes longer than an answer
    for path, verb in verbs_of(every_verb):
        beside = getattr(verb, "commands", {})
        for name in beside:
            told += [
                (typo, said([*path, typo], capsys), " ".join(["rlpost", *path, name]))
                for typo in typos(name, sampled)[::4]
                if typo not in beside and not typo.startswith("-")
            ]
        flags = [flag for parameter in verb.params for flag in parameter.opts if flag.startswith("--")]
        for flag in flags:
            told += [
                (typo, said([*path, typo], capsys), flag)
                for typo in (f"--{word}" for word in typos(flag[2:], sampled)[::4])
                if typo not in flags and not typo.startswith("---")
            ]
    assert rate(told, "verbs and flags", capsys) >= PROMISED


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(words) == 2
    captured = capsys.readouterr()
    return captured.err
