"""IFBench's 58 kinds of verifiable instructions (Pyatkin et al. 2025, arXiv:2507.02833).

The classes of `if_verifiable` check 57 of them. A span that begins at word 0 is checked here: the
original takes that 0 for no argument and draws a random one.
"""

from __future__ import annotations

from rlpost.rewards.ifeval import Check, InstructionSet


def _repeat_span(prompt_to_repeat: str, n_start: int, n_end: int) -> Check:
    span = prompt_to_repeat.lower().split()[n_start:n_end]
    return lambda text: text.lower().split() == span


IFBENCH = InstructionSet(
    name="IFBench",
    own={"repeat:repeat_span": _repeat_span},
    nltk_data={
        "ratio:stop_words": ("stopwords",),
        "words:start_verb": ("punkt_tab", "averaged_perceptron_tagger_eng"),
        "words:keywords_specific_position": ("punkt_tab",),
        "words:words_position": ("punkt_tab",),
        "format:title_case": ("punkt_tab",),
    },
)

verdicts = IFBENCH.verdicts
