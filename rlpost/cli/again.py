"""`rlpost runs replay` and `rlpost runs reproduce`: one update of a run computed again, or the whole run done again."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlpost.catalog import TRAIN_EXPERT_ITERATION, TRAIN_GRPO, Command
from rlpost.cli.completion import complete_replayed, complete_run
from rlpost.cli.plan import compose_and_check, resolved
from rlpost.cli.run_folder import choose_folder
from rlpost.cli.terminal import DIM, StatusLine, painted, print_json, stdout_on_stderr
from rlpost.cli.train import Name, Out, Plain, load_training
from rlpost.cli.usage import App, AsJson
from rlpost.cli.views import table
from rlpost.errors import ConfigError
from rlpost.record import CODE, DATA, PRECISION
from rlpost.runs.kept import recorded_settings
from rlpost.runs.reader import RunRecord, code_of, find_run, read_run
from rlpost.settings.commands import RunRequest
from rlpost.text import counted, did_you_mean, nearest, paragraph, printable

if TYPE_CHECKING:
    from rlpost.runs.reproduction import Apart, Difference, Steps
    from rlpost.train.replay import Replay

REPLAY_EXAMPLES = """\
  rlpost runs replay my-run --step 31                 its loss, once more
  rlpost runs replay my-run --step 31 loss=cispo      and with another loss
  rlpost runs replay my-run advantage.estimator=rloo --json
"""
REPRODUCE_EXAMPLES = """\
  rlpost runs reproduce my-run
  rlpost runs reproduce my-run --steps 3 --name again
  rlpost runs reproduce my-run plugin=./my_env.py     its code, named again
"""
RUN_HELP = "A run's name or folder."
WIDTH = 80  # columns of what is printed
MOST_FIGURES = 8  # that are listed where runs differ
READ = {  # the keys of each training that change the gradient of completions that are there already
    TRAIN_GRPO: ("loss", "advantage", "overlong", "minibatch_size"),
    TRAIN_EXPERT_ITERATION: ("loss", "topk_size", "min_reward", "minibatch_size"),
}
ALSO_READ = ("model.autocast",)  # by each of them
NO_REWARD = "env.reward=number"  # in place of a reward of code: the recorded rewards are read
WHERE = ("model.device", "tokens_per_microbatch")  # keys that say where and how a replay computes, for both sides
RunName = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)]
app = App()


@app.command("replay", examples=REPLAY_EXAMPLES, short_help="Compute a step's update again, as it was or otherwise.")
def replay(
    run: RunName,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings of the loss, the advantage or which rows count, to compare with.",
            autocompletion=complete_replayed,
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The step; default: the last that can be replayed.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute a step's first update from the checkpoint before it and the recorded completions.

    Settings given behind the run are put beside it: what they would have made of the same completions. Nothing is
    sampled, and nothing is written.
    """
    record = read_run(find_run(run))
    with stdout_on_stderr() if as_json else nullcontext(), StatusLine("loading torch") as status:
        was, other, changed = _settings_of(record, overrides or [])
        from rlpost.train.replay import check_step
        from rlpost.train.replay import replay as replayed_step

        replayed = replayed_step(record, check_step(record, step), was, other, tell=status.now)
    if as_json:
        print_json(replay_dict(record.folder, replayed, changed))
    else:
        print("\n".join(replay_lines(record.folder, replayed, changed)))


@app.command("reproduce", examples=REPRODUCE_EXAMPLES, short_help="Do a run again, and compare it with the first time.")
def reproduce(
    run: RunName,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="The code that the run used (plugin=, env.reward=FILE); another setting counts as a difference.",
            autocompletion=complete_replayed,
        ),
    ] = None,
    name: Name = None,
    out: Out = None,
    steps: Annotated[int | None, typer.Option(metavar="K", min=1, help="Only the first K steps.")] = None,
    plain: Plain = False,
    as_json: AsJson = False,
) -> None:
    """Run a run again in a new folder, with its settings and seed, and compare every figure but time and memory.

    What differs in versions, code, data, machine and settings is named before training begins. Equality is promised
    with deterministic=true policy=transformers.
    """
    folder, words = find_run(run), overrides or []
    record, command = read_run(folder), _command_of(folder, words)
    last = min(steps or record.steps_done, record.steps_done)
    if not last:
        raise ConfigError(f"{folder} has no step to compare with: run it again with rlpost {command.verb}")
    kept = recorded_settings(folder, words, "rlpost runs reproduce")
    composed = compose_and_check(command, words, kept, as_json=as_json, run=folder)
    target = choose_folder(out, name, None, f"{folder.name}-again")
    with stdout_on_stderr() if as_json else nullcontext():
        with StatusLine("looking for differences"):
            from rlpost.envs.build import contents_of
            from rlpost.runs.folder import environment
            from rlpost.runs.reproduction import compare_steps, what_differs

            precision = record.environment.get(PRECISION) or {}
            composed = replace(composed, kept={**(composed.kept or {}), **precision})
            settings, kind = composed.settings, command.kind
            held_out = settings.env.held_out_for(settings.eval.limit) if settings.eval.enabled else None
            rows = {} if kind is None else {"shown_of": kind.shown_of}
            content = contents_of(settings.env, held_out, settings.seed, **rows)
            now = environment(settings.seed, composed.overrides, content)
            now[PRECISION] = precision
            differences = what_differs(record.environment, now, record.config, resolved(composed)[0].as_dict())
        print("\n".join(difference_lines(record, differences)))
        typed = ["rlpost", *command.verb.split(), *composed.overrides, "--out", str(target)]
        stops_after = None if last == record.total_steps else last
        request = RunRequest(target, None, composed.overrides, typed, composed.yaml, plain, composed.kept, stops_after)
        code = load_training(command)(composed.settings, request)
    again = read_run(target)
    if again.steps_done < last:
        raise typer.Exit(code or 1)
    found = what_differs(record.environment, again.environment, record.config, again.config)
    late = [each for each in found if each not in differences]
    compared = compare_steps(record.metrics, again.metrics, last)
    promised = composed.settings.deterministic
    if as_json:
        print_json(reproduction_dict(record, again, [*differences, *late], compared, promised))
        return
    shown = [f"differs  {printable(str(each))}" for each in late]
    print("\n".join([*shown, *verdict_lines(again, compared, promised, bool(differences or late))]))


