"""Shell completion: Typer asks, these answer.

Typer's own machinery does the rest: the scripts for bash, zsh and fish, and the verbs and flags.
bash alone takes `=` and `:` for the ends of words, so `env=gs` reaches Typer as three words, and an
answer may hold only what follows the last of those signs.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from rlpost.catalog import CHOICES, COMMANDS, EVAL, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.config.registry import describe, options
from rlpost.errors import RlpostError

if TYPE_CHECKING:
    from rlpost.config.candidates import Candidate

ASKED = "_RLPOST_COMPLETE"  # set by the shell's script, to complete_bash or another shell
NOTHING_TO_OFFER = 1
WORD_BREAKS = re.compile(r"[=:]+")

Answers = list[tuple[str, str]]


def asked() -> bool:
    """Whether a shell, rather than a person, has called."""
    return ASKED in os.environ


def answer(command: Any) -> NoReturn:
    """Print what the word under the cursor can become, and end the process."""
    before = join_broken_words(os.environ) if os.environ[ASKED] == "complete_bash" else ""
    try:
        command(prog_name="rlpost", obj=before)
    except RlpostError:
        # the one place where an error is silent: a line being typed is wrong in many ways until it is
        # finished, and a message would land in the middle of it. Everything else is a bug, and shows.
        sys.exit(NOTHING_TO_OFFER)
    sys.exit()


def join_broken_words(environ: MutableMapping[str, str]) -> str:
    """Put together in COMP_WORDS what bash took apart at `=` and `:`; returns what of the current word is before it.

    With the cursor after `env=gs` the words `env`, `=`, `gs` become the current word `gs`, and
    `env=` is returned. An `=` after a value (`steps= lr=3`) belongs to the word before it instead.
    """
    raw = environ["COMP_WORDS"].split("\n")
    current = int(environ["COMP_CWORD"])
    raw += [""] * (current + 1 - len(raw))
    joined: list[str] = []
    for i, word in enumerate(raw[: current + 1]):
        glued = bool(joined) and (_breaks(word) or (bool(i) and _breaks(raw[i - 1]) and not _is_key(raw, i, current)))
        if glued:
            joined[-1] += word
        else:
            joined.append(word)
    piece = "" if _breaks(raw[current]) else raw[current]
    before = joined[-1].removesuffix(piece)
    environ["COMP_WORDS"] = "\n".join([*joined[:-1], piece])
    environ["COMP_CWORD"] = str(len(joined) - 1)
    return before


def _breaks(word: str) -> bool:
    return WORD_BREAKS.fullmatch(word) is not None


def _is_key(raw: list[str], i: int, current: int) -> bool:
    """Whether the word begins a setting of its own although it follows an `=`: another `=` comes after it."""
    return i < current and raw[i + 1] == "="


def complete_training(ctx: typer.Context, incomplete: str) -> Answers:
    """Settings of the training verb that the line names."""
    command = next(c for c in COMMANDS if c.verb.split()[-1] == ctx.info_name)
    return _settings(command, ctx, _words(ctx), incomplete)


def complete_sft(ctx: typer.Context, incomplete: str) -> Answers:
    """Settings of `rlpost train sft`, whichever verb takes them."""
    return _settings(TRAIN_SFT, ctx, _words(ctx), incomplete)


def complete_eval(ctx: typer.Context, incomplete: str) -> Answers:
    """Settings of `rlpost eval`, or as its first word `compare`."""
    words = _words(ctx)
    verbs = [] if words or not "compare".startswith(_before(ctx) + incomplete) else [("compare", "a verb")]
    return [*verbs, *_settings(EVAL, ctx, words, incomplete)]


def complete_evaluation(ctx: typer.Context, incomplete: str) -> Answers:
    """The name of an evaluation, or a path."""
    from rlpost.config.candidates import file_candidates
    from rlpost.config.paths import evaluation_names

    files = file_candidates(incomplete, (".parquet",)) if incomplete.startswith((".", "~", "/")) else []
    return _answers(ctx, dict.fromkeys(evaluation_names(), "") | _texts(files), incomplete)


def complete_settings_of_verb(ctx: typer.Context, incomplete: str) -> Answers:
    """A verb, `train grpo` or `eval`, and then its settings."""
    return _verb_and_settings(ctx, _words(ctx), incomplete)


def complete_explain(ctx: typer.Context, incomplete: str) -> Answers:
    """A key, a group or a part; then a verb and its settings."""
    words = _words(ctx)
    if words:
        return _verb_and_settings(ctx, words[1:], incomplete)
    from rlpost.config.candidates import key_candidates

    keys = _texts(c for command in COMMANDS for c in key_candidates(command, incomplete))
    return _answers(ctx, keys, incomplete)


def complete_side(ctx: typer.Context, incomplete: str) -> Answers:
    """A recipe or a run, as `config diff` compares them."""
    from rlpost.config.candidates import recipe_candidates, run_candidates

    return _answers(ctx, _texts([*recipe_candidates(incomplete), *run_candidates(incomplete)]), incomplete)


def complete_run(ctx: typer.Context, incomplete: str) -> Answers:
    """The name of a run."""
    from rlpost.config.candidates import run_names

    return _answers(ctx, dict.fromkeys(run_names(), ""), incomplete)


def complete_model(ctx: typer.Context, incomplete: str) -> Answers:
    """A run, or an option of model."""
    from rlpost.config.candidates import run_names

    return _answers(ctx, _options("model") | dict.fromkeys(run_names(), "a run"), incomplete)


def complete_group(ctx: typer.Context, incomplete: str) -> Answers:
    """A group, or `recipe`."""
    return _answers(ctx, dict.fromkeys((*CHOICES, "recipe"), ""), incomplete)


def complete_env(ctx: typer.Context, incomplete: str) -> Answers:
    """The name of an environment."""
    return _answers(ctx, _options("env"), incomplete)


def complete_env_settings(ctx: typer.Context, incomplete: str) -> Answers:
    """Settings `env.KEY=VALUE` of the environment that the line names."""
    from rlpost.config.candidates import setting_candidates

    words = [*_words(ctx), *([f"env={name}"] if (name := ctx.params.get("name")) else [])]
    before = _before(ctx)
    found = setting_candidates(EVAL, words, before + incomplete, files=not before)
    return _answers(ctx, _texts(c for c in found if c.text.startswith("env.")), incomplete)


def _verb_and_settings(ctx: typer.Context, words: list[str], incomplete: str) -> Answers:
    verb = [word for word in words if "=" not in word]
    command = next((c for c in COMMANDS if verb in (c.verb.split(), [c.name])), TRAIN_GRPO)
    settings = _settings(command, ctx, [word for word in words if "=" in word], incomplete)
    if _before(ctx) or len(words) > len(verb):
        return settings
    rest = [c.verb.split()[len(verb) :] for c in COMMANDS if c.verb.split()[: len(verb)] == verb]
    verbs = _answers(ctx, {words[0]: "a verb" for words in rest if words}, incomplete)
    return verbs if verb and verbs else [*verbs, *settings]


def _settings(command: Command[Any], ctx: typer.Context, words: list[str], incomplete: str) -> Answers:
    from rlpost.config.candidates import setting_candidates

    before = _before(ctx)
    in_bash = os.environ.get(ASKED) == "complete_bash"  # which completes files itself, after a = too
    found = setting_candidates(command, words, before + incomplete, files=not in_bash)
    return _answers(ctx, _texts(found), incomplete)


def _options(group: str) -> dict[str, str]:
    """The options of a group, each with its description."""
    return {name: describe(group, name) for name in options(group)}


def _texts(found: Iterable[Candidate]) -> dict[str, str]:
    return {candidate.text: candidate.about for candidate in found}


def _answers(ctx: typer.Context, found: Mapping[str, str], incomplete: str) -> Answers:
    """Words and their descriptions as Typer takes them: of each the part that stands for the current word."""
    before = _before(ctx)
    words = [text for text in found if text.startswith(before + incomplete)]
    return [(word.removeprefix(before), _plain(found[word])) for word in words]


def _plain(about: str) -> str:
    """A description that Typer, which reads it as markup, shows as it stands."""
    return about.replace("[", r"\[").replace("'", "’")  # zsh's quotes are doubled on the way


def _before(ctx: typer.Context) -> str:
    """What of the current word bash keeps before the part it asks about."""
    return ctx.obj if isinstance(ctx.obj, str) else ""


def _words(ctx: typer.Context) -> list[str]:
    """The settings before the current word."""
    return list(ctx.params.get("overrides") or ctx.params.get("words") or [])
