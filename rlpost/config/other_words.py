"""Words of other tools (TRL, verl, torchtune, prime-rl, OpenRLHF, axolotl), and the same in words of rlpost."""

from __future__ import annotations

# The answer -> the words that it answers, each without the parts before it (`actor.optim.`). Of answers separated by |
# the first that the command has counts. Several keys are all offered; a remark follows in brackets. An answer that
# begins with "not here:" says why rlpost has nothing of the kind.
NOT_HERE = "not here: "
_WORDS = {
    "steps": "max_steps num_steps total_steps total_training_steps train_steps max_train_steps",
    "epochs | steps (of prompts_per_step prompts each; there are no epochs)": "epochs num_train_epochs num_epochs "
    "total_epochs max_epochs num_episodes",
    "seed": "random_seed data_seed",
    "prompts_per_step": "rollout_batch_size num_prompts_per_step",
    "prompts_per_step minibatch_size tokens_per_microbatch | policy.max_num_seqs": "batch_size train_batch_size "
    "per_device_train_batch_size global_batch_size generation_batch_size per_device_eval_batch_size eval_batch_size",
    "minibatch_size tokens_per_microbatch": "gradient_accumulation_steps gradient_accumulation grad_accum_steps",
    "minibatch_size (counted in samples)": "ppo_mini_batch_size mini_batch_size num_mini_batches steps_per_generation",
    "tokens_per_microbatch": "ppo_max_token_len_per_gpu",
    "tokens_per_microbatch (counted in tokens)": "micro_batch_size micro_batch_size_per_gpu micro_train_batch_size "
    "ppo_micro_batch_size_per_gpu micro_rollout_batch_size log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu",
    "group_size | eval.samples": "n num_generations n_samples_per_prompt rollouts_per_example samples_per_prompt "
    "num_return_sequences grpo_samples",
    "passes": "num_iterations ppo_epochs num_ppo_epochs",
    "max_policy_lag": "max_async_level async_level max_off_policy_steps staleness max_staleness",
    "max_tokens | env.max_prompt_tokens env.max_completion_tokens": "max_seq_length max_seq_len max_length "
    "max_model_len seq_len sequence_len cutoff_len",
    "packing | not here: completions are packed wherever the model allows it": "sample_packing packed "
    "packing_samples neat_packing",
    "optim.lr": "learning_rate actor_learning_rate",
    "optim": "optimizer optim_type optimizer._component_",
    "optim.weight_decay": "adam_weight_decay",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.eps": "adam_epsilon",
    "optim.warmup_steps": "num_warmup_steps lr_warmup_steps",
    "optim.warmup_steps (a number of steps, not a share)": "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio",
    "optim.schedule": "lr_scheduler lr_scheduler_type scheduler warmup_style lr_scheduler._component_",
    "optim.max_grad_norm": "grad_clip clip_grad gradient_clipping clip_grad_norm max_norm gradient_clip_val",
    "loss": "loss_type algorithm algo policy_loss importance_sampling_level loss._component_",
    "loss.aggregation": "loss_agg_mode",
    "loss.kl_coef": "beta kl_beta kl_loss_coef init_kl_coef use_kl_loss",
    "loss.kl_estimator": "kl_loss_type kl_penalty",
    "loss.kl_in": "use_kl_in_reward",
    "loss.clip_low": "epsilon epsilon_low clip_ratio_low eps_clip_low",
    "loss.clip_high": "epsilon_high clip_ratio_high eps_clip_high",
    "loss.clip_low loss.clip_high": "clip_ratio clip_range cliprange eps_clip clip_eps",
    "loss.max_ratio": "delta clip_ratio_c",
    "loss.entropy_coef": "entropy_coeff ent_coef entropy_bonus",
    "loss.sampler_correction": "vllm_importance_sampling_correction tis imp_ratio_cap",
    "advantage.estimator": "adv_estimator advantage_estimator scale_rewards norm_adv_by_std_in_grpo",
    "dynamic.enabled": "filter_groups dynamic_sampling",
    "overlong.mask": "mask_truncated_completions overlong_filtering",
    "overlong.penalty_tokens": "overlong_buffer",
    "env": "dataset task tasks dataset._component_ environment.id",
    "env.path": "data data_path data.path datasets dataset_path dataset_name dataset_dir train_file train_files "
    "data_files prompt_data",
    "env.test_path": "val_file val_files eval_file test_file test_files eval_dataset test_datasets",
    "env.held_out (a share of the rows)": "val_set_size val_size test_size test_split_ratio split_dataset_ratio",
    "env.split": "dataset_train_split train_split",
    "env.config": "dataset_config subset",
    "env.limit": "eval.limit max_samples num_samples max_train_samples",
    "env.shuffle": "shuffle_dataset shuffle_merged_datasets",
    "env.prompt_column": "prompt_key input_key dataset_text_field",
    "env.answer_column": "answer_key label_key",
    "env.reward (FILE.py:FUNCTION, or a name)": "reward_fn reward_funcs reward_function reward_model compute_score "
    "custom_reward_function custom_reward_function.path custom_reward_function.name reward_model.enable "
    "reward_model.path reward_model.reward_manager remote_rm_url",
    "env.long_prompts": "filter_overlong_prompts truncation",
    "env.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "env.max_completion_tokens": "max_tokens max_new_tokens max_completion_length max_response_length generate_max_len",
    "model": "model._component_",
    "model.path": "model.name model_name model_name_or_path base_model pretrain checkpoint_dir hf_model_path "
    "model_args",
    "model.dtype": "torch_dtype precision",
    "model.autocast": "fp16 mixed_precision",
    "model.autocast=bfloat16": "bf16",
    "model.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing "
    "enable_activation_checkpointing gradient_checkpointing_kwargs use_reentrant",
    "model.chat_template": "chat_template_path template",
    "model.device": "device_map",
    "lora.enabled=true": "use_peft use_lora peft adapter finetuning_type",
    "lora.rank": "r lora_r lora_dim",
    "lora.target_modules": "lora_attn_modules",
    "lora.target_modules (left out: every linear layer)": "lora_target_linear lora_target lora.target "
    "lora_target_modules apply_lora_to_mlp",
    "lora.path": "adapter_path lora_model_dir adapter_name_or_path",
    "policy": "engine backend rollout.name infer_backend",
    "policy=vllm": "use_vllm vllm",
    "policy.sleep": "free_cache_engine vllm_enable_sleep_mode",
    "policy.max_num_seqs": "max_num_batched_tokens",
    "policy.tensor_parallel_size": "tensor_model_parallel_size vllm_tensor_parallel_size",
    "checkpoint.every": "save_steps save_freq save_every save_interval save_strategy ckpt.interval",
    "checkpoint.every (a number of steps)": "saves_per_epoch",
    "checkpoint.keep_last": "save_total_limit max_ckpt_to_keep save_only_model",
    "eval.every": "eval_steps eval_freq eval_interval eval_strategy evaluation_strategy test_freq",
    "eval.every (a number of steps)": "evals_per_epoch",
    "eval.enabled": "do_eval val_before_train eval_on_start",
    "eval.limit": "max_eval_samples",
    "eval.patience": "early_stopping_patience",
    "tracking": "report_to logger log_with metric_logger metric_logger._component_",
    "tracking=wandb": "wandb use_wandb",
    "tracking.project": "wandb_project project_name",
    "tracking.entity": "wandb_entity",
    "tracking=tensorboard": "tensorboard use_tensorboard",
    "tracking.uri": "mlflow_tracking_uri",
    "tracking.experiment": "mlflow_experiment_name",
    "cluster.trainer_ranks": "n_gpus_per_node num_gpus nproc_per_node num_processes actor_num_gpus_per_node",
    "cluster.sharding": "deepspeed fsdp fsdp_config zero_stage",
    "cluster.cpu_offload": "param_offload optimizer_offload adam_offload",
    "cluster.rank_seconds": "ddp_timeout",
    "cluster.rollout_workers": "vllm_num_engines",
    "--out": "output output_dir save_dir save_path default_local_dir ckpt_path",
    "--name": "run_name experiment_name wandb_name wandb_run_name wandb.name",
    "--resume": "resume resume_from resume_from_checkpoint load_checkpoint resume_mode auto_resume_from_checkpoints",
    "not here: every step is recorded, in metrics.jsonl": "logging_steps log_interval log_every log_freq "
    "logging_strategy logging_dir logging_first_step log_every_n_steps plot_loss",
    "not here: every completion is recorded; see rlpost rollouts": "log_completions num_completions_to_print",
    "not here: several machines train by torchrun, or sample by cluster=ray (docs/scale.md)": "nnodes num_nodes "
    "num_machines actor_num_nodes",
    "not here: weights are trained whole or as an adapter (lora.enabled=true), never quantized": "load_in_4bit "
    "load_in_8bit qlora quantization_bit quantization_method bnb_4bit_quant_type bnb_4bit_compute_dtype",
    "not here: there is no critic, completions are compared within their group": "critic critic_warmup "
    "critic_learning_rate vf_coef gamma lam gae_lambda cliprange_value",
    "not here: adapters have no dropout, so that trainer and sampler agree": "lora_dropout lora.dropout "
    "disable_dropout attention_dropout",
    "not here: nothing is uploaded; a checkpoint's model/ is a Hugging Face folder": "push_to_hub hub_model_id "
    "hub_token hub_strategy hub_private_repo",
    "not here: only replies are trained on (all of a row that is plain text)": "train_on_inputs train_on_prompt "
    "completion_only_loss assistant_only_loss mask_history roles_to_train train_on_eos",
    "not here: rlpost chooses it for the model and the device": "flash_attention flash_attn attn_implementation "
    "use_flash_attn sdp_attention xformers_attention tf32 torch_compile compile use_liger_kernel use_remove_padding "
    "use_dynamic_bsz group_by_length pad_to_sequence_len eval_sample_packing",
    "not here: reading rows needs no setting": "dataset_prepared_path dataset_num_proc dataset_processes "
    "dataset_num_workers dataloader_num_workers preprocessing_num_workers overwrite_cache remove_unused_columns",
    "not here: model.path alone names the model": "checkpoint_files checkpointer._component_",
    "not here: examples go into env.system_prompt": "num_fewshot",
    "not here: code that comes with a model is never run": "trust_remote_code",
    "not here: the tokenizer is the model's own": "special_tokens tokenizer_type tokenizer_config tokenizer.path "
    "tokenizer._component_ disable_fast_tokenizer use_fast_tokenizer model_type checkpointer.model_type "
    "resize_token_embeddings_to_smart_vocab_size",
    "not here: the verb says it, train sft or train grpo": "stage do_train rl",
    "not here: the reference is always the starting model": "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha",
    "not here: every run has a folder of its own": "overwrite_output_dir",
    "not here: checkpoints are always safetensors": "save_safetensors",
    "not here: no noise is added to embeddings": "neftune_noise_alpha",
    "not here: a training starts vLLM itself, policy=vllm": "vllm_mode vllm_server_host vllm_server_port "
    "vllm_sync_backend colocate_all_models",
    "not here: prompts always pass through the model's chat template": "apply_chat_template",
}
# a model of a family to begin with -> the beginning of its models' names; the longest that fits counts
_MODELS = {
    "Qwen/Qwen3-0.6B": "qwen3",
    "meta-llama/Llama-3.2-1B-Instruct": "llama",
    "google/gemma-3-1b-it": "gemma",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral",
    "HuggingFaceTB/SmolLM3-3B": "smollm3",
    "microsoft/Phi-4-mini-instruct": "phi",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": "deepseek",
}
PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo", "cpo", "bco", "xpo")
NO_PREFERENCES = "rlpost does not train on pairs of a better and a worse reply"
_OPTIONS = {
    "qwen": "qwen2 qwen2.5 qwen2.5-0.5b",
    "qwen-1.5b": "qwen2.5-1.5b",
    "qwen-3b": "qwen2.5-3b",
    "qwen-7b": "qwen2.5-7b",
    "grpo": "ppo",
    "sft": "cross_entropy ce nll",
    "transformers": "hf huggingface native",
    "vllm": "sglang",
    "adamw": "adam adamw_torch adamw_torch_fused",
    "adamw_8bit": "adamw_bnb_8bit paged_adamw_8bit adam_8bit",
    "tensorboard": "tb",
    "none": "off false no disabled",
}
_VERBS = {  # verb of rlpost, or of a group of verbs -> its names in other tools
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
_FOLDER = "{run}/checkpoints/latest/model"  # {run} is the run named behind the verb
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


WORDS, MODELS, OPTIONS, VERBS = _turned(_WORDS), _turned(_MODELS), _turned(_OPTIONS), _turned(_VERBS)


def meant_by(key: str) -> str | None:
    """The answer to a key of another tool: by its longest known end, else by a part that rlpost has nothing for."""
    by_end = next((WORDS[end] for end in ends_of(key) if end in WORDS), None)
    return by_end or next((WORDS[p] for p in key.lower().split(".") if WORDS.get(p, "").startswith(NOT_HERE)), None)


def ends_of(key: str) -> list[str]:
    """`data.train_files` and `train_files`, of a key in upper or lower case, with - or _."""
    parts = key.lower().replace("-", "_").split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]
