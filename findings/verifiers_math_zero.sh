#!/usr/bin/env bash
# verifiers 0.4.0 with math-verify 0.9.0: a right answer earns 0 outside the main thread, without an error.
#
# Guess: a check of a boxed answer is a function of two texts, and where it cannot work it raises.
# Seen: math-verify limits its time with an alarm, which Python allows in the main thread alone; elsewhere it raises a
# ValueError. verifiers takes every exception of it for a wrong answer. So verify_boxed_math_answer gives 1.0 to a right
# answer in the main thread, and 0.0 to the same one where a trainer scores in a thread or through asyncio.to_thread.
#
# Exits with 1 if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet verifiers==0.4.0 math-verify==0.9.0
cat > "$folder/see.py" <<'P'
import asyncio
import sys

from verifiers.v1 import verify_boxed_math_answer

here = verify_boxed_math_answer("\\boxed{1/2}", "0.5")
there = asyncio.run(asyncio.to_thread(verify_boxed_math_answer, "\\boxed{1/2}", "0.5"))
print(f"in the main thread {here}, in another {there}")
if (here, there) != (1.0, 0.0):
    sys.exit("it is otherwise now")
P
"$folder/venv/bin/python" "$folder/see.py"
