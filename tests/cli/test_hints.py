"""Words of other tools and mistakes of a shell: each is answered with what leads to the right word."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from rlpost.cli.main import run

LONG = "a" * 300
DATA = "train grpo env=dataset env.reward=number"

# what a user types -> exit code, what the answer says
HINTS: dict[str, tuple[int, str]] = {
    # other models and losses
    "train grpo model=Qwen3-0.6B": (
        2,
        "model=Qwen3-0.6B is unknown; did you mean qwen3? (any other: model.path=OWNER/NAME of the hub, or a folder)",
    ),
    "train grpo model=llama3": (2, "did you mean model.path=meta-llama/Llama-3.2-1B-Instruct?"),
    "train grpo model=gemma": (2, "did you mean model.path=google/gemma-3-1b-it?"),
    "train grpo model=qwen2.5": (2, "model=qwen2.5 is unknown; did you mean qwen?"),
    "train grpo model=qwen2.5-7b": (2, "did you mean qwen-7b?"),
    "train grpo loss=dpo": (2, "loss=dpo is for rlpost train dpo; rlpost train grpo takes one of cispo, dapo, "),
    "train sft loss=orpo": (
        2,
        "rlpost train dpo trains on pairs of a better and a worse reply (loss=dpo, dpo_norm or ipo); it is one of ",
    ),
    "train grpo loss=ppo": (2, "did you mean grpo?"),
    "train grpo policy=hf": (2, "did you mean transformers?"),
    "train grpo tracking=tb": (2, "did you mean tensorboard?"),
    "train grpo optim=adamw_torch": (2, "did you mean adamw?"),
    "train grpo env=openai/gsm8k": (2, "did you mean env=gsm8k or env=dataset env.path=openai/gsm8k?"),
    # keys of other tools; more of them in tests/config/test_typos.py
    "eval eval.limit=50": (
        2,
        "eval.limit is not a setting of rlpost eval: it belongs to rlpost train grpo; did you mean env.limit?",
    ),
    "train grpo lora.r=16": (2, "lora.r is not a setting of rlpost train grpo; did you mean lora.rank?"),
    "train grpo wandb=true": (2, "wandb is not a setting of rlpost train grpo; did you mean tracking=wandb?"),
    "train grpo report_to=wandb": (2, "did you mean tracking=wandb?"),
    "train grpo per_device_train_batch_size=4": (
        2,
        "did you mean prompts_per_step (prompts per step), minibatch_size (completions per optimizer step) or "
        "tokens_per_microbatch (most tokens per forward and backward)?",
    ),
    "train sft per_device_train_batch_size=4": (
        2,
        "did you mean minibatch_size (samples per optimizer step) or tokens_per_microbatch (most tokens per ",
    ),
    "train grpo gradient_accumulation_steps=8": (
        2,
        "minibatch_size (completions per optimizer step) or tokens_per_microbatch (most tokens per forward and ",
    ),
    "train grpo data.train_files=rows.jsonl": (2, "did you mean env=dataset env.path=rows.jsonl?"),
    # flags
    "train grpo --learning_rate 1e-5": (
        2,
        "--learning_rate: settings are written without dashes; write optim.lr=1e-5",
    ),
    "train grpo --learning-rate=1e-5": (2, "write optim.lr=1e-5"),
    "train grpo --lr 1e-5": (2, "write optim.lr=1e-5"),
    "train grpo --optim.lrr 1e-5": (2, "write optim.lr=1e-5"),
    "train grpo --temperature 0.7": (2, "write sampling.temperature=0.7"),
    "train grpo --report_to wandb": (2, "write tracking=wandb"),
    "train sft --warmup_ratio 0.1": (2, "write optim.warmup_steps (a number of steps, not a share)"),
    "train grpo --lora_dropout 0.1": (2, "has no option --lora_dropout: adapters have no dropout, so that"),
    "train grpo --output_dir out": (2, "rlpost train grpo has no option --output_dir; did you mean --out?"),
    # verbs
    "resume first": (2, "rlpost has no verb resume: a run goes on with: rlpost train grpo --resume runs/first"),
    "resume tuned": (2, "a run goes on with: rlpost train sft --resume runs/tuned"),
    "resume": (2, "rlpost train grpo --resume runs/NAME"),
    "merge first": (2, "checkpoints hold the merged weights, of an adapter too: runs/first/checkpoints/latest/model"),
    "serve first": (
        2,
        "write python -m vllm.entrypoints.openai.api_server --model runs/first/checkpoints/latest/model",
    ),
    "serve elsewhere/first": (2, "api_server --model elsewhere/first/checkpoints/latest/model"),
    "generate first": (2, "did you mean rlpost chat?"),
    "evaluate first": (2, "did you mean rlpost eval?"),
    "finetune": (2, "did you mean rlpost train sft?"),
    "train simpo": (
        2,
        "rlpost train has no verb simpo: rlpost train dpo trains on pairs of a better and a worse reply",
    ),
    "train ipo": (2, "did you mean rlpost train dpo loss=ipo?"),
    "train dpo loss.label_smooth=0.1": (2, "did you mean loss.label_smoothing?"),
    "train ppo": (2, "did you mean rlpost train grpo?"),
    "train dapo": (2, "did you mean rlpost train grpo loss=dapo?"),
    "train rft": (2, "did you mean rlpost train expert-iteration?"),
    # files
    f"{DATA} env.path=my rows.jsonl": (
        2,
        "rows.jsonl is not a setting: quote a value with spaces; write 'env.path=my rows.jsonl'\n",
    ),
    f"{DATA} env.path=my own rows.jsonl": (2, "write 'env.path=my own rows.jsonl'\n"),
    "train grpo env.system_prompt=Be brief. steps=3": (2, "write 'env.system_prompt=Be brief.'\n"),
    "eval mine": (2, "did you mean model=runs/mine?"),
    "eval list2": (2, "did you mean model=runs/list2?"),  # nearer to a verb than to anything else
    "eval sweep/lr-1": (2, "did you mean model=runs/sweep/lr-1?"),
    f"{DATA} env.path=rowz.jsonl": (3, "env.path=rowz.jsonl does not exist; did you mean rows.jsonl?"),
    f"{DATA} env.path=rows.jsnl": (3, "env.path=rows.jsnl does not exist; did you mean rows.jsonl?"),
    f"{DATA} env.path=./notes.jsonl": (3, "env.path=./notes.jsonl does not exist\n"),  # not notes.txt
    "train grpo recipe=./plan2.yaml": (2, "recipe=./plan2.yaml does not exist; did you mean plan.yaml?"),
    "train grpo env=dataset env.path=rows.jsonl env.reward=./row.py:f": (2, "there is no file ./row.py; did you mean"),
    "train grpo model=./noted": (2, "model.path=./noted does not exist\n"),
    "train grpo model=tiny qwen": (
        2,
        "qwen is not a setting: settings are written key=value; did you mean model=q",
    ),
    "train grpo model=nope.gguf": (
        2,
        "nope.gguf does not exist; a .gguf file is read from this machine: download it, or give OWNER/NAME of the",
    ),
    "train grpo short.gguf": (2, "did you mean model=short.gguf?"),
    "train grpo model=owner/Some-Model-GGUF": (
        2,
        "holds .gguf files, by its name: download one and give model.path=FILE",
    ),
    f"train grpo model.path=x/{LONG}": (2, "is neither a folder nor a hub id such as"),
    f"train grpo --name {LONG}": (2, "is not a name of a run: give one word such as my-run, or --out for a path"),
    "train grpo --name 'a\nb'": (2, r"--name 'a\nb' is not a name of a run: give one word such as my-run"),
    "eval --name 'a\nb'": (2, r"--name 'a\nb' is not a name of an evaluation"),
} | {
    f"{line}{LONG}{ending}": (2, "file name too long; give a path")
    for line, ending in [
        ("train grpo model.path=", ""),
        ("train grpo model=./", ""),
        ("train grpo env=gsm8k env.path=", ".jsonl"),
        ("train grpo env=dataset env.path=rows.jsonl env.reward=", ".py:score"),
        ("train grpo plugin=", ".py"),
        ("train grpo --out ", ""),
        ("train grpo --resume ", ""),
        ("eval compare ", " b"),
        ("runs show ", ""),
        ("config init ", ".yaml"),
    ]
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the words above point at."""
    here = tmp_path_factory.mktemp("hints")
    rows = [json.dumps({"prompt": f"What is {n} + 1?", "answer": str(n + 1)}) for n in range(4)]
    for name in ("rows.jsonl", "my rows.jsonl", "my own rows.jsonl"):
        (here / name).write_text("\n".join(rows))
    (here / "short.gguf").write_bytes(b"GGUF\x03\0\0\0")
    for name in ("notes.txt", "plan.yaml", "roww.py"):
        (here / name).touch()
    for name in ("mine", "list2", "sweep/lr-1"):
        (here / "runs" / name / "checkpoints").mkdir(parents=True)
    (here / "runs" / "tuned" / "checkpoints").mkdir(parents=True)
    (here / "runs" / "tuned" / "command.txt").write_text("rlpost train sft --name tuned\n")
    return here


