"""`rlpost doctor`: tries a training on a few rows, and reports in a minute what would go wrong."""

from __future__ import annotations

import os
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlpost.catalog import TRAIN_DISTILL, TRAIN_DPO, TRAIN_GRPO, TRAIN_SFT
from rlpost.cli.completion import complete_training
from rlpost.cli.terminal import GREEN, RED, YELLOW, StatusLine, painted, print_json, stdout_on_stderr
from rlpost.cli.usage import AsJson
from rlpost.errors import ConfigError
from rlpost.output import output_aside, where_it_leads
from rlpost.text import counted, printable

if TYPE_CHECKING:
    from rlpost.doctor.examine import Finding

FAILED = 3
STYLES = {"ok": GREEN, "warning": YELLOW, "error": RED}
VERBS = {"grpo": TRAIN_GRPO, "sft": TRAIN_SFT, "dpo": TRAIN_DPO, "distill": TRAIN_DISTILL}
EXAMPLES = """\
  rlpost doctor
  rlpost doctor grpo model=qwen env=gsm8k optim.lr=1e-6
  rlpost doctor sft env=dataset env.path=chats.jsonl
  rlpost doctor distill teacher=runs/my-run
"""


def doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[grpo|sft|dpo|distill] [KEY=VALUE]...",
            help="The training (default: grpo) and its settings.",
            autocompletion=complete_training,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run folder that would be written.")] = None,
    as_json: AsJson = False,
) -> None:
    """Try everything that a training does on a few rows, and say what is wrong: before time is spent.

    Takes what rlpost train takes; writes nothing. Ends with 3 where there is an error.
    """
    from rlpost.cli.plan import compose_and_check
    from rlpost.cli.run_folder import first_free

    verb, given = "grpo", words or []
    if given and "=" not in given[0]:
        verb, *given = given
    if verb not in VERBS:
        raise ConfigError(f"rlpost doctor examines {', '.join(VERBS)}, not {verb}")
    composed = compose_and_check(VERBS[verb], given, as_json=as_json)
    if composed.environment_note:
        print(printable(composed.environment_note), file=sys.stderr)
    folder = out or first_free(composed.stem)

    def tell(finding: Finding) -> None:
        if not as_json:
            status.make_way()
            os.write(answer, f"{_line(finding)}\n".encode())

    with (
        where_it_leads(1) as answer,
        StatusLine("loading torch") as status,
        stdout_on_stderr() if as_json else nullcontext(),
    ):
        from rlpost.doctor.examine import Findings, examine

        findings = Findings(tell)
        with output_aside():
            examine(VERBS[verb], composed.settings, folder, findings, status.now)
    counts = Counter(finding.level for finding in findings.all)
    if as_json:
        print_json(
            {
                "training": verb,
                "findings": [{"level": f.level, "about": f.about, "text": f.text, "fix": f.fix} for f in findings.all],
                **{level: counts[level] for level in STYLES},
            }
        )
    else:
        print(f"\n{counted(counts['error'], 'error')}, {counted(counts['warning'], 'warning')}")
    if findings.failed:
        raise typer.Exit(FAILED)


def _line(finding: Finding) -> str:
    level = painted(finding.level.ljust(7), STYLES[finding.level], sys.stdout)
    fix = f"; {finding.fix}" if finding.fix else ""
    return f"{level}  {printable(f'{finding.about}: {finding.text}{fix}')}"
