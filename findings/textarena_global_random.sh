#!/usr/bin/env bash
# textarena 0.7.4: two games with one seed and the same moves differ if they are played in turn.
#
# Guess: env.reset(seed=7) gives a game a generator of its own, as gymnasium's does, so that games of one seed which hear the
# same moves go the same way.
# Seen: reset seeds Python's process-wide random, and a step draws from that. Played one after the other, two games of
# 2048-v0 have the same boards; played in turn, as a batch of conversations is, they have other boards after the first
# move. A game played again from its moves is only the same if nothing else in the process has drawn meanwhile.
#
# Exits with 1 if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet textarena==0.7.4
cat > "$folder/see.py" <<'P'
import sys

import textarena

MOVES = ["[up]", "[left]", "[down]", "[right]"] * 2


def begun():
    game = textarena.make("2048-v0")
    game.reset(num_players=1, seed=7)
    return game


def board(game):
    return str(game.state.game_state["board"])


def after(games):
    for move in MOVES:
        for game in games:
            game.step(move)
    return [board(game) for game in games]


[first], [second] = after([begun()]), after([begun()])
together = after([begun(), begun()])
print("one after the other:", "the same" if first == second else "other boards")
print("in turn:", "the same" if together[0] == together[1] else "other boards")
if first != second or together[0] == together[1]:
    sys.exit("it is otherwise now")
P
"$folder/venv/bin/python" "$folder/see.py"