def _command_of(folder: Path, words: Sequence[str]) -> Command[Any]:
    """The command of a run, which may be that of a plugin that the `words` name. Raises ConfigError if unknown."""
    from rlpost.config.plugins import without_plugins

    without_plugins(words)
    command = read_run(folder).command
    if command is None:
        raise ConfigError(
            f"{folder}: command.txt names no training that is known here; a plugin's needs plugin=FILE.py"
        )
    return command


def _settings_of(record: RunRecord, words: Sequence[str]) -> tuple[Any, Any, list[str]]:
    """The run's settings, those with the `words` given now (None without any), and the words that make the difference.

    Raises ConfigError for a run whose steps cannot be replayed, and for a word that changes no gradient.
    """
    from rlpost.config.code import choices_in, is_code
    from rlpost.config.compose import compose
    from rlpost.config.overrides import parse_words

    command = record.command
    if command is None or command not in READ:
        verbs = ", ".join(f"rlpost {each.verb}" for each in READ)
        raise ConfigError(
            f"{record.folder} is a run of rlpost {record.verb or '?'}: only steps of {verbs} can be replayed"
        )
    given = parse_words(words)
    choices = {"env": record.choice("env") or "none"} | choices_in(given)
    common = [str(each) for each in given if each.key in WHERE or is_code(each, choices)]
    changed = [str(each) for each in given if str(each) not in common]
    kept = recorded_settings(record.folder, [*words, NO_REWARD], "rlpost runs replay")
    if code_of([line for line in record.overrides if line.startswith("env.reward=")]):
        kept = [each for each in kept if each.key != "env.reward_weights"]
        common.append(NO_REWARD)
    known = (*READ[command], *ALSO_READ)
    for key in (word.partition("=")[0] for word in changed):
        if key not in known and key.partition(".")[0] not in READ[command]:
            hint = did_you_mean(nearest(key, known), f"it reads {', '.join((*known, *WHERE))}")
            raise ConfigError(f"{key} does not change the gradient of a recorded step{hint}")
    was, other = (compose(command, side, kept).settings for side in (common, [*common, *changed]))
    return was, other if changed else None, changed


# What replay prints


def replay_dict(folder: Path, replayed: Replay, words: Sequence[str]) -> dict[str, Any]:
    """A replay, for `--json`."""
    other = replayed.other
    return {
        "run": str(folder),
        "step": replayed.step,
        "checkpoint": str(replayed.weights_of) if replayed.weights_of else None,
        "updates": replayed.was.updates,
        "agrees": replayed.agrees,
        "tolerance": replayed.tolerance,
        "losses": {name: {"replayed": a, "recorded": b} for name, (a, b) in replayed.losses.items()},
        "log_probs_apart": replayed.log_probs_apart,
        "was": replayed.was.finite,
        "with": None if other is None else {"settings": list(words), **other.finite},
        "gradients": None if other is None else {"cosine": replayed.cosine, "norm_ratio": replayed.norm_ratio},
        "tokens_moved": replayed.moved,
    }


