"""`CompactSettings`: lets Transformers make a model's linear layers compact as it loads them.

Registers a quantizer with Transformers, which replaces modules before values are read, and converts
the values of each as it is set. Imported by `pretrained` alone, when it is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from infinity_engine.building.sources import listed
from infinity_engine.compact import CompactKind, CompactLinear
from infinity_engine.compact.replacing import no_such_layers
from infinity_engine.compact.weights import compacted, nf4_values, working_bytes
from infinity_engine.errors import ConfigError, InfinityError

__all__ = ["CompactSettings"]

_METHOD = "infinity_engine_compact"
# What bitsandbytes has beside a weight; fp4 has another name, and is refused before.
_NEEDED = (
    "weight",
    "weight.absmax",
    "weight.quant_map",
    "weight.quant_state.bitsandbytes__nf4",
)
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")


@register_quantization_config(_METHOD)
class CompactSettings(QuantizationConfigMixin):  # type: ignore[misc]  # untyped
    """Which layers are made compact, and what their values are in the files.

    `saved` is the configuration of a checkpoint of bitsandbytes; empty: the files have floating
    point. `make_room` is called with the bytes that a weight takes in all its forms, before it is
    made compact.
    """

    def __init__(
        self,
        kind: CompactKind,
        saved: Mapping[str, Any],
        make_room: Callable[[int], None],
    ) -> None:
        self.quant_method = _METHOD
        self.kind = kind
        self.saved = saved
        self.make_room = make_room
        self.failure: InfinityError | None = None

    def note_failure(self, error: InfinityError) -> None:
        """Keep what a conversion raises: Transformers goes on, and raises another one later."""
        self.failure = error

    def __deepcopy__(self, _memory: object) -> CompactSettings:
        """Return the settings themselves: Transformers copies them with each configuration."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return what Transformers shows and copies of them."""
        return {"quant_method": self.quant_method, "kind": self.kind.value}


@register_quantizer(_METHOD)
class _Compactor(HfQuantizer):  # type: ignore[misc]  # untyped
    """Gives a model compact layers while Transformers loads it, and leaves no trace of itself."""

    # Transformers' name for which entries of a file become one parameter.
    serialized_names: ClassVar[dict[str, list[str]]] = {"weight": [*_NEEDED, *_NESTED]}

    def __init__(self, settings: CompactSettings, **_others: object) -> None:
        super().__init__(settings, pre_quantized=bool(settings.saved))

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, **_others: object
    ) -> None:
        settings = self.quantization_config
        skipped = self.get_modules_to_not_convert(
            model, settings.saved.get("llm_int8_skip_modules"), model._keep_in_fp32_modules
        )
        # bitsandbytes also has GPT-2's layers; its files have them as linear layers.
        known = {torch.nn.Linear, Conv1D} if settings.saved else {torch.nn.Linear}
        paths = [
            path
            for path, module in model.named_modules()
            if type(module) in known
            and should_convert_module(path, skipped)
            and (settings.saved or settings.kind.fits(module.weight.numel()))
        ]
        if not paths:
            raise no_such_layers(settings.kind, model)
        for path in paths:
            module = model.get_submodule(path)
            rows, columns = module.weight.shape
            if type(module) is Conv1D:
                rows, columns = columns, rows
            layer = CompactLinear(columns, rows, kind=settings.kind, bias=module.bias)
            model.set_submodule(path, layer)

    def param_needs_quantization(
        self, model: PreTrainedModel, param_name: str, **_others: object
    ) -> bool:
        path, _, name = param_name.rpartition(".")
        return name == "weight" and isinstance(model.get_submodule(path), CompactLinear)

    def get_quantize_ops(self) -> ConversionOps:
        return _Rounded(self)

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        return {"deserialize": _SavedByBitsandbytes}

    def postprocess_model(self, model: PreTrainedModel, **_others: object) -> PreTrainedModel:
        self.remove_quantization_config(model)
        # What was converted here is not converted back when the model is saved.
        conversions = model._weight_conversions
        conversions[:] = [
            known
            for known in conversions
            if not any(isinstance(part, _Conversion) for part in getattr(known, "operations", ()))
        ]
        if self.quantization_config.kind is CompactKind.NF4:
            model.config.update({"quantization_config": self._as_bitsandbytes(model)})
        return model

    def _as_bitsandbytes(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return the configuration that fits what `save_pretrained` writes."""
        return {
            "bnb_4bit_compute_dtype": str(model.dtype).removeprefix("torch."),
            **self.quantization_config.saved,
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_quant_storage": "uint8",
            # Scales that were in 8 bits are in fp32 now.
            "bnb_4bit_use_double_quant": False,
            "llm_int8_skip_modules": [
                path
                for path, module in model.named_modules()
                if type(module) in (torch.nn.Linear, Conv1D)
            ],
        }

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


class _Conversion(ConversionOps, ABC):  # type: ignore[misc]  # untyped
    """Makes the parameters of a compact layer out of what files have for it."""

    def __init__(self, hf_quantizer: _Compactor) -> None:
        # By this name Transformers knows that it shall not convert dtypes before.
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        full_layer_name: str,
        model: PreTrainedModel,
        missing_keys: set[str],
        **_others: object,
    ) -> dict[str, Any]:
        path, _, name = full_layer_name.rpartition(".")
        layer = model.get_submodule(path)
        if name != "weight" or not isinstance(layer, CompactLinear):
            return input_dict
        # A file's names begin with "weight"; a name that Transformers has renamed is the full one.
        values = {
            f"{path}.{key.removeprefix(f'{path}.')}": value[0] if isinstance(value, list) else value
            for key, value in input_dict.items()
        }
        try:
            found = self._converted(layer, f"{path}.", values)
        except InfinityError as error:
            self.hf_quantizer.quantization_config.note_failure(error)
            raise
        # The layer's state dict has other names than its parameters.
        missing_keys -= {key for key in missing_keys if key.startswith(f"{full_layer_name}.")}
        return {
            name: torch.nn.Parameter(value, requires_grad=False) for name, value in found.items()
        }

    @abstractmethod
    def _converted(
        self, layer: CompactLinear, prefix: str, values: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the layer's parameters by their whole names; `values` are by theirs."""


class _Rounded(_Conversion):
    """Rounds a weight that files have in floating point."""

    def _converted(
        self, layer: CompactLinear, prefix: str, values: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        (given,) = values.values()
        settings = self.hf_quantizer.quantization_config
        settings.make_room(working_bytes(given))
        weight, scale = compacted(given, settings.kind)
        return {
            f"{prefix}weight": weight,
            f"{prefix}scale": scale,
            f"{prefix}values": nf4_values(),
        }


class _SavedByBitsandbytes(_Conversion):
    """Takes the entries that bitsandbytes has saved."""

    def _converted(
        self, layer: CompactLinear, prefix: str, values: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        missing = {f"{prefix}{name}" for name in _NEEDED} - values.keys()
        if missing:
            raise ConfigError(
                field=f"tensors of {prefix}weight",
                value=f"{len(missing)} missing: {listed(sorted(missing))}",
                expected="all that bitsandbytes saves for nf4",
            )
        # Some of its checkpoints show the bytes in another dtype.
        values[f"{prefix}weight"] = values[f"{prefix}weight"].view(torch.uint8).view(-1, 1)
        layer.name_entries(values, prefix)
        return values
