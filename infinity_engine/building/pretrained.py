"""`Pretrained`: a model of Transformers out of its directory, within an init_context.

Transformers makes the modules, renames and converts tensors, ties them, and says what is missing.
Here each tensor is read from its file when Transformers asks for its values, and not before.
Called by `load_pretrained`; no other code of the engine's rooms imports Transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch

from deepnvme.memory.buffers import memory_of
from infinity_engine.building.built import BuiltModel
from infinity_engine.building.sources import FileTensor, found_of_pretrained, listed, text_of
from infinity_engine.compact import CompactKind
from infinity_engine.errors import ConfigError, MissingDependencyError
from infinity_engine.memory.freed import FreedMemory
from infinity_engine.storage import IOHop

if TYPE_CHECKING:
    from infinity_engine.building.quantizing import CompactSettings

__all__ = ["Pretrained"]

_OLDEST = 5  # the first major version that takes values from a state dict one by one
_CONFIG = "config.json"
_ADAPTERS = "adapter_config.json"
_RETURNED = 16 << 20  # freed bytes after which the C library gives memory back
_BITSANDBYTES = "bitsandbytes"
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"


class Pretrained:
    """What a directory has: the model's class and configuration, and where its tensors are.

    `model_class` is a class of Transformers, or one of its Auto classes; None: the one that the
    configuration names. `compact` says how linear layers are kept; None: as the files have them.
    Nothing is read yet but headers, and the network is never asked.

    Raises:
        ConfigError: it is no directory of such a model, or lacks a part of it.
        MissingDependencyError: Transformers is missing or older than this needs.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        dtype: torch.dtype | str,
        model_class: type | None,
        compact: CompactKind | None,
    ) -> None:
        _require_transformers()
        self._directory = Path(directory)
        if not self._directory.is_dir():
            raise ConfigError(
                field="directory of the model",
                value=str(directory),
                expected="a directory on this machine. Names of models on a hub are not looked up: "
                "download the model first, and give the directory that it is in then",
            )
        self._config = _config_in(self._directory)
        self._saved = _taken_saved_form(self._config, self._directory / _CONFIG)
        if self._saved and compact is not None:
            raise ConfigError(
                field="compact",
                value=f"{compact.value} for {directory}",
                expected="nothing: the weights in this directory are compact, and stay as they are",
            )
        self._compact = CompactKind.NF4 if self._saved else compact
        self._class = _class_of(self._config, model_class, self._directory)
        self._dtype = dtype
        self._sources = found_of_pretrained(self._directory)

    def fill(self, built: BuiltModel) -> Any:
        """Return the model. `built` is what the init_context around this call gave.

        Raises:
            CapacityError: the host or the drives have no room.
            ConfigError: tensors are missing, or have another shape than the model's.
            TransferError: a file could not be read, or a drive not be written.
        """
        with _read_one_by_one(), _Reader(built, self._sources) as reader:
            settings = self._quantizer(reader)
            try:
                model, found = self._class.from_pretrained(
                    None,
                    config=self._config,
                    dtype=self._dtype,
                    state_dict={
                        name: _AskedTensor(source, reader) for name, source in self._sources.items()
                    },
                    generation_config=self._generation_config(),
                    quantization_config=settings,
                    # Mismatches are listed below, with the missing ones.
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
            except RuntimeError as error:
                if settings is not None and settings.failure is not None:
                    raise settings.failure from error
                raise
        self._check(found)
        # peft writes it into the adapters that it saves; the model took it before it was known.
        model.__dict__.update(name_or_path=str(self._directory))
        model.config.update({"name_or_path": str(self._directory)})
        return model

    def _quantizer(self, reader: _Reader) -> CompactSettings | None:
        if self._compact is None:
            return None
        # Here, as it registers with Transformers when it is imported.
        from infinity_engine.building.quantizing import CompactSettings

        return CompactSettings(self._compact, self._saved, reader.make_room)

    def _generation_config(self) -> Any:
        """Return how the directory says to generate, as from_pretrained finds it."""
        from transformers import GenerationConfig

        if not self._class.can_generate():
            return None
        try:
            return GenerationConfig.from_pretrained(self._directory, local_files_only=True)
        except OSError:
            # Older directories have it among the settings of the model.
            return GenerationConfig.from_pretrained(
                self._directory,
                config_file_name=_CONFIG,
                _from_model_config=True,
                local_files_only=True,
            )

    def _check(self, found: Mapping[str, Any]) -> None:
        missing = sorted(found["missing_keys"])
        mismatched = [
            f"{name} of shape {tuple(given)} instead of {tuple(wanted)}"
            for name, given, wanted in sorted(found["mismatched_keys"])
        ]
        differences = [
            f"{len(those)} {what}: {listed(those)}"
            for what, those in (("missing", missing), ("that do not fit", mismatched))
            if those
        ]
        if differences:
            raise ConfigError(
                field=f"tensors in {self._directory} for {self._class.__name__}",
                value="; ".join(differences),
                expected="all tensors of the model, in its shapes. To give a model new layers, "
                "load it with from_pretrained under init_context, which initializes them",
            )


class _Reader:
    """Reads tensors from files, and makes room in the host's budget for each before."""

    def __init__(self, built: BuiltModel, sources: Mapping[str, FileTensor]) -> None:
        self._built = built
        self._freed = FreedMemory(_RETURNED)
        self._opened = ExitStack()
        self._files = {}
        with ExitStack() as failed:
            failed.callback(self._opened.close)
            for path in {source.path for source in sources.values()}:
                self._files[path] = self._opened.enter_context(built.swap.queue.open(path))
            failed.pop_all()
        # Bytes that were read since the model got its last parameter, and how many it had then.
        self._waiting = 0
        self._count = built.count

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def make_room(self, nbytes: int) -> None:
        """Make room for work on what was read; a parameter of another form takes its place."""
        self._freed.freed(self._waiting + nbytes)
        self._built.make_room(self._waiting + nbytes)

    def read(self, source: FileTensor) -> torch.Tensor:
        """Return the values of a tensor, in the dtype of the file."""
        # Several tensors may become one parameter: until then all of them need room.
        if self._built.count != self._count:
            self._waiting, self._count = 0, self._built.count
        self._waiting += source.entry.nbytes
        self._built.make_room(self._waiting)
        values = torch.empty(source.entry.shape, dtype=source.dtype, device="cpu")
        if values.numel():
            memory = memory_of(values, writable=True)
            IOHop([self._files[source.path].pread(memory, source.entry.offset)], source.name).wait()
        return values


class _AskedTensor:
    """A tensor in a file, as Transformers wants it: it has a dtype, and `[...]` reads it."""

    def __init__(self, source: FileTensor, reader: _Reader) -> None:
        self._source = source
        self._reader = reader

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, _everything: EllipsisType) -> torch.Tensor:
        return self._reader.read(self._source)


