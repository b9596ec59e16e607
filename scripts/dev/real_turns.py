"""Turns in the words of five makers' tokenizers and templates, on small random models.

    scripts/dev/turns FOLDER [NAME ...]

The files are those of scripts/dev/tokenizers, and trl's template of gpt-oss from scripts/dev/templates; both are kept
in FOLDER. For each maker: chats with and without thoughts are fine-tuned on, and the ids that are read and trained
equal those of texts written here by hand; a game of two turns with the Python tool goes on as written here with
`env.history=keep`, and with `as_template` each prompt has the ids that vLLM's own server gives for the same messages
(gpt-oss: that `apply_chat_template` gives); `rlpost train sft`, `dpo` and `grpo`, both ways, take a step with a
gradient. Prints a line for each maker and exits with 1 if anything differs.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from real_tokenizers import fetched, quiet, write_model
from templates import PACKAGES
from templates import fetched as unpacked
from tokenizers import Tokenizer

from rlpost.cli.main import run as rlpost
from rlpost.data.conversation import Conversation
from rlpost.data.demonstrations import Demonstration
from rlpost.data.encoding import Encoder
from rlpost.data.habits import reply_text
from rlpost.envs.build import add_tools
from rlpost.envs.chat import DatasetChatEnv
from rlpost.envs.checks import check_template
from rlpost.model.tokenizer import load_tokenizer
from rlpost.policies.scripted import ScriptedPolicy
from rlpost.settings import ModelSettings, ToolsSettings
from rlpost.settings.env import Turns

Message = dict[str, Any]
U1, U2 = {"role": "user", "content": "2 + 2?"}, {"role": "user", "content": "3 + 3?"}
A1, A2 = {"role": "assistant", "content": "Four."}, {"role": "assistant", "content": "Six."}
PROGRAM = "print(2 + 2)"
SERVER_SECONDS = 300.0


def thinking(message: Message) -> Message:
    """The message with a thought in its content."""
    return {**message, "content": f"<think>\nHm.\n</think>\n\n{message['content']}"}


@dataclass(frozen=True)
class Maker:
    """A tokenizer, the family of its model, and by hand what is read and trained."""

    name: str
    family: str
    plain: list[list[str]]  # of [U1, A1, U2, A2]: each piece as what is read, trained, read, ...
    thoughts: list[list[str]]  # the same, with a thought in both answers
    call: str  # what the model samples to run PROGRAM, its end included
    answer: str  # what it samples in the second turn
    behind: str  # with keep, behind the call: RESULT stands for what the tool answers
    served: bool = True  # whether vLLM's server renders these messages


def chatml(*contents: str) -> str:
    """Qwen's prompt of a user's message, or of a user's, an answer and another user's."""
    turns = zip(("user", "assistant", "user"), contents, strict=False)
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def deepseek(content: str) -> str:
    return f"<｜User｜>{content}<｜Assistant｜>"


def gemma(content: str) -> str:
    return f"<start_of_turn>user\n{content}<end_of_turn>\n<start_of_turn>model\n"


def llama(content: str) -> str:
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    return f"{header.format('user')}{content}<|eot_id|>{header.format('assistant')}"


BEGUN, EMPTY, THOUGHT = "<｜begin▁of▁sentence｜>", "<think>\n\n</think>\n\n", "<think>\nHm.\n</think>\n\n"
HERMES = '<tool_call>\n{"name": "python", "arguments": {"code": "print(2 + 2)"}}\n</tool_call>'
END = "<｜end▁of▁sentence｜>"
MAKERS = [
    Maker(
        "qwen3",
        "qwen3",
        [
            [chatml("2 + 2?"), f"{EMPTY}Four.<|im_end|>", "\n"],
            [chatml("2 + 2?", "Four.", "3 + 3?"), f"{EMPTY}Six.<|im_end|>", "\n"],
        ],
        [
            [chatml("2 + 2?"), f"{THOUGHT}Four.<|im_end|>", "\n"],
            [chatml("2 + 2?", "Four.", "3 + 3?"), f"{THOUGHT}Six.<|im_end|>", "\n"],
        ],
        f"{THOUGHT}{HERMES}<|im_end|>",
        f"{THOUGHT}Four.<|im_end|>",
        "\n<|im_start|>user\nRESULT<|im_end|>\n<|im_start|>assistant\n",
    ),
    Maker(
        "deepseek_v3",
        "llama",
        [[BEGUN + deepseek("2 + 2?"), f"Four.{END}", deepseek("3 + 3?"), f"Six.{END}"]],
        [[BEGUN + deepseek("2 + 2?"), f"{THOUGHT}Four.{END}", deepseek("3 + 3?"), f"{THOUGHT}Six.{END}"]],
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>python\n```json\n"
        f'{{"code": "print(2 + 2)"}}\n```<｜tool▁call▁end｜>{END}',
        f"Four.{END}",
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>RESULT<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        served=False,  # the server gives the template dicts as arguments, and this one wants text
    ),
    Maker(
        "gemma3",
        "gemma3_text",
        [["<bos>" + gemma("2 + 2?"), "Four.<end_of_turn>", "\n" + gemma("3 + 3?"), "Six.<end_of_turn>", "\n"]],
        [
            [
                "<bos>" + gemma("2 + 2?"),
                f"{THOUGHT}Four.<end_of_turn>",
                "\n" + gemma("3 + 3?"),
                f"{THOUGHT}Six.<end_of_turn>",
                "\n",
            ]
        ],
        f"{HERMES}<end_of_turn>",
        "Four.<end_of_turn>",
        "\n<start_of_turn>user\nRESULT<end_of_turn>\n<start_of_turn>model\n",
    ),
    Maker(
        "llama3_1",
        "llama",
        [["<|begin_of_text|>" + llama("2 + 2?"), "Four.<|eot_id|>", llama("3 + 3?"), "Six.<|eot_id|>"]],
        [
            [
                "<|begin_of_text|>" + llama("2 + 2?"),
                f"{THOUGHT}Four.<|eot_id|>",
                llama("3 + 3?"),
                f"{THOUGHT}Six.<|eot_id|>",
            ]
        ],
        f"{HERMES}<|eot_id|>",
        "Four.<|eot_id|>",
        llama("RESULT"),
    ),
    Maker(
        "gptoss",
        "llama",
        [
            [
                "SYSTEM<|start|>user<|message|>2 + 2?<|end|><|start|>assistant",
                "<|channel|>final<|message|>Four.<|return|>",
            ],
            [
                "SYSTEM<|start|>user<|message|>2 + 2?<|end|><|start|>assistant<|channel|>final<|message|>Four.<|end|>"
                "<|start|>user<|message|>3 + 3?<|end|><|start|>assistant",
                "<|channel|>final<|message|>Six.<|return|>",
            ],
        ],
        [
            [
                "SYSTEM<|start|>user<|message|>2 + 2?<|end|><|start|>assistant",
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>",
            ],
            [
                "SYSTEM<|start|>user<|message|>2 + 2?<|end|><|start|>assistant<|channel|>final<|message|>Four.<|end|>"
                "<|start|>user<|message|>3 + 3?<|end|><|start|>assistant",
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Six.<|return|>",
            ],
        ],
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.python<|channel|>commentary json"
        '<|message|>{"code": "print(2 + 2)"}<|call|>',
        "<|channel|>final<|message|>Four.<|return|>",
        "<|start|>functions.python to=assistant<|channel|>commentary<|message|>RESULT<|end|><|start|>assistant",
        served=False,
    ),
]


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows = {
        "chats": {"messages": [U1, thinking(A1), U2, A2]},
        "pairs": {"prompt": [U1, A1, U2], "chosen": "Six.", "rejected": "Seven."},
        "prompts": {"prompt": "2 + 2?", "answer": "4"},
    }
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({**row, "n": n}) + "\n" for n in range(20)))
    (folder / "reward.py").write_text(
        "def score(completions, **_):\n    return [float('Four' in str(each)) for each in completions]\n"
    )
    failed = 0
    for maker in MAKERS:
        if not sys.argv[2:] or maker.name in sys.argv[2:]:
            faults = tried(maker, folder)
            failed += bool(faults)
            print(f"{maker.name:<12} {'; '.join(faults) or 'right'}", flush=True)
    return 1 if failed else 0


def tried(maker: Maker, folder: Path) -> list[str]:
    """The faults of rlpost with one maker's files."""
    source, model = fetched(maker.name, folder), folder / f"turns-{maker.name}"
    if not (model / "config.json").is_file():
        shutil.copytree(source, model, dirs_exist_ok=True)
        write_model(model, maker.family)
    words, template = [], None
    if maker.name == "gptoss":
        package, _, wanted = PACKAGES["trl"]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=trl", package]
        [file] = [file for file in unpacked(folder / "trl", pip, wanted) if file.stem == "gptoss"]
        words, template = [f"model.chat_template={file}"], str(file)
    tokenizer = load_tokenizer(model, ModelSettings(path=str(model), day="2026-11-28", chat_template=template))
    file = Tokenizer.from_file(str(source / "tokenizer.json"))
    faults = [
        *compared("plain chats", read(tokenizer, [U1, A1, U2, A2]), maker.plain, tokenizer, file),
        *compared("thoughts", read(tokenizer, [U1, thinking(A1), U2, thinking(A2)]), maker.thoughts, tokenizer, file),
        *kept(maker, tokenizer, file),
    ]
    with served(model) if maker.served else contextlib.nullcontext(None) as url:
        faults += rendered(maker, tokenizer, url)
    return [*faults, *trained(maker, model, words, folder)]


