"""Run folders read back: find them, and read how far a run went and how it ended.

A process may be writing to the folder meanwhile: a missing file, or a line that is not whole yet, leaves its part of
the record empty. Imports nothing heavy.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rlpost.catalog import COMMANDS, Command
from rlpost.config import paths
from rlpost.config.schema import default_choices
from rlpost.errors import ConfigError
from rlpost.files import expanded, locked, slug
from rlpost.record import (
    BEGAN,
    FACTS,
    FAILED,
    FINISHED,
    STOPPED,
    TOTAL_STEPS,
    Fact,
    Interval,
    facts_in,
    has_evaluation,
    interval,
    number,
    read_metrics,
)
from rlpost.settings.base import NAME
from rlpost.settings.commands import says_where
from rlpost.text import did_you_mean, nearest

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
    """One run folder, read once.

    `metrics` are the lines of metrics.jsonl in their order; `damaged_lines` counts the unreadable ones, which a crash
    or a write in progress leaves. `commands` has one command line per attempt.
    """

    folder: Path
    state: RunState
    error: str  # of a failed run
    metrics: list[dict[str, Any]]
    damaged_lines: int
    commands: list[str]
    overrides: list[str]
    config: dict[str, Any]
    environment: dict[str, Any]
    updated: float  # time of the last write, in seconds since the epoch

    def part(self, name: str) -> dict[str, Any]:
        """The settings of a group in config.yaml, such as `model`; empty if the key holds something else."""
        part = self.config.get(name)
        return part if isinstance(part, dict) else {}

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None while they are unknown."""
        return _total_steps(self.config, self.environment)

    @property
    def facts(self) -> list[Fact]:
        """The facts that the plan of the last attempt showed; of a run that recorded none, those of its settings."""
        if known := [fact for fact in facts_in(self.environment) if fact.value]:
            return known
        model = f"{self.model_name or 'unknown'} ({self.part('model').get('path', 'path unknown')})"
        facts = {"model": model, "data": self.data, "seed": str(self.config.get("seed", "unknown"))}
        return facts_in({FACTS: [{"name": name, "value": value} for name, value in facts.items()]})

    @property
    def model_name(self) -> str | None:
        """The chosen option of model=, or the end of the path that replaced it."""
        if any(word.startswith("model.path=") for word in self.overrides):
            path = self.part("model").get("path")
            return slug(path) if isinstance(path, str) else None
        return self.choice("model")

    @property
    def data(self) -> str:
        """The environment, and the path of its rows."""
        path = self.part("env").get("path")
        return (self.choice("env") or "unknown") + (f" ({path})" if path else "")

    def phases(self) -> dict[str, float]:
        """Seconds of the phases of the steps; while sampling goes on beside the training, those of the training."""
        names = ("wait", "train", "sync") if self.series("time/wait") else ("rollout", "reward", "train", "sync")
        return {name: sum(self.series(f"time/{name}")) for name in names}

    @property
    def versions(self) -> str:
        """The versions of rlpost, Python and the packages, in words; empty if environment.json has none."""
        packages = self.environment.get("packages")
        found = {"rlpost": self.environment.get("rlpost"), "python": self.environment.get("python")}
        found |= packages if isinstance(packages, dict) else {}
        return ", ".join(f"{name} {version}" for name, version in found.items() if version)

    @property
    def machine(self) -> str:
        """The machine in words."""
        return f"{self.environment.get('cpu_count', '?')} cores, {self.environment.get('cuda') or 'no GPU'}"

    @property
    def says_where(self) -> bool:
        """Whether the last attempt's command names the run's folder, so that it can be typed again."""
        return bool(self.commands) and says_where(words_of(self.commands[-1]))

    @property
    def steps_done(self) -> int:
        """The last step that was recorded."""
        return max((row["step"] for row in self.metrics), default=0)

    @property
    def seconds(self) -> float:
        """Time spent in steps, evaluations left out."""
        return sum(self.series("time/step"))

    def series(self, key: str) -> list[float]:
        """The recorded values of `key`, step by step; steps without one are left out."""
        return [value for row in self.metrics if (value := number(row, key)) is not None]

    def last(self, key: str) -> float | None:
        """The latest recorded value of `key`."""
        return next(iter(reversed(self.series(key))), None)

    def evaluation(self, *, before: bool) -> dict[str, Any] | None:
        """The metrics of the evaluation before the first step, or of the latest one after it."""
        rows = [row for row in self.metrics if (row["step"] == 0) == before and has_evaluation(row)]
        return rows[-1] if rows else None

    def before_and_after(self, key: str) -> tuple[Interval | None, Interval | None]:
        """A held-out figure of the evaluation before training, and of the latest one after it."""
        before, after = (interval(self.evaluation(before=first) or {}, key) for first in (True, False))
        return before, after

    def choice(self, group: str) -> str | None:
        """The option chosen for `group`, or its default; None if unknown."""
        words = [word.partition("=")[2] for word in self.overrides if word.startswith(f"{group}=")]
        command = _command(self.commands)
        default = {} if command is None else default_choices(command)
        return words[-1] if words else default.get(group)


def read_run(folder: Path) -> RunRecord:
    """The record of a run folder."""
    metrics, damaged = read_metrics(folder / "metrics.jsonl")
    config, environment = (_mapping(folder / name) for name in ("config.yaml", "environment.json"))
    total = _total_steps(config, environment)
    done = max((row["step"] for row in metrics), default=0)
    state, error = _state(folder, finished=total is not None and done >= total)
    return RunRecord(
        folder=folder,
        state=state,
        error=error,
        metrics=metrics,
        damaged_lines=damaged,
        commands=_text(folder / "command.txt").splitlines(),
        overrides=_text(folder / "overrides.txt").splitlines(),
        config=config,
        environment=environment,
        updated=_last_write(folder),
    )


