"""Shell completion: the candidates for a half-typed setting, and the callbacks through which Typer asks for them.

Typer brings the scripts for bash, zsh and fish, and completes verbs and flags. Only bash breaks words at
`=` and `:`, so `env=gs` reaches Typer as three words, and an answer may hold only the part after the last
of those signs.

A person waits for each answer, so this module does not load Hydra. It reads the files of conf/ as plain
YAML and skips a file that cannot be read: the command itself reports it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import typer

from rlpost.catalog import CHOICES, COMMANDS, EVAL, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.config import schema
from rlpost.config.paths import RUNS, evaluation_names, is_run_folder
from rlpost.errors import RlpostError
from rlpost.files import expanded
from rlpost.imports import check_file, functions_of
from rlpost.settings.base import BUILT_IN_REWARDS, MISSING

ASKED = "_RLPOST_COMPLETE"  # set by the shell's script, to complete_bash or another shell
NOTHING_TO_OFFER = 1
WORD_BREAKS = re.compile(r"[=:]+")
PYTHON, YAML = (".py",), (".yaml", ".yml")
PATHS: dict[str, Sequence[str]] = {  # key whose value is a file -> endings of the files to offer; empty: all
    "plugin": PYTHON,
    "recipe": YAML,
    "model.path": (),
    "env.path": (),
    "env.test_path": (),
    "env.reward": PYTHON,
    "env.accuracy": PYTHON,
}
REWARDS = ("env.reward", "env.accuracy")
SOME_VALUES = {"env.split": ("train", "test", "validation"), "model.device": ("auto", "cpu", "cuda")}
MOST_FILES = 200  # of one folder
Answers = list[tuple[str, str]]


@dataclass(frozen=True)
class Candidate:
    """A completion of the typed word, and its description."""

    text: str
    about: str = ""


def asked() -> bool:
    """Whether a shell asks for completions."""
    return ASKED in os.environ


def answer(command: Any) -> NoReturn:
    """Print the completions of the word under the cursor, and end the process."""
    before = join_broken_words(os.environ) if os.environ[ASKED] == "complete_bash" else ""
    try:
        command(prog_name="rlpost", obj=before)
    except RlpostError:
        # the only silent error: an unfinished line is wrong in many ways, and a message would land in
        # the middle of it. Any other error is a bug, and shows.
        sys.exit(NOTHING_TO_OFFER)
    sys.exit()


def join_broken_words(environ: MutableMapping[str, str]) -> str:
    """Join in COMP_WORDS the words that bash broke at `=` and `:`; returns the current word up to the last of them.

    With the cursor after `env=gs` the words `env`, `=`, `gs` become `env=gs`, and `env=` is returned. A word
    behind an `=` begins a setting of its own if another `=` follows it (`steps= lr=3`).
    """
    raw = environ["COMP_WORDS"].split("\n")
    current = int(environ["COMP_CWORD"])
    raw += [""] * (current + 1 - len(raw))
    joined: list[str] = []
    for i, word in enumerate(raw[: current + 1]):
        is_key = i < current and raw[i + 1] == "="
        if joined and (_breaks(word) or (_breaks(raw[i - 1]) and not is_key)):
            joined[-1] += word
        else:
            joined.append(word)
    piece = "" if _breaks(raw[current]) else raw[current]
    before = joined[-1].removesuffix(piece)
    environ["COMP_WORDS"] = "\n".join([*joined[:-1], piece])
    environ["COMP_CWORD"] = str(len(joined) - 1)
    return before


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
    keys = _texts(c for command in COMMANDS for c in key_candidates(command, incomplete))
    return _answers(ctx, keys, incomplete)


def complete_side(ctx: typer.Context, incomplete: str) -> Answers:
    """A recipe or a run, as `config diff` compares them."""
    runs = [Candidate(f"{RUNS}/{name}", "a run") for name in run_names()]
    return _answers(ctx, _texts([*recipe_candidates(incomplete), *_beginning(incomplete, runs)]), incomplete)


def complete_run(ctx: typer.Context, incomplete: str) -> Answers:
    """The name of a run."""
    return _answers(ctx, dict.fromkeys(run_names(), ""), incomplete)


def complete_model(ctx: typer.Context, incomplete: str) -> Answers:
    """A run, or an option of model."""
    return _answers(ctx, _options("model") | dict.fromkeys(run_names(), "a run"), incomplete)


def complete_group(ctx: typer.Context, incomplete: str) -> Answers:
    """A group, or `recipe`."""
    return _answers(ctx, dict.fromkeys((*CHOICES, "recipe"), ""), incomplete)


def complete_env(ctx: typer.Context, incomplete: str) -> Answers:
    """The name of an environment."""
    return _answers(ctx, _options("env"), incomplete)


def complete_env_settings(ctx: typer.Context, incomplete: str) -> Answers:
    """Settings `env.KEY=VALUE` of the environment that the line names."""
    words = [*_words(ctx), *([f"env={name}"] if (name := ctx.params.get("name")) else [])]
    before = _before(ctx)
    found = setting_candidates(EVAL, words, before + incomplete, files=not before)
    return _answers(ctx, _texts(c for c in found if c.text.startswith("env.")), incomplete)


def setting_candidates(
    command: Command[Any], given: Sequence[str], typed: str, *, files: bool = True
) -> list[Candidate]:
    """The settings of `command` that begin with `typed`, after the words `given` on the same line.

    `files` False leaves out files, for a shell that completes those itself.
    """
    line = _Line(command, dict(word.split("=", 1) for word in given if "=" in word), files)
    name, equals, value = typed.partition("=")
    if equals:
        return line.values(name, value)
    fitting = [c for c in line.names if c.text.startswith(typed)]
    if len(fitting) == 1:
        # the shell puts a space behind a single completion; offering its values too keeps the cursor at the =
        return [*fitting, *line.values(fitting[0].text[:-1], "")]
    return fitting


def key_candidates(command: Command[Any], typed: str) -> list[Candidate]:
    """The keys, groups and parts of `command` that begin with `typed`, under any option."""
    groups = schema.groups_of(command.settings)
    docs = schema.docs_of(command.settings)
    found: dict[str, str] = {}
    classes = [(cls, f"{group}.") for group in groups for cls in schema.classes_of(command, group).values()]
    for settings, prefix in [(command.settings, ""), *classes]:
        for key in schema.keys_of(settings, prefix):
            part, dot, field = key.name.partition(".")
            found.setdefault(part, docs.get(part, ""))
            if dot:
                found.setdefault(
                    key.name, schema.docs_of(settings).get(field, "") if prefix else _part_doc(command, part, field)
                )
    names = [name for name in found if name.startswith(typed) and name not in command.without]
    return [Candidate(name, found[name]) for name in names]


def recipe_candidates(typed: str, command: Command[Any] | None = None) -> list[Candidate]:
    """The recipes that begin with `typed`; with a `command` only its recipes."""
    return [
        Candidate(name, schema.description(file))
        for name, file in schema.recipes().items()
        if name.startswith(typed) and (command is None or schema.read_yaml(file).get("command") == command.verb)
    ]


def file_candidates(typed: str, endings: Sequence[str] = ()) -> list[Candidate]:
    """Files (of these `endings`) and folders whose paths begin with `typed`; a single folder with its content."""
    head, slash, tail = typed.rpartition("/")
    try:
        entries = sorted(expanded(f"{head}{slash}" or ".").iterdir())[:MOST_FILES]
        kept = [e for e in entries if e.name.startswith(tail) and e.name.startswith(".") == tail.startswith(".")]
        kept = [e for e in kept if e.is_dir() or not endings or e.suffix in endings]
        found = [Candidate(f"{head}{slash}{e.name}{'/' if e.is_dir() else ''}") for e in kept]
    except (OSError, RuntimeError):  # a missing or closed folder, or a ~ of an unknown user
        return []
    if len(found) == 1 and found[0].text.endswith("/"):
        return [*found, *file_candidates(found[0].text, endings)]
    return found


def run_names() -> list[str]:
    """The names of the runs in ./runs."""
    try:
        return sorted(folder.name for folder in RUNS.iterdir() if is_run_folder(folder))
    except OSError:  # no such folder, or not readable
        return []


class _Line:
    """A half-typed command line: the options that its words choose, and their keys."""

    def __init__(self, command: Command[Any], given: Mapping[str, str], files: bool) -> None:
        self.command = command
        self.given = given
        self.files = files
        self.groups = schema.groups_of(command.settings)
        name = given.get("recipe")
        recipe = {} if name is None else schema.read_yaml(schema.recipes().get(name, expanded(name)))
        self.said = {**{str(key): schema.as_text(value) for key, value in recipe.items()}, **given}
        self.choices = {**schema.default_choices(command), **{g: self.said[g] for g in self.groups if g in self.said}}
        classes = {group: schema.class_of(group, option) for group, option in self.choices.items()}
        self.classes = {group: cls for group, cls in classes.items() if cls is not None}

    @cached_property
    def keys(self) -> dict[str, schema.Key]:
        """The keys under the chosen options."""
        return schema.keys_under(self.command, self.classes)

    @property
    def names(self) -> list[Candidate]:
        """Every key and group, with its `=`, that is not on the line yet."""
        docs = schema.docs_of(self.command.settings)
        about = {group: docs.get(group, "") for group in self.groups}
        about["recipe"] = "a file of settings"
        about |= {name: self._about(key) for name, key in self.keys.items()}
        return [Candidate(f"{name}=", text) for name, text in about.items() if name not in self.given]

    def values(self, name: str, typed: str) -> list[Candidate]:
        """The settings that begin with `name=typed`."""
        found = [*self._words(name), *(self._paths(name, typed) if name in PATHS and self.files else [])]
        if name == "model" and typed.startswith((".", "~", "/")) and self.files:
            found += file_candidates(typed)
        if name in REWARDS and ":" in typed:
            found = _functions(typed.rpartition(":")[0])
        return [Candidate(f"{name}={c.text}", c.about) for c in _beginning(typed, found)]

    def _words(self, name: str) -> list[Candidate]:
        if name in self.groups:
            runs = [Candidate(f"{RUNS}/{run}", "a run") for run in run_names()] if name == "model" else []
            return [
                *(Candidate(option, schema.describe(name, option)) for option in schema.options(name, self.command)),
                *runs,
            ]
        if name == "recipe":
            return recipe_candidates("", self.command)
        key = self.keys.get(name)
        return [] if key is None else self._words_of(key)

    def _words_of(self, key: schema.Key) -> list[Candidate]:
        present = self._present(key)
        words = ["true", "false"] if key.element is bool else list(key.choices or SOME_VALUES.get(key.name, ()))
        words += BUILT_IN_REWARDS if key.name in REWARDS else []
        words += [schema.NULL] if key.optional else []
        first = [present] if present and present not in words else []
        meanings = {name: row.words for name, row in (key.names or {}).items()}
        return [Candidate(word, "as it is" if word == present else meanings.get(word, "")) for word in [*first, *words]]

    def _paths(self, name: str, typed: str) -> list[Candidate]:
        return [] if ":" in typed else file_candidates(typed, PATHS[name])

    def _about(self, key: schema.Key) -> str:
        part, dot, field = key.name.partition(".")
        owner = self.classes.get(part)
        about = schema.docs_of(owner).get(field) if owner else _part_doc(self.command, part, field) if dot else ""
        return about or schema.docs_of(self.command.settings).get(key.name) or key.type_name

    def _present(self, key: schema.Key) -> str:
        """The key's value without a word for it; empty if it has none."""
        part, _, field = key.name.partition(".")
        file = schema.conf_file(f"{part}/{self.choices[part]}") if part in self.choices else None
        in_conf = schema.read_yaml(file).get(field)
        value = self.said.get(key.name, key.default if in_conf is None else in_conf)
        return "" if value == MISSING else schema.as_text(value)


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
    before = _before(ctx)
    in_bash = os.environ.get(ASKED) == "complete_bash"  # which completes files itself, after a = too
    found = setting_candidates(command, words, before + incomplete, files=not in_bash)
    return _answers(ctx, _texts(found), incomplete)