def replay_lines(folder: Path, replayed: Replay, words: Sequence[str]) -> list[str]:
    """A replay as text: whether it agrees with the record, the figures of both sides, and how the gradients differ."""
    weights = replayed.weights_of.name if replayed.weights_of else "the starting model"
    lines = [f"step {replayed.step} of {folder}, with the weights of {weights}"]
    lines += [f"{name}  recorded {_figure(b)}, replayed {_figure(a)}" for name, (a, b) in replayed.losses.items()]
    lines += [_agreement(replayed), ""]
    was, other = replayed.was.finite, {} if replayed.other is None else replayed.other.finite
    if other:
        lines.append(f"with {' '.join(words)}")
    rows = [("", "as it was", "with"), *((n, _figure(was.get(n)), _figure(other.get(n))) for n in {**was, **other})]
    lines += table(rows if other else [row[:2] for row in rows], WIDTH, right=(1, 2))
    if other:
        lines += ["", _gradients(replayed)]
    return [row for line in lines for row in paragraph(line, WIDTH)]


def _agreement(replayed: Replay) -> str:
    """Whether the replayed loss is the recorded one."""
    if replayed.agrees is None:
        updates = counted(replayed.was.updates, "update")
        verdict = f"the step made {updates}, and the recorded loss is a mean over them: replayed is the first"
    elif replayed.agrees:
        verdict = f"they agree (to {replayed.tolerance:g})"
    else:
        verdict = f"they do not agree (to {replayed.tolerance:g}): the run had other code, data, settings or precision"
    if replayed.log_probs_apart is not None:
        verdict += f"; log-probs of its tokens differ by {replayed.log_probs_apart:.1g} at most from the recorded"
    return verdict


def _gradients(replayed: Replay) -> str:
    """The angle and the lengths of the two gradients, and on how many tokens they differ."""
    if replayed.norm_ratio is None:
        return "as it was there is no gradient to compare with"
    direction = "one of them is 0" if replayed.cosine is None else f"cosine {replayed.cosine:.4f}"
    gradients = f"gradients: {direction}, the norm {replayed.norm_ratio:.4g} times as large"
    if not replayed.moved:
        return f"{gradients}; no token weighs otherwise: at a step's first update ratios are 1, and no clip bound acts"
    return f"{gradients}; {replayed.moved:,} of {replayed.was.figures['tokens']:,.0f} tokens have another weight"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value + 0.0:.7g}"


# What reproduce prints


def reproduction_dict(
    record: RunRecord, again: RunRecord, differences: Sequence[Difference], compared: Steps, promised: bool
) -> dict[str, Any]:
    """A reproduction, for `--json`."""
    return {
        "run": str(record.folder),
        "again": str(again.folder),
        "equal": compared.first_step is None,
        "promised": promised,
        "differences": [asdict(each) for each in differences],
        "not_recorded": _not_recorded(record),
        **asdict(compared),
    }


def difference_lines(record: RunRecord, differences: Sequence[Difference]) -> list[str]:
    """The lines that name each difference from a run, or say that there is none."""
    lines = [f"differs  {each}" for each in differences]
    if not lines:
        lines = ["nothing differs in versions, code, data, machine and settings"]
    if missing := _not_recorded(record):
        lines.append(f"{' and '.join(missing)} were not recorded, and are not compared")
    if len(record.commands) > 1:
        lines.append(f"the run was made in {len(record.commands)} attempts: its settings are those of the last")
    return [painted(row, DIM, sys.stdout) for line in lines for row in paragraph(line, WIDTH)]


def verdict_lines(again: RunRecord, compared: Steps, promised: bool, differ: bool) -> list[str]:
    """Whether the figures are equal, and how far they are apart."""
    folder, steps = shlex.quote(str(again.folder)), counted(compared.steps, "step")
    if compared.first_step is None:
        return [f"equal bit for bit: {steps}, every figure but time and memory ({folder})"]
    figures = counted(len(compared.first_figures), "figure")
    lines = [f"step {compared.first_step} is the first that differs, in {figures}:"]
    lines += _apart_lines(compared.first_figures)
    if any(each.step != compared.first_step for each in compared.apart):
        lines += [f"the most that they are apart in {steps}:", *_apart_lines(compared.apart)]
    if promised and differ:
        lines.append("equality is promised where nothing differs, and the differences above are named")
    elif promised:
        lines.append("equality was promised here, since nothing that was recorded differs: report it")
    else:
        lines.append("equality is not promised: that takes deterministic=true policy=transformers when the run is made")
    return [row for line in [*lines, f"the run is in {folder}"] for row in paragraph(line, WIDTH)]


def _apart_lines(figures: Sequence[Apart]) -> list[str]:
    shown = figures[:MOST_FIGURES]
    rows = [[each.name, f"{_figure(each.was)} -> {_figure(each.now)}", f"step {each.step}"] for each in shown]
    lines = table(rows, WIDTH, cuttable=(0,), indent=2)
    if (more := len(figures) - len(shown)) > 0:
        lines.append(f"  and {counted(more, 'figure')} more, which --json lists")
    return lines


def _not_recorded(record: RunRecord) -> list[str]:
    return [name for name in (CODE, DATA) if not record.environment.get(name)]
