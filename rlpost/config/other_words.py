"""What users of other tools type (TRL, verl, torchtune, prime-rl, OpenRLHF, axolotl), and how the same is said here."""

from __future__ import annotations

# what is meant -> the words for it elsewhere, without what stands before them (`actor.optim.`). Several keys are all
# offered; of several parts with | between them the first that the command has.
_KEYS = {
    "steps": "max_steps num_steps total_steps total_training_steps train_steps max_train_steps",
    "epochs|steps": "epochs num_train_epochs num_epochs total_epochs",
    "seed": "random_seed data_seed",
    "prompts_per_step": "rollout_batch_size num_prompts_per_step",
    "prompts_per_step minibatch_size tokens_per_microbatch|policy.max_num_seqs": "batch_size train_batch_size "
    "per_device_train_batch_size global_batch_size generation_batch_size per_device_eval_batch_size eval_batch_size",
    "minibatch_size tokens_per_microbatch": "gradient_accumulation_steps gradient_accumulation grad_accum_steps",
    "minibatch_size": "ppo_mini_batch_size mini_batch_size num_mini_batches steps_per_generation",
    "tokens_per_microbatch": "micro_batch_size micro_batch_size_per_gpu ppo_micro_batch_size_per_gpu "
    "ppo_max_token_len_per_gpu micro_train_batch_size",
    "group_size|eval.samples": "n num_generations n_samples_per_prompt rollouts_per_example samples_per_prompt "
    "num_return_sequences grpo_samples",
    "passes": "num_iterations ppo_epochs num_ppo_epochs",
    "max_policy_lag": "max_async_level max_off_policy_steps staleness max_staleness",
    "max_tokens|env.max_prompt_tokens env.max_completion_tokens": "max_seq_length max_seq_len max_length max_model_len "
    "seq_len sequence_len",
    "optim.lr": "learning_rate actor_learning_rate",
    "optim": "optimizer optim_type",
    "optim.warmup_steps": "num_warmup_steps lr_warmup_steps warmup_ratio lr_warmup_steps_ratio",
    "optim.schedule": "lr_scheduler lr_scheduler_type scheduler warmup_style",
    "optim.max_grad_norm": "grad_clip clip_grad gradient_clipping clip_grad_norm max_norm",
    "optim.eps": "adam_epsilon",
    "loss": "loss_type algorithm algo policy_loss importance_sampling_level",
    "loss.aggregation": "loss_agg_mode",
    "loss.kl_coef": "beta kl_beta kl_loss_coef init_kl_coef use_kl_loss",
    "loss.kl_in": "use_kl_in_reward",
    "loss.clip_low": "epsilon epsilon_low clip_ratio_low eps_clip_low",
    "loss.clip_high": "epsilon_high clip_ratio_high eps_clip_high",
    "loss.clip_low loss.clip_high": "clip_ratio clip_range cliprange eps_clip clip_eps",
    "loss.max_ratio": "delta clip_ratio_c",
    "loss.entropy_coef": "entropy_coeff ent_coef entropy_bonus",
    "loss.sampler_correction": "vllm_importance_sampling_correction tis imp_ratio_cap",
    "advantage.estimator": "adv_estimator advantage_estimator scale_rewards",
    "dynamic.enabled": "filter_groups dynamic_sampling",
    "overlong.mask": "mask_truncated_completions overlong_filtering",
    "overlong.penalty_tokens": "overlong_buffer",
    "env": "dataset task",
    "env.path": "data data_path data.path dataset_path dataset_name train_file train_files data_files prompt_data",
    "env.test_path": "val_file val_files eval_file test_file test_files eval_dataset",
    "env.split": "dataset_train_split train_split",
    "env.config": "dataset_config subset",
    "env.limit": "eval.limit max_samples num_samples max_train_samples",
    "env.prompt_column": "prompt_key input_key",
    "env.answer_column": "answer_key label_key",
    "env.reward": "reward_fn reward_funcs reward_function reward_model custom_reward_function compute_score",
    "env.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "env.max_completion_tokens": "max_tokens max_new_tokens max_completion_length max_response_length generate_max_len",
    "model.path": "model.name model_name model_name_or_path base_model pretrain checkpoint_dir",
    "model.dtype": "torch_dtype precision",
    "model.autocast": "fp16 mixed_precision",
    "model.autocast=bfloat16": "bf16",
    "model.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing "
    "enable_activation_checkpointing",
    "model.chat_template": "chat_template_path",
    "model.device": "device_map",
    "lora.enabled=true": "use_peft use_lora peft adapter",
    "lora.rank": "r lora_r lora_dim",
    "lora.target_modules": "lora.target lora_target lora_attn_modules",
    "lora.path": "adapter_path",
    "policy": "engine backend",
    "policy=vllm": "use_vllm vllm",
    "checkpoint.every": "save_steps save_freq save_every save_interval save_strategy ckpt.interval",
    "checkpoint.keep_last": "save_total_limit max_ckpt_to_keep",
    "eval.every": "eval_steps eval_freq eval_interval eval_strategy test_freq",
    "eval.limit": "max_eval_samples",
    "tracking": "report_to logger log_with metric_logger",
    "tracking=wandb": "wandb use_wandb wandb_project",
    "tracking=tensorboard": "tensorboard use_tensorboard",
    "cluster.trainer_ranks": "n_gpus_per_node num_gpus nproc_per_node num_processes",
    "cluster.sharding": "deepspeed fsdp",
    "--out": "output output_dir save_dir save_path default_local_dir ckpt_path",
    "--name": "run_name experiment_name",
    "--resume": "resume resume_from resume_from_checkpoint load_checkpoint resume_mode",
}
_NOT_HERE = {
    "every step is recorded, in metrics.jsonl": "logging_steps log_interval log_every log_freq",
    "several machines train by torchrun, or sample by cluster=ray: see docs/scale.md": "nnodes num_nodes num_machines",
    "weights are trained whole or as an adapter (lora.enabled=true), never quantized": "load_in_4bit load_in_8bit "
    "qlora",
    "there is no critic: completions are compared within their group": "critic vf_coef gamma gae_lambda "
    "cliprange_value",
}
PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo", "cpo", "bco", "xpo")
NO_PREFERENCES = "rlpost does not train on pairs of a better and a worse reply"
_OPTIONS = {
    "grpo": "ppo",
    "sft": "cross_entropy ce nll",
    "transformers": "hf huggingface native",
    "vllm": "sglang",
    "adamw": "adam adamw_torch adamw_torch_fused",
    "adamw_8bit": "adamw_bnb_8bit paged_adamw_8bit adam_8bit",
    "tensorboard": "tb",
    "none": "off false no disabled",
}
_VERBS = {  # of rlpost, or of a group of verbs; {run} is the run that is named behind it
    "--help": "help",
    "--version": "version",
    "list": "ls",
    "tail": "follow",
    "info": "doctor",
    "eval": "evaluate test benchmark bench score",
    "chat": "generate sample infer inference predict",
    "train sft": "finetune fine-tune tune",
    "train expert-iteration": "rft raft star",
    "train grpo": "rl rlhf rlvr ppo",
    "train grpo --dry-run": "validate check dryrun",
    "data preview": "preprocess",
    "config init FILE.yaml": "cp init",
}
_FOLDER = "{run}/checkpoints/latest/model"
_SERVE = f"python -m vllm.entrypoints.openai.api_server --model {_FOLDER}"  # `vllm serve` fails in the CPU's wheel
SENTENCES = {
    "resume": "a run goes on with: rlpost {verb} --resume {run}",
    "merge": f"checkpoints hold the merged weights, of an adapter too: {_FOLDER}",
    "merge-lora": f"checkpoints hold the merged weights, of an adapter too: {_FOLDER}",
    "export": f"a checkpoint is a plain Hugging Face folder, {_FOLDER}; completions: rlpost rollouts export",
    "serve": f"write {_SERVE}",
    "vllm-serve": f"a training starts vLLM itself, policy=vllm; a trained model: {_SERVE}",
    "download": "a model or data set of the hub is fetched where it is named, as in model.path=OWNER/NAME",
}
OTHER_FLAGS = {
    "-V": "--version",
    "-v": "--version",
    "--config": "recipe=FILE.yaml",
    "--config-name": "recipe=NAME",
    "--recipe": "recipe=NAME",
    "--checkpoint": "--resume",
    "--quiet": "--plain",
}


def _turned(table: dict[str, str]) -> dict[str, str]:
    return {word: meant for meant, words in table.items() for word in words.split()}


KEYS, NOT_HERE, OPTIONS, VERBS = _turned(_KEYS), _turned(_NOT_HERE), _turned(_OPTIONS), _turned(_VERBS)


def meant_by(key: str) -> str | None:
    """What a key of another tool means, as the table has it: known by all of it, or by its longest end."""
    return next((KEYS[end] for end in ends_of(key) if end in KEYS), None)


def not_here(key: str) -> str | None:
    """Why rlpost has nothing for a key of another tool; None where that is not known."""
    return next((NOT_HERE[part] for part in key.lower().split(".") if part in NOT_HERE), None)


def ends_of(key: str) -> list[str]:
    """`data.train_files` and `train_files`, of a key in any manner of writing."""
    parts = key.lower().replace("-", "_").split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]