def command_of(folder: Path) -> Command[Any] | None:
    """The command of a run's last attempt; None if command.txt does not name one."""
    return _command(_text(folder / "command.txt").splitlines())


def playable(run: Path) -> Path | None:
    """The run whose environment `run` stands for: itself, or if it learned from pairs the run that it began from.

    None where learning from pairs began from no run.
    """
    while (its := command_of(run)) is not None and getattr(its.settings, "learns_from_pairs", False):
        earlier = paths.run_of_model(str(read_run(run).part("model").get("path", "")))
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
    if env.get("reward", True) in ([], None) and "factory" not in env and verb_of(played) != "train sft":
        return None
    words = [word for word in code_of(its.overrides) if word.startswith(("env.", "tools.", "plugin="))]
    has_test = its.part("eval").get("enabled") is not False or env.get("held_out", 1.0)
    return words if has_test else [*words, "env.split=train"]


def verb_of(folder: Path) -> str | None:
    """The verb that a run's last attempt was of, a plugin's too; None where command.txt does not say."""
    attempts = _text(folder / "command.txt").splitlines()
    if (command := _command(attempts)) is not None:
        return command.verb
    words = words_of(attempts[-1]) if attempts else []
    return " ".join(words[1:3]) if words[1:2] == ["train"] and NAME.fullmatch("".join(words[2:3])) else None


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
        raise ConfigError(f"{folder} is not a folder{_near(folder)}")
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
    path = expanded(name)
    for candidate in _places(name):
        if paths.is_run_folder(candidate):
            return candidate
    if sweep := find_sweep(name):
        raise ConfigError(f"{name} is a sweep: name one of {', '.join(map(str, _runs_of_sweep(sweep))) or 'its jobs'}")
    if path.is_dir():
        raise ConfigError(f"{name} is not a run folder: it holds neither command.txt nor metrics.jsonl")
    if _is_path(name):
        raise ConfigError(f"{name} does not exist{_near(path)}")
    folders = dict.fromkeys(folder for run in _runs_below(paths.RUNS) for folder in (run, run.parent))
    names = [str(folder.relative_to(paths.RUNS)) for folder in folders]
    raise ConfigError(f"there is no run {name}{did_you_mean(nearest(name, names), 'see rlpost runs list')}")


def find_sweep(name: str) -> Path | None:
    """The folder of the sweep of this name or path; None if there is none."""
    return next((folder for folder in _places(name) if (folder / paths.SWEEP_FILE).is_file()), None)


def runs_of(names: Sequence[str]) -> list[Path]:
    """The run folders of these names or paths; a sweep stands for its runs. Raises ConfigError as `find_run` does."""
    found = []
    for name in names:
        sweep = find_sweep(name)
        found += (sweep and _runs_of_sweep(sweep)) or [find_run(name)]
    return list(dict.fromkeys(found))


# Reading a folder


def _state(folder: Path, *, finished: bool) -> tuple[RunState, str]:
    """The run's state, and its error if it failed; `finished`: every step is recorded."""
    if is_running(folder):
        return RunState.running, ""
    verdicts = _VERDICT.findall(_end_of(folder / "log.txt"))
    word, rest = verdicts[-1] if verdicts else ("", "")
    if word == FAILED:
        interrupted = rest.strip().startswith("KeyboardInterrupt")
        return (RunState.stopped, "") if interrupted else (RunState.failed, rest.strip())
    if word == STOPPED:
        return RunState.stopped, ""
    if word == FINISHED or (not word and finished):
        return RunState.finished, ""
    return (RunState.killed if word == BEGAN else RunState.unknown), ""


def _end_of(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - LOG_END))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def _total_steps(config: Mapping[str, Any], environment: Mapping[str, Any]) -> int | None:
    steps = environment.get(TOTAL_STEPS) or config.get("steps")
    return steps if isinstance(steps, int) else None


def _command(attempts: Sequence[str]) -> Command[Any] | None:
    words = words_of(attempts[-1]) if attempts else []
    return next((c for c in COMMANDS if words[1 : 1 + len(c.verb.split())] == c.verb.split()), None)


def words_of(command: str) -> list[str]:
    """The words of a line of command.txt."""
    try:
        return shlex.split(command)
    except ValueError:  # a truncated line
        return command.split()


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _mapping(file: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; empty if there is none, or it is not whole."""
    import yaml

    try:
        if file.suffix == ".json":
            content = json.loads(_text(file))
        else:
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
    jobs = (sweep / job["name"] for job in _mapping(sweep / paths.SWEEP_FILE).get("jobs", ()))
    return [job for job in jobs if paths.is_run_folder(job)]


def _places(name: str) -> tuple[Path, Path]:
    """The folders that a name or path may stand for."""
    path = expanded(name)
    return (path, paths.RUNS / path) if _is_path(name) else (paths.RUNS / path, path)


def _is_path(name: str) -> bool:
    return "/" in name or name.startswith((".", "~"))


def _near(missing: Path) -> str:
    """A hint at a folder of a similar name beside the missing one."""
    above = missing.parent
    names = [path.name for path in above.iterdir() if path.is_dir()] if above.is_dir() else []
    near = nearest(missing.name, names)
    return did_you_mean(str(above / near) if near else None, "see rlpost runs list")
