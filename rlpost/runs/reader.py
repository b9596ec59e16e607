"""Run folders read back: find them, and read how far a run went and how it ended.

A process may be writing to the folder meanwhile: a missing file, or a line that is not whole yet, leaves its part of
the record empty. Imports nothing heavy.
"""

from __future__ import annotations

import datetime
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.config import paths
from rlpost.errors import ConfigError
from rlpost.files import MANIFEST, bytes_of, expanded, locked, slug
from rlpost.record import (
    ACCURACY,
    BEGAN,
    FACTS,
    FAILED,
    FINISHED,
    INCIDENT,
    LOSS,
    REWARD,
    STOPPED,
    TOTAL_STEPS,
    TRAINED_LOSSES,
    Fact,
    HeldOut,
    Interval,
    facts_in,
    has_evaluation,
    held_out,
    interval,
    late_mean,
    number,
    read_metrics,
    trained_loss,
)
from rlpost.text import did_you_mean, nearest

if TYPE_CHECKING:
    from rlpost.catalog import Command
    from rlpost.runs.diagnosis import Findings

LOG_END = 65536  # bytes at the end of log.txt that are searched for the run's end
_VERDICT = re.compile(rf"^\d{{4}}-\S+ \S+ [A-Z]+ ({BEGAN}|{FINISHED}|{STOPPED}|{FAILED})(.*)$", re.MULTILINE)


class RunState(Enum):
    """Whether a run goes on, or how it ended."""

    running = "running"  # a process holds its lock
    finished = "finished"
    stopped = "stopped"  # by Ctrl-C or SIGTERM
    failed = "failed"  # with an error, which log.txt has
    killed = "killed"  # log.txt has no end: the process was killed, or the machine went down
    unknown = "unknown"  # log.txt says nothing


