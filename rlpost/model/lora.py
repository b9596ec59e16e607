"""LoRA (arXiv:2106.09685): adapters beside the linear layers of a plain HF model, the only trained tensors.

peft replaces each adapted layer by one that computes `W x + s B A x`, s = alpha / rank. With DoRA (arXiv:2402.09353)
each row of `W + s B A` is then given a length that is trained too. The model
stays the object it was, so whatever reads its decoder, head, config or parameters keeps working.
With its adapter off, the model is the starting policy: a reference without a second copy.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from rlpost.config.paths import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rlpost.errors import CheckpointError, ConfigError
from rlpost.files import json_in
from rlpost.imports import require_peft
from rlpost.model.weights import ADAPTER, announced, whole
from rlpost.settings import LoRAInit, LoRASettings
from rlpost.text import did_you_mean, first_line, nearest

NAME = "default"  # peft's name for a model's one adapter
PROBED, MERGED_OFF = 24, 0.01  # tokens that a merged adapter is compared on, and what rounding may change, in nats
# names by which peft takes a layer for a part of experts, which transformers 5 keeps in one tensor
OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
PEFT_PREFIX = "base_model.model."  # prefix of tensor names in an adapter's file


def add_adapter(model: Any, settings: LoRASettings, base: str) -> None:
    """Give `model` an adapter that changes nothing yet; afterwards only the adapter takes gradients.

    A and B are in at least float32, whatever the frozen weights are: small updates would be lost in 16 bits.
    The adapter's configuration names `base` as the model it belongs to. Raises ConfigError if
    `lora.target_modules` names no linear layer, MissingExtraError without peft.
    """
    require_peft("lora.enabled=true")
    import peft

    targets = _targets(model, settings.target_modules)
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        init_lora_weights=True if settings.init_lora_weights is LoRAInit.default else settings.init_lora_weights.name,
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
    )
    try:
        peft.inject_adapter_in_model(config, model, NAME)
    except ValueError as error:  # a layer that peft does not adapt in this architecture, such as Mamba's out_proj
        raise ConfigError(f"lora.enabled=true: {first_line(error)}; name the layers in lora.target_modules") from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    model.eval()  # the new layers too


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[nn.Module]:
    """A block in which `model` computes without its adapter."""
    layers: list[Any] = [module for module in model.modules() if _has_adapter(module)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield model
    finally:
        for layer in layers:
            layer.enable_adapters(True)


class MergedWeights(Mapping[str, torch.Tensor]):
    """The weights of an adapted model under the names of a plain checkpoint; adapted ones have the adapter in them.

    Each is computed on access, out of place: the model's own tensors stay as they are, and one merged tensor exists
    at a time. A tied head has both its names.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers: dict[str, Any] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        adapted: dict[str, Any] = {name: module for name, module in model.named_modules() if _has_adapter(module)}
        for name, tensor in model.state_dict().items():
            owner = next((layer for layer in _above(name) if layer in adapted), None)
            if owner is None:
                self._tensors[name] = tensor
            elif name.startswith(f"{owner}.base_layer."):
                kind = name.rpartition(".")[2]
                self._tensors[f"{owner}.{kind}"] = tensor
                if kind == "weight":
                    self._layers[f"{owner}.{kind}"] = adapted[owner]

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self._tensors[name]
        layer = self._layers.get(name)
        if layer is None:
            return weight
        weight = whole(weight)
        a, b = (whole(of[NAME].weight.detach()) for of in (layer.lora_A, layer.lora_B))
        dtype = torch.promote_types(weight.dtype, a.dtype)
        merged = torch.addmm(weight.to(dtype), b.to(dtype), a.to(dtype), alpha=layer.scaling[NAME])
        if layer.use_dora[NAME]:
            lengths = whole(layer.lora_magnitude_vector[NAME].weight.detach()).to(dtype)
            merged *= (lengths / torch.linalg.norm(merged, dim=1))[:, None]
        return merged.to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapter like peft: adapter_model.safetensors and adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    announced(model, ADAPTER)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in whole_adapter(model).items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    model.peft_config[NAME].save_pretrained(folder)
    config = json_in(folder / ADAPTER_CONFIG)
    config["target_modules"].sort()  # a set, whose order differs between processes
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_adapter(model: Any, folder: Path) -> None:
    """Load the adapter that `save_adapter` wrote into an adapted model.

    Raises CheckpointError, leaving the model as it was, if there is none or it has other layers, another rank or
    another scale, which would read the same A and B differently.
    """
    try:
        saved = load_file(folder / ADAPTER_WEIGHTS)
        config = json_in(folder / ADAPTER_CONFIG)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} holds no adapter ({error}): its run was without lora.enabled=true, go on without it"
        ) from error
    own = _adapter_tensors(model)
    if {n: t.shape for n, t in saved.items()} != {n: t.shape for n, t in own.items()}:
        raise CheckpointError(
            f"the adapter in {folder} does not fit the model: go on with the lora.rank and lora.target_modules "
            "it was begun with"
        )
    for peft_key, key in (("lora_alpha", "alpha"), ("use_rslora", "use_rslora")):
        if (began := config[peft_key]) != getattr(model.peft_config[NAME], peft_key):
            raise CheckpointError(f"the adapter in {folder} was begun with lora.{key}={began}: go on with that")
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def merged_with(model: Any, folder: Path, vocabulary: int = 0) -> Any:
    """`model` with any LoRA adapter in `folder` merged into its weights.

    Raises ConfigError where `adapted_with` does, and if the merged model's log-probs are not those of the adapted one.
    """
    adapted = adapted_with(model, folder, vocabulary)
    expected = _probed(adapted)
    _untie(adapted.get_base_model())
    try:
        with warnings.catch_warnings(action="ignore"):  # of the ties, which have been cut
            merged = adapted.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"the adapter {folder} cannot be merged: {first_line(error)}") from error
    off = (_probed(merged) - expected).abs().max().item()
    if not off <= MERGED_OFF:
        raise ConfigError(
            f"the adapter {folder} cannot be merged: log-probs of the merged model are up to {off:.2g} off those with "
            "the adapter beside the weights; give the base model, and an adapter of fewer kinds of layers"
        )
    return merged


