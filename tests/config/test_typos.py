"""Typing mistakes of every word that a command line takes, words of other tools, and the suggestions they get."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from rlpost.catalog import COMMANDS, Command
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
from rlpost.config.unknown import Vocabulary
from rlpost.errors import ConfigError
from tests.says import Says

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
            words = Vocabulary(command, choices)
            for word in {*names, *groups, "recipe"} - asked:
                asked.add(word)
                made = [*typos(word, sampled), *misplaced(word, groups)]
                for typo in sampled.sample(made, -(-len(made) // 8)):  # all of them take half a minute
                    if typo not in valid and not any(name.startswith(f"{typo}.") for name in names):
                        yield typo, words.complaint(Override(typo, "1")), word
    assert asked >= {*all_keys(command), *groups}


def misplaced(key: str, groups: Sequence[str]) -> list[str]:
    """A dotted key without its group, in each other group, and with a _ for its dot."""
    group, dot, last = key.partition(".")
    return [last, f"{group}_{last}", *(f"{other}.{last}" for other in groups if other != group)] if dot else []


def option_typos(sampled: random.Random) -> Iterator[tuple[str, str, str]]:
    for command in COMMANDS:
        words = Vocabulary(command, default_choices(command))
        for group in words.choices:
            for option in options(group, command):
                for typo in typos(option, sampled)[::6]:
                    if typo not in options(group):
                        yield f"{group}={typo}", words.complaint(Override(group, typo)), option


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


# what users of other tools type, by the command
OTHER_WORDS = {
    "grpo": """
        lora_r=16 lora=true use_peft=true trainer.n_gpus_per_node=8 num_train_epochs=3 epochs=3 max_tokens=99
        reward_funcs=accuracy_reward custom_reward_function.path=r.py datasets=x/y dataset=gsm8k dataset=rows.jsonl
        save_steps=10 save_total_limit=2 eval_steps=10 lr_scheduler_type=cosine warmup_ratio=0.1 bf16=true fp16=true
        gradient_checkpointing=true mask_truncated_completions=true use_vllm=true vllm_gpu_memory_utilization=0.3
        output_dir=out resume_from_checkpoint=true data.train_batch_size=64 data.max_response_length=99
        actor_rollout_ref.model.path=x actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.rollout.n=8
        actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.kl_loss_coef=0.001
        algorithm.adv_estimator=grpo trainer.total_epochs=3 trainer.save_freq=10 max_async_level=2 ckpt.interval=5
        orchestrator.rollouts_per_example=8 model.name=Qwen/Qwen3-0.6B n_samples_per_prompt=8 model.seed=1
        logging_steps=1 trainer.nnodes=2 sample_packing=true critic.optim.lr=1
    """,
    "sft": """
        report_to=tensorboard gradient_accumulation_steps=8 fsdp=true num_train_epochs=3 max_seq_length=99
        dataset_name=openai/gsm8k val_set_size=0.05 sample_packing=true cutoff_len=99 lora_target_linear=true
        lora_attn_modules=[q_proj] load_in_4bit=true lora_dropout=0.1 push_to_hub=true special_tokens.pad_token=x
    """,
    "eval": "batch_size=4 tasks=gsm8k output_dir=out learning_rate=1",
    "expert_iteration": "reward_model.path=x adam_beta2=0.95",
}


def answer(command: Command[Any], word: str) -> str:
    """The answer to a word of another tool."""
    key, _, text = word.partition("=")
    return Vocabulary(command, default_choices(command)).complaint(Override(key, text))


def test_words_of_other_tools_lead_to_the_word_here(says: Says) -> None:
    words = [(command, word) for command in COMMANDS for word in OTHER_WORDS.get(command.name, "").split()]
    says("config", "\n".join(answer(command, word) for command, word in words))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_word_of_the_table_leads_somewhere(command: Command[Any]) -> None:
    known = {*all_keys(command), *groups_of(command.settings), "recipe", "--out", "--name", "--resume"}
    for word in answers("settings"):
        told = answer(command, f"{word}=1") if word not in known else ""
        if "did you mean" in told:
            told = re.sub(r" \([^)]*\)| of [a-z]+=.*", "", told.rpartition("did you mean ")[2].partition("?")[0])
            assert {meant.partition("=")[0] for meant in re.split(", | or ", told)} <= known
    given = [each for answer in answers("settings").values() for each in answer.split(" | ")]
    given = [each for each in given if not each.startswith(NOT_HERE)]
    used = {meant.partition("=")[0] for each in given for meant in re.split(" or | ", each.partition(" (")[0])}
    keys = {key for c in COMMANDS for key in (*all_keys(c), *groups_of(c.settings))}
    assert used <= {"--out", "--name", "--resume"} | keys


def verbs_of(command: Any, path: Collection[str] = ()) -> Iterator[tuple[list[str], Any]]:
    """The words of every verb, and the verb."""
    yield list(path), command
    for name, inner in getattr(command, "below", {}).items():
        yield from verbs_of(inner, [*path, name])


def test_a_typo_in_any_verb_or_flag_leads_back_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    from rlpost.cli.main import app

    sampled = random.Random(0)
    told: list[tuple[str, str, str]] = []
    for path, verb in verbs_of(typer.main.get_command(app)):
        inner = list(getattr(verb, "below", {}))
        flags = [flag for parameter in verb.params for flag in parameter.opts if flag.startswith("--")]
        for word in (*inner, *flags):
            dashes, meant = ("--", word) if word in flags else ("", " ".join(["rlpost", *path, word]))
            typed = [dashes + typo for typo in typos(word.removeprefix("--"), sampled)[::4] if typo[0] != "-"]
            told += [(typo, said([*path, typo], capsys), meant) for typo in typed if typo not in (*inner, *flags)]
    assert rate(told, "verbs, flags", capsys) >= PROMISED


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(words) == 2
    return capsys.readouterr().err