@pytest.mark.parametrize("line", HINTS, ids=lambda line: line.replace(LONG, "aaa"))
def test_a_word_of_another_tool_is_answered_with_the_right_one(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    code, message = HINTS[line]
    words = line.split(" ") if "'" not in line else shlex.split(line)
    assert run([*words, *(["--dry-run"] if words[0] == "train" and len(words) > 2 else [])]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert (captured.out, captured.err.count("\n"), captured.err[:7]) == ("", 1, "error: ")
    assert len(captured.err) < 400


def answered(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of the answer to a command that is refused."""
    assert run(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_all_unknown_words_of_a_command_are_answered_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = "actor.optim.lr=1e-6 rollout.n=4 lora_dropout=0.1 stesp=3 bananas=1 model=phi4 use_peft=false"
    assert answered(["train", "grpo", *words.split()], capsys) == [
        "error: rlpost train grpo does not know 7 of these settings; write instead:",
        "  actor.optim.lr  optim.lr=1e-6",
        "  rollout.n       group_size=4",
        "  lora_dropout    not here: adapters have no dropout, so that trainer and sampler agree",
        "  stesp           steps=3",
        "  bananas         not known here",
        "  model=phi4      did you mean model.path=microsoft/Phi-4-mini-instruct? (any other: model.path=OWNER/NAME of "
        "the hub, or a folder)",
        "  use_peft        lora.enabled=false",
        "rlpost config explain train grpo prints every setting",
    ]


def test_all_unknown_flags_of_a_command_are_answered_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--num_train_epochs 3 --lora-r=8 --steps 5 --resum auto lora_alpha=16 --save_path out --plain"
    assert answered(["train", "sft", *words.split()], capsys)[1:-1] == [
        "  --num_train_epochs  epochs=3",
        "  --lora-r            lora.rank=8",
        "  --steps             steps=5",
        "  --resum             --resume",
        "  lora_alpha          lora.alpha=16",
        "  --save_path         --out",
    ]


AXOLOTL = """\
base_model: Qwen/Qwen2.5-0.5B-Instruct
datasets:
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
val_set_size: 0.05
output_dir: ./out
wandb_project:
lora_target_linear: true
special_tokens:
  pad_token: "<|end|>"
"""


def test_all_lines_of_another_tools_file_are_answered_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "axolotl.yaml"
    rows = [
        "model.path: Qwen/Qwen2.5-0.5B-Instruct",
        "env: dataset, env.path: FILE",
        "env.held_out (a share of the rows)",
        "--out, on the command line",
        "leave it out, it has no value",
        "lora.target_modules (left out: every linear layer)",
        "not here: the tokenizer is the model's own",
    ]
    for above, begin in (
        ("", f"error: {file}: a recipe begins with the line command: train sft; rlpost train sft does not know 7 of "),
        ("command: train sft\n", f"error: {file}: rlpost train sft does not know 7 of "),
    ):
        file.write_text(above + AXOLOTL)
        header, *told, _ = answered(["train", "sft", f"recipe={file}"], capsys)
        assert header.startswith(begin)
        numbers = [number + bool(above) for number in (1, 2, 5, 6, 7, 8, 10)]
        assert [line.split()[:2] for line in told] == [["line", str(number)] for number in numbers]
        assert [line.partition("  ")[2].rpartition("  ")[2] for line in told] == rows
