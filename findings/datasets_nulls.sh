#!/usr/bin/env bash
# datasets 5.2.0: the same rows have other calls, depending on the reader.
#
# Guess: Dataset.from_list and load_dataset("json") give one list of rows back alike, so tool calls can be kept in either.
# Seen: from_list makes one struct of all objects in a column. Each call then has the arguments of every other call, as
# None, and each message a key tool_calls; a chat template writes the None as an argument. The reader of JSON lines gives
# objects of unlike keys a column of JSON, and returns them as they were written. A Parquet file made from the first keeps
# its Nones, one made from the second does not.
#
# Exits with 1 if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0
cat > "$folder/see.py" <<'P'
import json
import sys
from pathlib import Path

from datasets import Dataset, load_dataset

folder = Path(sys.argv[1])


def row(name, arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]}


rows = [row("sky", {"city": "Oslo"}), row("add", {"a": 1, "b": 2})]
(folder / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
ways = {
    "from_list": Dataset.from_list(rows),
    "JSON lines": load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "c")),
}
for name, made in list(ways.items()):
    made.to_parquet(str(folder / f"{name}.parquet"))
    file = str(folder / f"{name}.parquet")
    ways[f"{name}, then Parquet"] = load_dataset("parquet", data_files=file, split="train", cache_dir=str(folder / "p"))
seen = {}
for name, made in ways.items():
    user, said = made[0]["messages"]
    seen[name] = said["tool_calls"][0]["function"]["arguments"], "tool_calls" in user
    print(f"{name}: arguments {seen[name][0]}, the user's message has tool_calls: {seen[name][1]}")
filled, kept = ({"city": "Oslo", "a": None, "b": None}, True), ({"city": "Oslo"}, False)
wanted = {"from_list": filled, "JSON lines": kept, "from_list, then Parquet": filled, "JSON lines, then Parquet": kept}
if seen != wanted:
    sys.exit("it is otherwise now")
P
"$folder/venv/bin/python" "$folder/see.py" "$folder"
