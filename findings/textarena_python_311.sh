#!/usr/bin/env bash
# textarena 0.7.4: says that it runs on Python 3.10 and newer, and six of its games do not on 3.11; one runs nowhere.
#
# Guess: a package whose metadata reads Requires-Python >=3.10 has modules that Python 3.11 can read, and a game that
# textarena lists can be made.
# Seen: pip installs it on Python 3.11 and `import textarena` works, since each game's module is imported when the game is
# made. Five modules use quotes of the same kind inside f-strings, which is Python 3.12's syntax: textarena.make of
# Checkers-v0, Chess-v0, IteratedStagHunt-v0, ReverseTicTacToe-v0 and UltimateTexasHoldem-v0 raises SyntaxError. Klondike-v0
# raises it on Python 3.12 and 3.13 too (an elif behind an else). The last two are games for one player.
#
# Needs Python 3.11: PYTHON=python3.11. Exits with 1 if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet textarena==0.7.4
cat > "$folder/see.py" <<'P'
import sys

import textarena

EXPECTED = {
    "Checkers-v0",
    "Chess-v0",
    "IteratedStagHunt-v0",
    "Klondike-v0",
    "ReverseTicTacToe-v0",
    "UltimateTexasHoldem-v0",
}
refused = set()
for game in sorted(EXPECTED | {"GuessTheNumber-v0", "2048-v0", "Sudoku-v0"}):
    try:
        textarena.make(game)
    except SyntaxError as error:
        refused.add(game)
        print(f"{game}: {error}")
    else:
        print(f"{game}: made")
if sys.version_info[:2] != (3, 11) or refused != EXPECTED:
    sys.exit("it is otherwise now")
P
"$folder/venv/bin/python" "$folder/see.py"
