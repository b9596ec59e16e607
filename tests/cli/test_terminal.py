"""What reaches the terminal: text fitted to columns, and stdout kept free of what engines print."""

from __future__ import annotations

import subprocess
import sys

from rlpost.text import paragraph


def test_a_paragraph_breaks_between_words_and_keeps_its_lines() -> None:
    assert paragraph("123 456 7890\n  12", 8) == ["123 456", "7890", "  12"]
    assert paragraph("abcdefghij", 4) == ["abcd", "efgh", "ij"]
    assert paragraph("", 4) == [""]
    assert paragraph("漢字漢", 5) == ["漢字", "漢"]


def test_a_long_paragraph_is_cut_with_a_count() -> None:
    text = "aa\nbbb\ncccc\nddddd"
    cut = paragraph(text, 10, 2)
    assert (cut[:2], cut[2].split()[:2]) == (["aa", "bbb"], ["…", "10"])
    cut = paragraph(text, 10, 2, keep_end=True)
    assert (cut[0].split()[:2], cut[1:]) == (["…", "7"], ["cccc", "ddddd"])
    assert paragraph(text, 10, 3) == ["aa", "bbb", "cccc", "ddddd"]  # the count would take the fourth line as well


def test_everything_goes_to_stderr_meanwhile_even_a_subprocess() -> None:
    program = (
        "import subprocess\n"
        "from rlpost.cli.terminal import stdout_on_stderr\n"
        "with stdout_on_stderr():\n"
        "    print('engine')\n"
        "    subprocess.run(['echo', 'child'])\n"
        "print('result')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "result\n"
    assert sorted(done.stderr.split()) == ["child", "engine"]