def adapted_with(model: Any, folder: Path, vocabulary: int = 0) -> Any:
    """`model` with any LoRA adapter in `folder` beside its weights, its embeddings grown to `vocabulary` ids if fewer.

    Raises ConfigError for an adapter that is not LoRA or does not fit the model.
    """
    require_peft(f"the adapter {folder}")
    import peft

    if vocabulary > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(vocabulary, mean_resizing=False)  # the adapter brings the rows
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return peft.PeftModel.from_pretrained(model, str(folder))
    except (ValueError, RuntimeError, KeyError, UserWarning) as error:
        raise ConfigError(f"the adapter {folder} does not fit the model it is for: {first_line(error)}") from error


def _untie(model: Any) -> None:
    """Give a tied head a tensor of its own where an adapter changes it or the embedding.

    peft would merge into the tensor that both share, and so change the other one too; it does untie the configuration.
    """
    embedding, head = (
        getattr(module, "base_layer", module)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    adapted = (embedding, head) != (model.get_input_embeddings(), model.get_output_embeddings())
    if adapted and head is not None and head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone())


@torch.no_grad()
def _probed(model: Any) -> torch.Tensor:
    """Log-probs of some ids, (1, PROBED, V)."""
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(size, (1, PROBED), generator=torch.Generator().manual_seed(0)).to(model.device)
    return model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)


def describe_adapter(model: Any) -> str:
    """Rank, layers and trained share of an adapted model in one phrase."""
    config = model.peft_config[NAME]
    layers = sum(_has_adapter(module) for module in model.modules())
    trained = sum(tensor.numel() for tensor in _adapter_tensors(model).values())
    whole = sum(tensor.numel() for tensor in model.parameters()) - trained
    return f"rank {config.r}, alpha {config.lora_alpha}, {layers} layers, {trained / whole:.2%} as many parameters"


def whole_adapter(model: Any) -> dict[str, torch.Tensor]:
    """A and B of every adapted layer, named as in an adapter's file, gathered from ranks if divided."""
    return {name: whole(tensor) for name, tensor in _adapter_tensors(model).items()}


def _adapter_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Like `whole_adapter`, but the model's own tensors, detached and not gathered."""
    import peft

    tensors = peft.get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    return {PEFT_PREFIX + name: tensor for name, tensor in tensors.items()}


def _has_adapter(module: Any) -> bool:
    return NAME in getattr(module, "lora_A", ())


def _above(name: str) -> Iterator[str]:
    """`a.b`, then `a`, of `a.b.c`."""
    while name := name.rpartition(".")[0]:
        yield name


def _targets(model: Any, requested: Sequence[str] | None) -> list[str]:
    """The names of layers to adapt; peft adapts every layer whose name ends in one of them."""
    head = model.get_output_embeddings()
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    kinds = sorted({name.rpartition(".")[2] for name in linear})
    if not kinds:
        raise ConfigError(f"lora.enabled=true: {type(model).__name__} has no linear layer to adapt; train it whole")
    for target in requested or ():
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            hint = did_you_mean(nearest(target, kinds), f"there are {', '.join(kinds)}")
            raise ConfigError(f"lora.target_modules names {target}, which is not a linear layer of the model{hint}")
    if any(".experts." in name for name, _ in model.named_parameters()):
        kinds = [kind for kind in kinds if kind not in OF_EXPERTS]
        if experts := sorted({target.rpartition(".")[2] for target in requested or ()} & {*OF_EXPERTS}):
            raise ConfigError(
                f"lora.target_modules names {experts[0]}, which peft takes for the experts of {type(model).__name__}: "
                f"name some of {', '.join(kinds)}"
            )
    return kinds if requested is None else list(requested)
