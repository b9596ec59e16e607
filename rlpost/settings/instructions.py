"""Settings of the environments whose prompts hold instructions that a program can check."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpost.settings.checks import between
from rlpost.settings.env import EnvSettings


@dataclass
class IFEvalSettings(EnvSettings):
    """IFEval's prompts with verifiable instructions: a folder with train.jsonl, one file, or the hub's.

    The whole reply is judged, as the benchmark does, unless `answer_only`. To count as the benchmark
    does, play all prompts: held_out=1, where test is the split (rlpost eval).
    """

    path: str = "google/IFEval"  # folder, file or hub id
    answer_only: bool = False  # true: ask for <think> and <answer> blocks, judge the first answer block only
    leave_out: list[str] = field(default_factory=list)  # kinds of instructions whose rows are left out
    held_out: float = 0.1  # share of the prompts kept for test where no file of its own holds that split
    shuffle: bool = True  # false: rows in the order of the file
    seed: int = 0  # of the order in which prompts are drawn
    max_prompt_tokens: int = 1024  # a longer prompt is an error that names its row
    max_completion_tokens: int = 512  # a longer completion is cut
    eval_limit: int = 64  # held-out prompts an evaluation during training plays, unless eval.limit says

    def __post_init__(self) -> None:
        super().__post_init__()
        between("env.held_out", self.held_out, 0.0, 1.0)


@dataclass
class IFBenchSettings(IFEvalSettings):
    """IFBench's prompts with verifiable instructions of 58 other kinds; otherwise as IFEval's."""

    path: str = "allenai/IFBench_test"  # folder, file or hub id
