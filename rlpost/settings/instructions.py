"""Settings of the environments whose prompts hold instructions that a program can check."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpost.settings.env import RowsSettings


@dataclass
class IFEvalSettings(RowsSettings):
    """IFEval's prompts with verifiable instructions: a folder with train.jsonl, one file, or the hub's.

    The whole reply is judged, as the benchmark does, unless `answer_only`. To count as the benchmark
    does, play all prompts: held_out=1, where test is the split (rlpost eval).
    """

    path: str = "google/IFEval"
    answer_only: bool = False  # true: ask for <think> and <answer> blocks, judge the first answer block only
    leave_out: list[str] = field(default_factory=list)  # kinds of instructions whose rows are left out
    max_prompt_tokens: int = 1024  # a longer prompt is an error that names its row
    max_completion_tokens: int = 512  # a longer completion is cut
    eval_limit: int = 64  # held-out prompts an evaluation during training plays, unless eval.limit says


@dataclass
class IFBenchSettings(IFEvalSettings):
    """IFBench's prompts with verifiable instructions of 58 other kinds; otherwise as IFEval's."""

    path: str = "allenai/IFBench_test"