# Fine-tuning


def read(tokenizer: Any, messages: list[Message]) -> list[list[tuple[bool, list[int]]]]:
    """Each piece of a chat as stretches of ids, trained or not."""
    sample = Encoder(tokenizer).encode(Demonstration("row 1", messages))
    if sample.fault is not None:
        raise SystemExit(sample.reason)
    pieces = []
    for start, end in pairwise([0, *sample.restarts, len(sample.ids)]):
        marked = zip(sample.mask[start:end], sample.ids[start:end], strict=True)
        pieces.append([(kind, [i for _, i in group]) for kind, group in groupby(marked, key=lambda pair: pair[0])])
    return pieces


def compared(
    what: str, pieces: list[list[tuple[bool, list[int]]]], wanted: list[list[str]], tokenizer: Any, file: Tokenizer
) -> list[str]:
    """A fault unless the stretches are the ids of `wanted`, by the file of the tokenizer alone."""
    system = tokenizer.decode(pieces[0][0][1]).partition("<|start|>user")[0]  # gpt-oss' own, which is long
    expected = [
        [(n % 2 == 1, file.encode(text.replace("SYSTEM", system), add_special_tokens=False).ids) for n, text in each]
        for each in (list(enumerate(piece)) for piece in wanted)
    ]
    if pieces == expected:
        return []
    return [f"{what}: {[[tokenizer.decode(ids) for _, ids in piece] for piece in pieces]!r}"]