@contextmanager
def _read_one_by_one() -> Iterator[None]:
    """Let Transformers ask for values when it needs them.

    Its threads would otherwise ask for all of them ahead, which would fill the host's memory.
    """
    before = os.environ.get(_ONE_BY_ONE)
    os.environ[_ONE_BY_ONE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ONE_BY_ONE]
        else:
            os.environ[_ONE_BY_ONE] = before


def _require_transformers() -> None:
    try:
        found: str | None = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        found = None
    if found is None or int(found.split(".")[0]) < _OLDEST:
        raise MissingDependencyError(
            needed_by="infinity_engine.load_pretrained",
            package=f"Transformers >= {_OLDEST}",
            found=found,
            extra="transformers",
        )


def _config_in(directory: Path) -> Any:
    """Return the configuration of the model in a directory."""
    import transformers

    path = directory / _CONFIG
    if (directory / _ADAPTERS).exists():
        raise ConfigError(
            field="directory of the model",
            value=f"{directory}, which has adapters ({_ADAPTERS})",
            expected="that of the base model: load it, and then the adapters with "
            "peft.PeftModel.from_pretrained",
        )
    try:
        kind = json.loads(text_of(path))["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            field="configuration of the model",
            value=str(path),
            expected=f"a {_CONFIG} with a model_type, as save_pretrained writes it ({error!r})",
        ) from error
    if kind not in transformers.CONFIG_MAPPING:
        raise _unknown(f"model_type in {path}", kind)
    return transformers.AutoConfig.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )


def _taken_saved_form(config: Any, path: Path) -> Mapping[str, Any]:
    """Take out of a configuration how its weights are quantized, and return it; empty: not."""
    saved: Mapping[str, Any] | None = getattr(config, "quantization_config", None)
    if saved is None:
        return {}
    if (
        saved.get("quant_method", _BITSANDBYTES) != _BITSANDBYTES
        or not saved.get("load_in_4bit")
        or saved.get("bnb_4bit_quant_type") != CompactKind.NF4.value
    ):
        raise ConfigError(
            field=f"quantization_config in {path}",
            value=saved,
            expected="none, or nf4 of bitsandbytes: load a model that is quantized otherwise with "
            "Transformers' from_pretrained",
        )
    # Transformers would ask for bitsandbytes itself.
    config.update({"quantization_config": None})
    return saved


def _class_of(config: Any, wanted: type | None, directory: Path) -> Any:
    """Return the class of the model; it is one that can be loaded."""
    import transformers

    if wanted is not None and hasattr(wanted, "from_config"):
        # An Auto class: which model it stands for shows in one without values.
        with torch.device("meta"):
            return type(wanted.from_config(config))
    found: Any = wanted
    said: tuple[str, object] = "model_class", wanted
    if wanted is None:
        names = config.architectures or [None]
        found = getattr(transformers, str(names[0]), None)
        said = f"architectures in {directory / _CONFIG}", names
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise _unknown(*said)
    return found


def _unknown(field: str, value: object) -> ConfigError:
    import transformers

    return ConfigError(
        field=field,
        value=value,
        expected=f"one that Transformers {transformers.__version__} has. A newer Transformers may "
        "have it. Code in the directory is never run; from_pretrained(trust_remote_code=True) "
        "under init_context runs it",
    )