@dataclass(frozen=True)
class RunRecord:
    """One run folder; each part is read when it is first asked for, and kept.

    All verbs ask it for what a run was given and what came of it. A file that is missing, or not whole, leaves its part
    empty.
    """

    folder: Path

    # What the run was given

    @cached_property
    def commands(self) -> list[str]:
        """The command line of each attempt."""
        return _text(self.folder / "command.txt").splitlines()

    @cached_property
    def overrides(self) -> list[str]:
        """The settings that were given, one word each."""
        return _text(self.folder / "overrides.txt").splitlines()

    @cached_property
    def config(self) -> dict[str, Any]:
        """All settings, as config.yaml nests them."""
        return _yaml(self.folder / "config.yaml")

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Machine, versions, code, data and facts of the last attempt, as environment.json has them."""
        return _json(self.folder / "environment.json")

    def part(self, name: str) -> dict[str, Any]:
        """The settings of a group in config.yaml, such as `model`."""
        return self.config.get(name) or {}

    def choice(self, group: str) -> str | None:
        """The option chosen for `group`, or its default; None if unknown."""
        words = [word.partition("=")[2] for word in self.overrides if word.startswith(f"{group}=")]
        return words[-1] if words else self._default_choices.get(group)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Dotted key -> value of every setting, and the chosen option of each group where it is known."""
        from rlpost.catalog import CHOICES
        from rlpost.config.schema import flat

        chosen = {group: option for group in CHOICES if (option := self.choice(group)) is not None}
        return chosen | flat(self.config)

    @cached_property
    def command(self) -> Command[Any] | None:
        """The command of the last attempt; None if command.txt does not name one that is known here."""
        from rlpost.catalog import COMMANDS

        words = self._last_words
        return next((c for c in COMMANDS if words[1 : 1 + len(c.verb.split())] == c.verb.split()), None)

    @property
    def verb(self) -> str | None:
        """The verb of the last attempt, a plugin's too; None where command.txt does not say."""
        if self.command is not None:
            return self.command.verb
        words = self._last_words
        return " ".join(words[1:3]) if words[1:2] == ["train"] else None

    @property
    def model_name(self) -> str | None:
        """The chosen option of model=, or the end of the path that replaced it."""
        if any(word.startswith("model.path=") for word in self.overrides):
            return slug(self.part("model").get("path", ""))
        return self.choice("model")

    @property
    def data(self) -> str:
        """The environment, and the path of its rows."""
        path = self.part("env").get("path")
        return (self.choice("env") or "unknown") + (f" ({path})" if path else "")

    @property
    def facts(self) -> list[Fact]:
        """The facts that the plan of the last attempt showed; of a run that recorded none, those of its settings."""
        if known := [fact for fact in facts_in(self.environment) if fact.value]:
            return known
        model = f"{self.model_name or 'unknown'} ({self.part('model').get('path', 'path unknown')})"
        facts = {"model": model, "data": self.data, "seed": str(self.config.get("seed", "unknown"))}
        return facts_in({FACTS: [{"name": name, "value": value} for name, value in facts.items()]})

    @property
    def versions(self) -> str:
        """The versions of rlpost, Python and the packages, in words; empty if environment.json has none."""
        found = {name: self.environment.get(name) for name in ("rlpost", "python")}
        found |= self.environment.get("packages", {})
        return ", ".join(f"{name} {version}" for name, version in found.items() if version)

    @property
    def machine(self) -> str:
        """The machine in words."""
        return f"{self.environment.get('cpu_count', '?')} cores, {self.environment.get('cuda') or 'no GPU'}"

    # How far it came, and how it ended

    @property
    def state(self) -> RunState:
        """Whether it goes on, or how it ended."""
        return self._end[0]

    @property
    def error(self) -> str:
        """The error of a failed run; otherwise empty."""
        return self._end[1]

    @cached_property
    def incident(self) -> dict[str, Any]:
        """The moment when an error ended it: `doing`, `step`, `error`, `traceback`; empty if none was recorded."""
        return _json(self.folder / INCIDENT)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None while they are unknown."""
        return self.environment.get(TOTAL_STEPS) or self.config.get("steps")

    @property
    def steps_done(self) -> int:
        """The last step that was recorded."""
        return max((row["step"] for row in self.metrics), default=0)

    @cached_property
    def updated(self) -> float:
        """Time of the last write, in seconds since the epoch."""
        return _last_write(self.folder)

    @property
    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, in the order of their steps."""
        return checkpoints(self.folder / "checkpoints")

    @property
    def to_go_on(self) -> str:
        """The command that goes on with the run. Resuming takes the settings from the folder, but no code."""
        if self.checkpoints:
            words = shlex.join([str(self.folder), *code_of(self.overrides)])
            return f"rlpost {self.verb or 'train grpo'} --resume {words}"
        says_where = any(word.partition("=")[0] in ("--out", "--name") for word in self._last_words)
        where = "" if says_where else f" --out {shlex.quote(str(self.folder))}"
        return f"the same command with --resume auto{where}"

    # Its figures

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl in their order."""
        return self._metrics[0]

    @property
    def damaged_lines(self) -> int:
        """How many lines of metrics.jsonl cannot be read: a crash or a write in progress leaves some."""
        return self._metrics[1]

    def points(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of each recorded value of `key`; steps without one are left out."""
        return [(row["step"], value) for row in self.metrics if (value := number(row, key)) is not None]

    def series(self, key: str) -> list[float]:
        """The recorded values of `key`, step by step; steps without one are left out."""
        return [value for _, value in self.points(key)]

    def last(self, key: str) -> float | None:
        """The latest recorded value of `key`."""
        return next((value for row in reversed(self.metrics) if (value := number(row, key)) is not None), None)

    @property
    def loss(self) -> float | None:
        """The main loss of the last step, where no completions are sampled."""
        return next((loss for key in TRAINED_LOSSES if (loss := self.last(key)) is not None), None)

    @property
    def late_reward(self) -> float | None:
        """The mean reward of the last quarter of the steps."""
        return late_mean(number(row, "reward/mean") for row in self.metrics)

    @property
    def late_loss(self) -> float | None:
        """The mean of the main loss in the last quarter of the steps."""
        return late_mean(map(trained_loss, self.metrics))

    @property
    def tokens(self) -> float:
        """Tokens sampled, or where nothing is sampled, trained on."""
        return sum(self.series("tokens/generated")) or sum(self.series("tokens/trained"))

    @property
    def seconds(self) -> float:
        """Time spent in steps, evaluations left out."""
        return sum(self.series("time/step"))

    def phases(self) -> dict[str, float]:
        """Seconds of the phases of the steps; while sampling goes on beside the training, those of the training."""
        names = ("wait", "train", "sync") if self.series("time/wait") else ("rollout", "reward", "train", "sync")
        return {name: sum(self.series(f"time/{name}")) for name in names}

    @property
    def diagnosis(self) -> Findings:
        """The symptoms that its figures and its last texts show."""
        from rlpost.runs.diagnosis import symptoms_of

        return symptoms_of(self.metrics, self.rollout_steps, self.rollouts)

    # Its evaluations on held-out data

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The metrics of each evaluation, in order; `interval` of rlpost.record reads a figure with its interval."""
        return [row for row in self.metrics if has_evaluation(row)]

    def evaluation(self, *, before: bool, until: int | None = None) -> dict[str, Any] | None:
        """The metrics of the evaluation before the first step, or of the latest one after it, `until` a step."""
        rows = [row for row in self.evaluations if (row["step"] == 0) == before]
        return next((row for row in reversed(rows) if until is None or row["step"] <= until), None)

    def intervals(self, key: str) -> list[tuple[int, Interval]]:
        """(step, figure with its interval) of a held-out figure, of each evaluation that has it."""
        return [(row["step"], figure) for row in self.evaluations if (figure := interval(row, key)) is not None]

    def before_and_after(self, key: str) -> tuple[Interval | None, Interval | None]:
        """A held-out figure of the evaluation before training, and of the latest one after it."""
        before, after = (interval(self.evaluation(before=first) or {}, key) for first in (True, False))
        return before, after

    def held_out(self, until: int | None = None) -> list[HeldOut]:
        """The held-out figures worth showing, before training and after it (at the latest after step `until`)."""
        return held_out(self.evaluation(before=True) or {}, self.evaluation(before=False, until=until) or {})

    # Its completions

    @cached_property
    def rollout_steps(self) -> list[int]:
        """The steps whose completions are kept, in order."""
        names = [path.stem.removeprefix("step-") for path in (self.folder / "rollouts").glob("step-*.parquet")]
        return sorted(int(name) for name in names if name.isdecimal())

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """The completions of a step; see `read_rollouts`, which raises DataError for a file that cannot be read."""
        from rlpost.runs.rollouts import read_rollouts  # loads pyarrow

        return read_rollouts(self.folder, step)

    # All of it, for JSON

    def summary(self) -> dict[str, Any]:
        """The run as one entry of `rlpost runs list --json`."""
        return {
            "name": self.folder.name,
            "folder": str(self.folder),
            "state": self.state.value,
            "error": self.error or None,
            "steps_done": self.steps_done,
            "steps": self.total_steps,
            "reward": self.last("reward/mean"),
            "loss": self.loss,
            **{
                f"{name}_{when}": found and found.as_dict()
                for name, key in (("accuracy", ACCURACY), ("held_out_reward", REWARD), ("held_out_loss", LOSS))
                for when, found in zip(("before", "after"), self.before_and_after(key), strict=True)
            },
            "model": self.model_name,
            "env": self.choice("env"),
            "updated": datetime.datetime.fromtimestamp(self.updated, datetime.UTC).isoformat(timespec="seconds"),
        }

    def details(self) -> dict[str, Any]:
        """The run as `rlpost runs show --json` prints it."""
        parts = ("commands", "overrides", "config", "environment", "seconds", "damaged_lines", "metrics")
        return {
            **self.summary(),
            **{name: getattr(self, name) for name in parts},
            "checkpoints": [str(path) for path in self.checkpoints],
            "bytes": bytes_of(self.folder),
            "symptoms": [vars(symptom) for symptom in self.diagnosis.symptoms],
        }

    # Read once

    @cached_property
    def _metrics(self) -> tuple[list[dict[str, Any]], int]:
        return read_metrics(self.folder / "metrics.jsonl")

    @cached_property
    def _last_words(self) -> list[str]:
        return shlex.split(self.commands[-1]) if self.commands else []

    @cached_property
    def _default_choices(self) -> dict[str, str]:
        from rlpost.config.schema import default_choices

        return {} if self.command is None else default_choices(self.command)

    @cached_property
    def _end(self) -> tuple[RunState, str]:
        """The state, and the error of a failed run."""
        if is_running(self.folder):
            return RunState.running, ""
        verdicts = _VERDICT.findall(_end_of(self.folder / "log.txt"))
        word, rest = verdicts[-1] if verdicts else ("", "")
        if word == FAILED:
            interrupted = rest.strip().startswith("KeyboardInterrupt")
            return (RunState.stopped, "") if interrupted else (RunState.failed, rest.strip())
        if word == STOPPED:
            return RunState.stopped, ""
        if word == FINISHED:
            return RunState.finished, ""
        if word == BEGAN:
            return RunState.killed, ""
        every_step = self.total_steps is not None and self.steps_done >= self.total_steps
        return RunState.finished if every_step else RunState.unknown, ""


def read_run(folder: Path) -> RunRecord:
    """The record of a run folder."""
    return RunRecord(folder)


def playable(run: Path) -> Path | None:
    """The run whose environment `run` stands for: itself, or if it learned from pairs the run that it began from.

    None where learning from pairs began from no run.
    """
    while (its := read_run(run)).command is not None and getattr(its.command.settings, "learns_from_pairs", False):
        earlier = run_of_model(str(its.part("model").get("path", "")))
        if earlier is None:
            return None
        run = earlier
    return run


def code_of(overrides: Iterable[str]) -> list[str]:
    """The words among a run's overrides that name code or programs, which no folder may: a command line names them."""
    from rlpost.config.code import choices_in, code_word
    from rlpost.config.overrides import Override

    parsed = [Override(key, text) for key, _, text in (word.partition("=") for word in overrides)]
    choices = choices_in(parsed)
    return [word for override in parsed if (word := code_word(override, choices))]