# A game of two turns


class Game(DatasetChatEnv):
    """One question, with the Python tool."""

    def __init__(self) -> None:
        super().__init__([{"question": U1["content"]}], max_steps=3)


def played(maker: Maker, tokenizer: Any, history: Turns) -> Iterator[tuple[Conversation, list[int]]]:
    """The conversation before each reply, with the ids that the model reads."""
    env = Game()
    env.history = history
    add_tools(env, ToolsSettings(use=["python"]))
    with contextlib.closing(env):
        env.start()
        check_template(env, tokenizer)
        policy = ScriptedPolicy([], tokenizer)
        [conversation] = env.draw(1)
        for reply in (maker.call, maker.answer):
            [request] = policy.requests([conversation])
            assert request is not None
            yield conversation, request.prompt_ids
            ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
            conversation.add_completion(completion(ids, tokenizer))
            env.respond([conversation])


def completion(ids: list[int], tokenizer: Any) -> Any:
    from rlpost.data.conversation import Completion

    return Completion(ids, [-1.0] * len(ids), reply_text(tokenizer, ids), "stop", 0)


def kept(maker: Maker, tokenizer: Any, file: Tokenizer) -> list[str]:
    """A fault unless the second reply's prompt is the first one, the sampled ids and the text written by hand here."""
    (_, first), (conversation, second) = played(maker, tokenizer, Turns.keep)
    result = next(m["content"] for m in conversation.messages[2:] if m["role"] != "assistant")
    if maker.name == "gptoss":
        result = json.dumps(result)
    elif maker.name in ("gemma3", "llama3_1"):  # whose templates trim it
        result = result.strip()
    behind = maker.call + maker.behind.replace("RESULT", result)
    sampled = file.encode(maker.call, add_special_tokens=False).ids
    wanted = [*first, *sampled, *file.encode(behind[len(maker.call) :], add_special_tokens=False).ids]
    return [] if second == wanted else [f"keep: behind the call stands {tokenizer.decode(second[len(first) :])!r}"]


