"""One side of scripts/bench: the same work in TRL's GRPOTrainer, in an environment of its own.

`bench_trl.py REQUEST ANSWER`: both are JSON files, written and read by bench_compare.py. Of rlpost only
the reward function is imported, so that both sides score alike.
"""

from __future__ import annotations

import importlib.metadata
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rlpost.rewards.numbers import score

PACKAGES = ("trl", "torch", "transformers", "accelerate", "datasets")


class StepClock(TrainerCallback):
    """Wall seconds of each step, sampling included, logging not."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._begun)


class Reward:
    """rlpost's reward of each completion, which notes the prompts that it was asked about."""

    __name__ = "arithmetic"  # TRL logs it under this

    def __init__(self) -> None:
        self.prompts: list[list[dict[str, str]]] = []

    def __call__(
        self, prompts: list[Any], completions: list[Any], answer: list[str], **kwargs: Any
    ) -> list[float | None]:
        self.prompts += prompts
        return [score(c[0]["content"], right).reward for c, right in zip(completions, answer, strict=True)]


def configuration(request: dict[str, Any]) -> GRPOConfig:
    """TRL's settings for the work; what is not named here is its default and equals rlpost's."""
    optim = request["optim"]
    return GRPOConfig(
        output_dir=request["folder"],
        use_cpu=True,
        bf16=request["bfloat16"],  # autocast over float32 weights
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        per_device_train_batch_size=request["microbatch"],
        gradient_accumulation_steps=request["completions_per_step"] // request["microbatch"],
        num_generations=request["group_size"],
        max_steps=request["steps"],
        max_completion_length=request["max_completion_tokens"],
        temperature=request["temperature"],
        loss_type="dapo",  # mean over all tokens of the step
        scale_rewards="group",
        epsilon=request["clip_low"],
        epsilon_high=request["clip_high"],
        beta=request["kl_coef"],
        learning_rate=optim["lr"],
        lr_scheduler_type=optim["schedule"],
        warmup_steps=optim["warmup_steps"],
        weight_decay=optim["weight_decay"],
        adam_beta1=optim["beta1"],
        adam_beta2=optim["beta2"],
        adam_epsilon=optim["eps"],
        max_grad_norm=optim["max_grad_norm"],
        shuffle_dataset=False,
        use_vllm=False,
        seed=request["seed"],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )


def main(request_file: Path, answer_file: Path) -> None:
    """Train as the request says and write the times."""
    request = json.loads(request_file.read_text())
    set_seed(request["seed"])
    clock, reward = StepClock(), Reward()
    tokenizer: Any = AutoTokenizer.from_pretrained(request["model"])
    tokenizer.chat_template = request["chat_template"]  # a base model has none
    trainer = GRPOTrainer(
        model=request["model"],
        args=configuration(request),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(request["rows"]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    logged = [row for row in trainer.state.log_history if "completions/mean_length" in row]
    prompts = reward.prompts[:: request["group_size"]]
    answer = {
        "seconds": clock.seconds,
        "tokens_mean": [row["completions/mean_length"] for row in logged],
        "reward_mean": [row["reward"] for row in logged],
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "prompts": [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in prompts],
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    answer_file.write_text(json.dumps(answer, indent=1))
    print(f"threads: {torch.get_num_threads()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