def evaluation_words(record: RunRecord) -> list[str] | None:
    """The words after `rlpost eval model=RUN` that play the run's environment: its code, which has to be named again.

    None where nothing can be evaluated: prompts without a reward, and pairs whose training began from no run.
    """
    played = playable(record.folder)
    if played is None:
        return None
    its = record if played == record.folder else read_run(played)
    env = its.part("env")
    if env.get("reward", True) in ([], None) and "factory" not in env and its.verb != "train sft":
        return None
    words = [word for word in code_of(its.overrides) if word.startswith(("env.", "tools.", "plugin="))]
    has_test = its.part("eval").get("enabled") is not False or env.get("held_out", 1.0)
    return words if has_test else [*words, "env.split=train"]


def is_running(folder: Path) -> bool:
    """Whether a process holds the lock of this run."""
    try:
        with (folder / ".lock").open() as lock:
            return not locked(lock, shared=True)
    except OSError:  # no lock file, or not ours to read
        return False


def find_runs(folder: Path) -> list[Path]:
    """The run folders in `folder`, including those one level further down (a sweep's), the newest first.

    If `folder` is a run folder, it is the only one. Raises ConfigError if the folder does not exist.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; see rlpost runs list")
    if paths.is_run_folder(folder):
        return [folder]
    return sorted(_runs_below(folder), key=_last_write, reverse=True)


def find_run(name: str | None) -> Path:
    """The run folder of a name or a path; None means the newest in runs/.

    Raises ConfigError, with the nearest name, if there is no such run.
    """
    if name is None:
        found = find_runs(paths.RUNS) if paths.RUNS.is_dir() else []
        if not found:
            raise ConfigError("there is no run in runs/ yet: begin one with rlpost train grpo, or give a run's path")
        return found[0]
    if run := run_at(name):
        return run
    if sweep := find_sweep(name):
        raise ConfigError(f"{name} is a sweep: name one of {', '.join(map(str, _runs_of_sweep(sweep))) or 'its jobs'}")
    if expanded(name).is_dir():
        raise ConfigError(f"{name} is not a run folder: it holds neither command.txt nor metrics.jsonl")
    folders = dict.fromkeys(folder for run in _runs_below(paths.RUNS) for folder in (run, run.parent))
    names = [text for folder in folders for text in (str(folder.relative_to(paths.RUNS)), str(folder))]
    raise ConfigError(f"there is no run {name}{did_you_mean(nearest(name, names), 'see rlpost runs list')}")


def run_at(name: str) -> Path | None:
    """The run folder of this name or path; None if there is none."""
    return next((folder for folder in places(name) if paths.is_run_folder(folder)), None)


def find_checkpoint(name: str, which: str | None) -> tuple[Path, Path]:
    """The run folder, and the folder of one of its checkpoints, not a link, for a run's or a checkpoint's name.

    Raises ConfigError if there is no such run or checkpoint.
    """
    given = expanded(name)
    if which is None and paths.is_checkpoint_folder(given):
        return given.resolve().parent.parent, given.resolve()
    run = find_run(name)
    saved = {path.name: path for path in checkpoints(run / "checkpoints")}
    if not saved:
        raise ConfigError(f"{run} has no finished checkpoint yet: resume it, or give another run")
    wanted = list(saved)[-1]
    if which == paths.BEST:
        wanted = (run / "checkpoints" / paths.BEST).resolve().name
    elif which not in (None, paths.LATEST):
        wanted = f"step-{which.removeprefix('step-').zfill(6)}"
    if wanted not in saved:
        raise ConfigError(f"{run} has no checkpoint {which}; it has {', '.join(saved)}")
    return run, saved[wanted]


def find_sweep(name: str) -> Path | None:
    """The folder of the sweep of this name or path; None if there is none."""
    return next((folder for folder in places(name) if (folder / paths.SWEEP_FILE).is_file()), None)


def runs_of(names: Sequence[str]) -> list[Path]:
    """The run folders of these names or paths; a sweep stands for its runs. Raises ConfigError as `find_run` does."""
    found = []
    for name in names:
        sweep = find_sweep(name)
        found += (sweep and _runs_of_sweep(sweep)) or [find_run(name)]
    return list(dict.fromkeys(found))


# The checkpoints of a run


def never_began(run: Path) -> bool:
    """Whether a run ended before it measured or saved anything."""
    metrics = run / "metrics.jsonl"
    return not (run / "checkpoints").exists() and not (metrics.is_file() and metrics.stat().st_size)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, in the order of their steps."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdecimal() and (path / MANIFEST).is_file()]
    return sorted(found, key=step_of)


def newest_checkpoint(folder: Path) -> Path | None:
    """`folder` itself if it is a complete checkpoint, else the last checkpoint of the run in it, or None."""
    if (folder / MANIFEST).is_file():
        return folder
    return next(reversed(checkpoints(folder / "checkpoints")), None)


def unfinished_saves(folder: Path) -> list[Path]:
    """Unfinished saves among the checkpoints in `folder`, left by processes that died."""
    return sorted(folder.glob(".step-*.incomplete"))


def passed_over(run: Path) -> list[Path]:
    """Incomplete checkpoints of a run that are newer than its newest complete one."""
    folder = run / "checkpoints"
    whole = checkpoints(folder)
    named = [path for path in folder.glob("step-*") if path.name[5:].isdecimal() and path not in whole]
    return sorted((path for path in named if not whole or step_of(path) > step_of(whole[-1])), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


def run_of_model(path: str) -> Path | None:
    """The run of a `model.path` that is a run, a checkpoint or a part of one; None for any other model."""
    folder = expanded(path)
    if paths.is_run_folder(folder):
        return folder
    whole = folder.resolve()
    run = next((each.parent.parent for each in (whole, whole.parent) if each.parent.name == "checkpoints"), None)
    if run is None or not paths.is_run_folder(run):
        return None
    return run.relative_to(Path.cwd()) if run.is_relative_to(Path.cwd()) else run


# Reading a folder


def _end_of(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - LOG_END))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _json(file: Path) -> dict[str, Any]:
    """The mapping in a JSON file; empty if there is none, or it is not whole."""
    try:
        return json.loads(_text(file))
    except ValueError:
        return {}


def _yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file; empty if there is none, or it is not whole."""
    import yaml

    try:
        content = yaml.load(_text(file), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # the first is in C
    except (ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _last_write(run: Path) -> float:
    times = [0.0]
    for name in ("command.txt", "metrics.jsonl", "log.txt"):
        with suppress(OSError):  # missing, or removed meanwhile
            times.append((run / name).stat().st_mtime)
    return max(times)


# Finding runs


def _runs_below(folder: Path, levels: int = 2) -> Iterator[Path]:
    if levels == 0 or not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            if paths.is_run_folder(path):
                yield path
            else:
                yield from _runs_below(path, levels - 1)


def _runs_of_sweep(sweep: Path) -> list[Path]:
    """The folders of a sweep's jobs that have begun, in the order of the jobs."""
    jobs = (sweep / job["name"] for job in _json(sweep / paths.SWEEP_FILE).get("jobs", ()))
    return [job for job in jobs if paths.is_run_folder(job)]


def places(name: str, root: Path = paths.RUNS) -> tuple[Path, Path]:
    """The folders that a name in `root`, or a path, may stand for."""
    path = expanded(name)
    return (path, root / path) if _is_path(name) else (root / path, path)


def _is_path(name: str) -> bool:
    return "/" in name or name.startswith((".", "~"))