def _options(group: str) -> dict[str, str]:
    """The options of a group, each with its description."""
    return {name: schema.describe(group, name) for name in schema.options(group)}


def _texts(found: Iterable[Candidate]) -> dict[str, str]:
    return {candidate.text: candidate.about for candidate in found}


def _answers(ctx: typer.Context, found: Mapping[str, str], incomplete: str) -> Answers:
    """Words and descriptions for Typer, without the part of the current word that bash keeps."""
    before = _before(ctx)
    words = [text for text in found if text.startswith(before + incomplete)]
    return [(word.removeprefix(before), _plain(found[word])) for word in words]


def _plain(about: str) -> str:
    """A description without the markup that Typer would read in it."""
    return about.replace("[", r"\[").replace("'", "’")  # zsh would double the quotes


def _before(ctx: typer.Context) -> str:
    """The part of the current word that bash keeps."""
    return ctx.obj if isinstance(ctx.obj, str) else ""


def _words(ctx: typer.Context) -> list[str]:
    """The settings before the current word."""
    return list(ctx.params.get("overrides") or ctx.params.get("words") or [])


def _beginning(typed: str, found: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that begin with `typed`, each once."""
    return list({c.text: c for c in reversed([*found]) if c.text.startswith(typed)}.values())[::-1]


def _part_doc(command: Command[Any], part: str, field: str) -> str:
    """The comment beside a field of a part without options, `sampling.top_p`."""
    declared = schema.types_of(command.settings)[part]
    return schema.docs_of(declared).get(field, "")


def _functions(path: str) -> list[Candidate]:
    """`path:NAME` for each function of a Python file."""
    try:
        return [Candidate(f"{path}:{name}") for name in functions_of(check_file(path, path))]
    except RlpostError:  # the file is missing or unfinished: nothing to offer
        return []


def _breaks(word: str) -> bool:
    return WORD_BREAKS.fullmatch(word) is not None
