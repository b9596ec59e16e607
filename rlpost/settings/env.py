"""Settings of environments, of mixes of several environments, and of the tools a model may call."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from string import Formatter
from typing import Any, ClassVar, Self

from rlpost.errors import ConfigError
from rlpost.settings.base import (
    CODE,
    CODE_IF_MODULE,
    CODE_UNLESS_NAMES,
    MISSING,
    PROGRAM,
    SANDBOX,
    TOOLS,
    Settings,
    doc,
)
from rlpost.settings.model import mapping_in
from rlpost.text import did_you_mean, nearest

OF_ANY_TOOL = ("role", "parser", "max_calls", "max_calls_per_turn", "max_output_chars")  # settings of all tools alike
BUILT_IN_TOOLS = ("python", "mcp", "browser")
OPEN_TURNS = 20  # turns of full length that a conversation without a limit of turns has room for


# Every environment, and the two kinds of rows


class LongPrompts(Enum):
    """How to treat rows whose prompts are longer than env.max_prompt_tokens."""

    error = "error"  # training does not begin
    skip = "skip"  # leave them out, and count them


class Turns(Enum):
    """The form in which the model reads its own earlier turns in a conversation."""

    keep = "keep"  # the ids that it sampled, thoughts included
    as_template = "as_template"  # what the chat template makes of them, as when the model is served


class Thoughts(Enum):
    """How to show the thoughts in rows to a chat template that has no place for them."""

    inline = "inline"  # they are written into the content, as <think>...</think>
    drop = "drop"  # they are left out


@dataclass
class EnvSettings(Settings, group="env"):
    """Settings of every environment; each environment's own class adds to them.

    `prompt_template` is a Python format string over the task's fields, such as `{question}`.
    """

    train_temperature: ClassVar[float] = 1.0  # sampling temperature in training, unless sampling.temperature is set
    repeats_with_limit: ClassVar[bool] = False  # whether every task is new unless `limit` is set
    brings_tools: ClassVar[bool] = False  # whether the environment may have tools of its own
    splits: ClassVar[tuple[str, ...]] = ()  # the splits that there are; empty: whatever the rows have
    ends_itself: ClassVar[bool] = False  # whether a conversation ends without a limit of turns
    has_replies: ClassVar[bool] = True  # whether its tasks come with good replies, which training on rows learns from

    split: str = doc("train", "train, test, or another that the rows have")
    limit: int | None = doc(None, "use only the first N rows; null: all", at_least=1)
    system_prompt: str | None = doc(None, "null: the environment's own")
    prompt_template: str | None = doc(None, "null: the environment's own")
    max_prompt_tokens: int = doc(512, "longer prompts are an error; descriptions of tools count", at_least=1)
    max_completion_tokens: int = doc(48, "most new tokens per turn; longer completions are truncated", at_least=1)
    max_turns: int | None = doc(1, "turns of the model in a conversation; more for tools and games", at_least=1)
    max_observation_tokens: int = doc(256, "room kept for what the environment says between turns", at_least=1)
    eval_limit: int = doc(500, "held-out prompts per evaluation in training, unless eval.limit says", at_least=1)
    history: Turns | None = doc(None, "what the model reads of its earlier turns; null: as the template does")

    @property
    def most_turns(self) -> int:
        """Turns of full length that a conversation has room for; without a limit, shorter turns may be more."""
        return self.max_turns or OPEN_TURNS

    @property
    def longest_sampled(self) -> int:
        """Most tokens that the model can sample in a conversation."""
        return self.most_turns * self.max_completion_tokens

    def longest_conversation(self, prompt_tokens: int | None = None) -> int:
        """Most tokens of a conversation: its prompt, the model's turns, and the observations between them.

        The prompt has at most `prompt_tokens`; None: as many as `max_prompt_tokens` allows.
        """
        most = self.max_prompt_tokens
        prompt = most if prompt_tokens is None else min(most, prompt_tokens)
        return prompt + self.longest_sampled + (self.most_turns - 1) * self.max_observation_tokens

    @property
    def scores(self) -> bool:
        """Whether a finished conversation gets a reward."""
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.splits and self.split not in self.splits:
            raise ConfigError(f"env.split={self.split} is unknown: it must be {' or '.join(self.splits)}")
        if self.prompt_template is not None:
            _check_template(self.prompt_template)
        if self.max_turns is None and not self.ends_itself:
            raise ConfigError("env.max_turns=null leaves conversations without an end: give a number")

    def held_out_for(self, plays: int | None) -> Self:
        """Settings for the test split, where an evaluation plays `plays` prompts (None: `eval_limit`)."""
        return replace(self, split="test", limit=None)


@dataclass
class ListedSettings(EnvSettings):
    """Settings of environments whose tasks are listed once: the rows of files, or the tasks of a package."""

    held_out: float = doc(0.1, "share of the rows kept for test if test has no file of its own", 0.0, 1.0)
    long_prompts: LongPrompts = doc(LongPrompts.error, "what to do with rows whose prompts are too long")
    pass_rates: str | None = doc(None, "file of rlpost data measure: how often a model answers each prompt right")
    min_pass_rate: float = doc(0.0, "train only on prompts answered right at least this often", 0.0, 1.0)
    max_pass_rate: float = doc(1.0, "train only on prompts answered right at most this often", 0.0, 1.0)
    shuffle: bool = doc(True, "false: rows in the order of the file")
    seed: int = doc(0, "random seed for the order of the rows")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pass_rates is None and (self.min_pass_rate > 0 or self.max_pass_rate < 1):
            raise ConfigError(
                "env.min_pass_rate and env.max_pass_rate choose by rates that were measured: name their file with "
                "env.pass_rates, as rlpost data measure writes one"
            )

    def held_out_for(self, plays: int | None) -> Self:
        """See `EnvSettings.held_out_for`: with a `limit`, no more rows than that or an evaluation need."""
        limit = None if self.limit is None else max(self.limit, plays or self.eval_limit)
        return replace(super().held_out_for(plays), limit=limit)


@dataclass
class RowsSettings(ListedSettings):
    """Settings of environments whose tasks are the rows of a file, a folder or a data set of the hub."""

    path: str = doc(MISSING, "folder, file or hub id; several: [a.jsonl,b.jsonl]")


@dataclass
class MadeSettings(EnvSettings):
    """Settings of environments that generate their problems."""

    splits: ClassVar = ("train", "test")

    held_out: float = doc(0.2, "share of the problems kept for test; 0: train and test share all", 0.0, 0.99)
    seed: int = doc(0, "random seed for the order of the problems")


# Rows of a file or of the hub


@dataclass
class OwnRowsSettings(RowsSettings):
    """Settings of environments whose rows are a user's own, each a prompt under names of the user's."""

    takes_whole_rows: ClassVar[bool] = False  # whether the environment reads every column of a row

    path: str = doc(MISSING, ".jsonl, .json, .csv or .parquet file, folder with train.* and test.*, or hub id")
    reward: list[str] = doc(
        MISSING,
        "FILE.py:FUNCTION or a name (rlpost config list reward); several: [a.py:f,exact]",
        runs=CODE_UNLESS_NAMES,
    )
    reward_weights: list[float] | None = doc(None, "one for each reward; null: 1 each")
    accuracy: str | None = doc(None, "a reward of 0 and 1; null: exact or number", runs=CODE_UNLESS_NAMES)
    reward_timeout_seconds: float = doc(60.0, "seconds one reward call may take", 0.001, 86400.0)
    prompt_column: str | None = doc(None, "text or messages; null: the first of prompt, messages, question")
    answer_column: str | None = doc(None, "what the built-in rewards compare with; null: answer, if rows have it")
    thoughts: Thoughts | None = doc(None, "inline or drop reasoning_content of messages; null: as the template does")
    test_path: str | None = doc(None, "file of the test split; null: in path, or held out of its rows")
    config: str | None = doc(None, "configuration of a hub dataset")
    max_prompt_tokens: int = doc(1024, "longer prompts are an error that names the row")
    max_completion_tokens: int = doc(256, "most new tokens; longer completions are truncated")
    eval_limit: int = doc(200, "held-out prompts per evaluation in training, unless eval.limit says")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test_path is not None and self.test_path == self.path:
            raise ConfigError(
                f"env.test_path={self.test_path} is also env.path: leave it out to hold out a share of the rows"
            )
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward):
            raise ConfigError(
                f"env.reward_weights has {len(self.reward_weights)} numbers for {len(self.reward)} rewards: each "
                "needs one"
            )

    @property
    def scores(self) -> bool:
        """See `EnvSettings.scores`."""
        return bool(self.reward)


@dataclass
class DatasetSettings(OwnRowsSettings):
    """Rows and rewards of your own: env.path=FILE env.reward=FILE.py:FUNCTION.

    For training on rewards a row is a prompt. As a demonstration it holds a conversation
    (`messages`, or `conversations` with from and value), a prompt and a completion, or plain `text`.
    """

    completion_column: str | None = doc(None, "a demonstration's reply; null: completion, if rows have it")
    gold: bool | None = doc(
        None, "whether a reply is right or wrong (false: length, style); null: if rows have an answer"
    )


@dataclass
class GSM8KSettings(RowsSettings):
    """Grade-school word problems, from the hub or from a folder or file (env.path).

    A folder has train.jsonl and test.jsonl.
    """

    path: str = "openai/gsm8k"
    max_prompt_tokens: int = doc(2048, "longer prompts are an error that names the row")
    max_completion_tokens: int = doc(256, "most new tokens; longer completions are truncated")
    eval_limit: int = 64


@dataclass
class MathSettings(RowsSettings):
    """MATH and its like, answered in boxes and compared as expressions; rows of your own too (env.path)."""

    path: str = "DigitalLearningGmbH/MATH-lighteval"
    config: str | None = doc(None, "configuration of a hub dataset")
    verify_seconds: float = doc(5.0, "seconds one comparison may take; a longer one is unverified: 0", 0.01, 3600.0)
    max_prompt_tokens: int = doc(2048, "longer prompts are an error that names the row")
    max_completion_tokens: int = doc(1024, "most new tokens; longer completions are truncated")
    eval_limit: int = doc(100, "held-out prompts per evaluation in training, unless eval.limit says")


@dataclass
class IFEvalSettings(RowsSettings):
    """Prompts with instructions that a program checks (IFEval), from the hub, a folder or a file (env.path).

    The whole reply is judged, as the benchmark does, unless `answer_only`. To count as the benchmark
    does, play all prompts: held_out=1, where test is the split (rlpost eval).
    """

    path: str = "google/IFEval"
    answer_only: bool = doc(False, "true: ask for <think> and <answer> blocks, judge the first answer block only")
    leave_out: list[str] = doc([], "leave out rows with these kinds of instructions")
    max_prompt_tokens: int = doc(1024, "longer prompts are an error that names the row")
    max_completion_tokens: int = doc(512, "most new tokens; longer completions are truncated")
    eval_limit: int = doc(64, "held-out prompts per evaluation in training, unless eval.limit says")


@dataclass
class IFBenchSettings(IFEvalSettings):
    """Prompts with instructions of 58 more kinds that a program checks (IFBench), from hub, folder or file.

    Otherwise as IFEval's.
    """

    path: str = "allenai/IFBench_test"


# Problems and games made on the spot


class Operation(Enum):
    """An operation of the arithmetic environment, by its name; its value is its sign."""

    add = "+"
    subtract = "-"
    multiply = "*"


@dataclass
class ArithmeticSettings(MadeSettings):
    """Sums made on the spot; train and test share no pair of operands unless `held_out` is 0."""

    operations: list[Operation] = doc([Operation.add], "each problem draws one at random")
    digits: int = doc(2, "digits of each operand", 1, 9)


class CountdownOperation(Enum):
    """An operation of the countdown environment, by its name; its value is its sign."""

    add = "+"
    subtract = "-"
    multiply = "*"
    divide = "/"


@dataclass
class CountdownSettings(MadeSettings):
    """Countdown: make a target out of a few numbers, each used once; made on the spot.

    Train and test share no problem unless held_out=0.
    """

    repeats_with_limit: ClassVar = True

    min_numbers: int = doc(3, "fewest numbers to make the target of", at_least=2)
    max_numbers: int = doc(3, "most numbers to make the target of", at_most=10)
    max_number: int = doc(25, "largest of the numbers", at_least=1)
    max_target: int = doc(100, "largest target", at_least=1)
    operations: list[CountdownOperation] = doc(list(CountdownOperation), "allowed operations")
    limit: int | None = doc(None, "use only the first N problems; null: 10,000 per pass")
    max_completion_tokens: int = doc(128, "most new tokens; longer completions are truncated")
    max_prompt_tokens: int = doc(256, "longer prompts are an error that names the row")


class AnswerPlace(Enum):
    """The part of a reply that is the answer."""

    tags = "tags"  # between <answer> and </answer>
    reply = "reply"  # all of it


@dataclass
class ReasoningGymSettings(MadeSettings):
    """Puzzles of any of reasoning-gym's generators, made on the spot: env.task=leg_counting.

    Train and test share no question unless held_out=0.
    """

    repeats_with_limit: ClassVar = True

    task: str = doc(MISSING, "the generator, such as leg_counting")
    task_config: list[str] = doc([], "its own settings: [min_animals:2,max_animals:4]")
    answer_in: AnswerPlace = doc(AnswerPlace.tags, "which part of a reply is the answer")
    score_seconds: float = doc(5.0, "seconds one scoring may take; a longer one is unverified: 0", 0.01, 3600.0)
    limit: int | None = doc(None, "use only the first N problems; null: 10,000 per pass")
    max_prompt_tokens: int = doc(1024, "longer prompts are an error that names the row")
    max_completion_tokens: int = doc(512, "most new tokens; longer completions are truncated")
    eval_limit: int = doc(100, "held-out prompts per evaluation in training, unless eval.limit says")

    def __post_init__(self) -> None:
        super().__post_init__()
        named_values("env.task_config", self.task_config)


@dataclass
class GameSettings(MadeSettings):
    """Settings of games that run in this process, several turns of text each."""

    repeats_with_limit: ClassVar = True

    id: str = doc(MISSING, "name of the game")
    arguments: list[str] = doc([], "arguments of the game: [is_slippery:false]")
    success_return: float | None = doc(None, "return from which an episode counts as accurate; null: not measured")
    step_seconds: float = doc(10.0, "seconds the game may take for one move; longer is an error", 0.01, 3600.0)
    limit: int | None = doc(None, "use only the first N starts; null: 10,000 per pass")
    max_turns: int | None = doc(10, "moves in an episode")
    max_completion_tokens: int = doc(64, "most new tokens per turn; longer completions are truncated")
    eval_limit: int = doc(50, "held-out prompts per evaluation in training, unless eval.limit says")

    def __post_init__(self) -> None:
        super().__post_init__()
        named_values("env.arguments", self.arguments)


@dataclass
class TextGameSettings(GameSettings):
    """Games of gymnasium's registry, several turns of text each: env.id=FrozenLake-v1.

    Train and test share no start.
    """

    id: str = doc(MISSING, "name of the game: FrozenLake-v1, or MODULE:NAME", runs=CODE_IF_MODULE)
    moves: list[str] = doc([], "names of the actions 0, 1, ...; empty: their numbers, or texts")
    invalid_reward: float = doc(0.0, "reward of a reply that is not an action")
    max_prompt_tokens: int = doc(512, "longer prompts are an error that names the row")


def named_values(key: str, words: list[str]) -> dict[str, Any]:
    """Name -> value of words like `name:value`. Raises ConfigError for any other word."""
    if wrong := next((word for word in words if ":" not in word), None):
        raise ConfigError(f"{key}={wrong!r} names no setting: write '{key}=[name:value,other:value]'")
    return mapping_in(key, f"{{{', '.join(words)}}}", "[name:value,other:value]")


# A mix of environments


@dataclass(frozen=True)
class SourceText:
    """A source as written: `arithmetic digits=1 weight=3`; `name` is empty if none was given."""

    env: str
    name: str
    weight: float
    given: dict[str, str]  # the environment's own settings: key without env. -> text

    @classmethod
    def of(cls, text: str) -> SourceText:
        """Parse `text`. Raises ConfigError unless it is an environment and settings of it."""
        try:
            env, *words = shlex.split(text)
        except ValueError as error:  # it is empty, or a quote is not closed
            raise ConfigError(
                f'env.sources "{text}" cannot be read: write NAME key=value ..., as in arithmetic digits=1'
            ) from error
        given: dict[str, str] = {}
        for word in words:
            key, equals, value = word.partition("=")
            if not equals or not key:
                raise ConfigError(
                    f'env.sources "{text}": {word!r} is not a setting; write key=value, in quotes where it has spaces'
                )
            given[key] = value
        name, weight = given.pop("name", ""), given.pop("weight", "1")
        if not re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", weight) or float(weight) == 0:
            raise ConfigError(f'env.sources "{text}": weight={weight} is not a share; give a number above 0')
        return cls(env, name, float(weight), given)


@dataclass
class MixSettings(EnvSettings):
    """Several environments at once, in shares: 'env.sources=[arithmetic,gsm8k]'.

    A source is the name of an environment, as `env=NAME` takes it, then its settings without `env.`, and two of
    the source: `weight=` (1) and `name=`, its name in figures and rollouts (default: the environment's name).
    `limit` is how many prompts of the mix are used. The limits of tokens and turns are the largest of any source;
    a limit given here holds for all sources.
    """

    ends_itself: ClassVar = True  # each source checks that it does

    sources: list[str] = doc(
        MISSING,
        '[arithmetic,gsm8k], or with settings and shares: ["arithmetic digits=1 weight=3","ifeval path=FOLDER"]',
        runs=CODE,
    )
    eval_limit: int = doc(200, "held-out prompts per evaluation in training, unless eval.limit says")

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("system_prompt", "prompt_template"):
            if getattr(self, key) is not None:
                raise ConfigError(f'env.{key} is each source\'s own in a mix: write it there, as in "gsm8k {key}=..."')


# Tools


class ToolRole(Enum):
    """The role of the message that answers a call."""

    user = "user"
    tool = "tool"  # for models whose chat template has it


class PythonSandbox(Enum):
    """How the model's Python programs are isolated from this machine."""

    bubblewrap = "bubblewrap"  # no network, none of your files, another user
    limits = "limits"  # memory, time and processes only: a program can read and write what you can


@dataclass
class ToolsSettings(Settings, group="tools"):
    """Tools for environments of several turns: `tools.use=python env.max_turns=2`.

    Names are `python`, `mcp`, `browser` and tools that a plugin registers.
    """

    use: list[str] = doc([], "python, mcp, browser, or a tool that a plugin registers")
    describe: bool = doc(True, "describe the tools by the chat template; false: env.system_prompt says what to call")
    role: ToolRole | None = doc(
        None, "role of answers to calls; null: tool if calls are in the template's form, or user"
    )
    parser: str | None = doc(None, "plain, template or a parser of vLLM reads calls; null: by what the template writes")
    max_calls: int | None = doc(None, "most calls in a conversation; null: no limit", at_least=1)
    max_calls_per_turn: int | None = doc(8, "most calls in a turn, the rest refused; null: no limit", at_least=1)
    max_output_chars: int = doc(2000, "characters of an answer; the middle of a longer one is left out", at_least=100)
    timeout_seconds: float = doc(10.0, "seconds one call may take", above=0)
    python_sandbox: PythonSandbox = doc(
        PythonSandbox.bubblewrap, "bubblewrap, or limits (weaker: files and network reachable)", runs=SANDBOX
    )
    python_persistent: bool = doc(False, "true: variables last from turn to turn")
    python_memory_mb: int = doc(512, "megabytes of memory for one program", at_least=64)
    mcp_file: str | None = doc(
        None, 'JSON file with the servers, {"mcpServers": {name: {"command": ..., "args": [...]}}}', runs=PROGRAM
    )
    allowed_domains: list[str] = doc([], "domains the browser may visit, with their subdomains")

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [*BUILT_IN_TOOLS, *TOOLS]
        for name in self.use:
            if name not in known:
                hint = did_you_mean(nearest(name, known), f"there are {', '.join(known)}")
                raise ConfigError(f"tools.use names {name}, which is not a tool{hint}")
        if "mcp" in self.use and self.mcp_file is None:
            raise ConfigError("tools.use=mcp needs tools.mcp_file, the JSON file that names the servers")
        if "browser" in self.use and not self.allowed_domains:
            raise ConfigError("tools.use=browser may visit nothing: name tools.allowed_domains=example.org")

    def check_unused(self, of_any: Sequence[str] = ()) -> None:
        """Raise ConfigError for a changed setting of a tool that is not in `use`, except those `of_any` tool."""
        belongs = {"mcp_file": "mcp", "allowed_domains": "browser"}
        for each in fields(self):
            if each.name == "use" or each.name in of_any:
                continue
            tool = belongs.get(each.name, "python" if each.name.startswith("python_") else None)
            default = each.default_factory() if callable(each.default_factory) else each.default
            if getattr(self, each.name) != default and (tool not in self.use if tool else not self.use):
                needed = tool or "python, for example"
                raise ConfigError(f"tools.{each.name} means nothing without its tool: add tools.use={needed}")


def check_tools(env: EnvSettings, tools: ToolsSettings) -> None:
    """Raise ConfigError for settings of tools that are not there, and for tools in an environment of one turn.

    The model would never read their answers.
    """
    tools.check_unused(OF_ANY_TOOL if env.brings_tools else ())
    if tools.use and env.most_turns < 2:
        raise ConfigError(
            f"tools.use=[{', '.join(tools.use)}] with env.max_turns={env.max_turns} leaves no turn in which an answer "
            "is read: add env.max_turns=2 or more"
        )


def _check_template(template: str) -> None:
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"env.prompt_template={template!r} does not fit: {error}; write {{{{ and }}}} for braces"
        ) from None
    if inside := next((name for name in fields if "." in name), None):
        raise ConfigError(
            f"env.prompt_template={template!r} reaches into {{{inside}}}: name a column alone, as {{question}} is"
        )
    if not fields:
        raise ConfigError(
            f"env.prompt_template={template!r} has no field such as {{question}}: every prompt would be the same"
        )


LIMITS = ("max_prompt_tokens", "max_completion_tokens", "max_turns", "max_observation_tokens")  # of conversations


@dataclass(frozen=True)
class Source:
    """An environment as a part of a mix; no other source has its name."""

    name: str
    weight: float  # the source's share of the prompts is weight / sum of weights
    text: str
    settings: EnvSettings

    def within(self, mix: MixSettings) -> Source:
        """This source with the split of the mix, unless that is train, and no limit above the mix's."""
        own = self.settings
        limits = {key: min(filter(None, (getattr(own, key), getattr(mix, key))), default=None) for key in LIMITS}
        split = SourceText.of(self.text).given.get("split", "train") if mix.split == "train" else mix.split
        return replace(self, settings=replace(own, split=split, **limits))