def rendered(maker: Maker, tokenizer: Any, url: str | None) -> list[str]:
    """Faults of the prompts with history=as_template."""
    faults = []
    for turn, (conversation, ids) in enumerate(played(maker, tokenizer, Turns.as_template), start=1):
        messages, tools = [dict(m) for m in conversation.messages], conversation.tools
        described = tokenizer.decode(ids).partition("You may call these functions")[1]
        if described:  # a template without tools: rlpost's system message
            text = tokenizer.decode(conversation.prompt_ids)
            begun = text.index("You may call these functions")
            messages, tools = [{"role": "system", "content": system_in(text[begun:])}, *messages], []
        wanted = by_template(tokenizer, messages, tools) if url is None else asked(url, messages, tools)
        if ids != wanted:
            told, instead = tokenizer.decode(ids), tokenizer.decode(wanted)
            faults.append(f"as_template, turn {turn}: {told!r} instead of {instead!r}")
    return faults


def system_in(text: str) -> str:
    """rlpost's description of the tools."""
    end = '<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>'
    return text[: text.index(end) + len(end)]


def by_template(tokenizer: Any, messages: Sequence[Message], tools: list[Message]) -> list[int]:
    """The ids that plain transformers renders, with arguments and thoughts as these templates want them."""
    shown = []
    for message in messages:
        said = dict(message)
        for call in said.get("tool_calls", []):
            if "deepseek" in str(tokenizer.name_or_path):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
                said["content"] = None
        content = said.get("content") or ""
        if said["role"] == "assistant" and content.startswith("<think>"):
            thoughts, _, content = content.removeprefix("<think>\n").partition("\n</think>")
            said["thinking"], said["content"] = thoughts, content.lstrip()
        if "reasoning_content" in said:
            said["thinking"] = said.pop("reasoning_content")
        shown.append(said)
    day = tokenizer.shown_day.strftime
    text = tokenizer.apply_chat_template(
        shown, tools=tools or None, add_generation_prompt=True, tokenize=False, strftime_now=day
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# vLLM's server


@contextlib.contextmanager
def served(model: Path) -> Iterator[str]:
    """The address of vLLM's own server with `model`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += [
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        "2",
        "--gpu-memory-utilization",
        "0.1",
    ]
    with (model / "server.txt").open("w") as output:
        server = subprocess.Popen([*command, "--served-model-name", "m"], stdout=output, stderr=output)
        try:
            url, until = f"http://127.0.0.1:{port}", time.monotonic() + SERVER_SECONDS
            while True:
                if server.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"vLLM's server did not start: see {model / 'server.txt'}")
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
                time.sleep(1)
            yield url
        finally:
            server.terminate()
            server.wait(60)


def asked(url: str, messages: list[Message], tools: list[Message]) -> list[int]:
    """The ids that the server makes of a conversation."""
    body: dict[str, Any] = {"model": "m", "messages": messages, "add_generation_prompt": True}
    body |= {"add_special_tokens": False} | ({"tools": tools} if tools else {})
    request = urllib.request.Request(f"{url}/tokenize", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["tokens"]


# Trainings


def trained(maker: Maker, model: Path, words: list[str], folder: Path) -> list[str]:
    """Faults of one step of each training."""
    replies = json.dumps([maker.call, maker.answer])
    common = [f"model.path={model}", *words, "model.autocast=none", "eval.enabled=false", "env=dataset", "steps=1"]
    game = [f"env.path={folder / 'prompts.jsonl'}", f"env.reward={folder / 'reward.py'}:score", "policy=scripted"]
    game += [f"policy.replies={replies}", "prompts_per_step=1", "group_size=2", "tools.use=[python]"]
    game += ["env.max_turns=2", "env.max_completion_tokens=96", "env.max_prompt_tokens=900", "env.held_out=0"]
    commands = {
        "sft": ["train", "sft", *common, f"env.path={folder / 'chats.jsonl'}", "minibatch_size=4", "env.held_out=0"],
        "dpo": ["train", "dpo", *common, f"env.path={folder / 'pairs.jsonl'}", "minibatch_size=2", "env.held_out=0"],
        "keep": ["train", "grpo", *common, *game, "env.history=keep"],
        "as_template": ["train", "grpo", *common, *game, "env.history=as_template"],
    }
    faults = []
    for name, command in commands.items():
        out = folder / f"turns-{maker.name}-{name}"
        shutil.rmtree(out, ignore_errors=True)
        with quiet(folder / f"log-turns-{maker.name}-{name}.txt"):
            code = rlpost([*command, "--out", str(out)])
        if code:
            faults.append(f"{name}: exit code {code}")
            continue
        [line] = [json.loads(each) for each in (out / "metrics.jsonl").read_text().splitlines() if '"step": 1' in each]
        if not line["grad_norm"] > 0:
            faults.append(f"{name}: no gradient")
    return faults


if __name__ == "__main__":
    sys.exit(main())
