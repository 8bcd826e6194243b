"""Image classification models by name, from the libraries that know many of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from dearmpi.config import known_names
from dearmpi.errors import TaskError
from dearmpi.train.tasks.classify import SmallConvNet
from dearmpi.train.tasks.extras import import_extra


@dataclass(frozen=True, slots=True)
class ImageShape:
    """What a model must fit: RGB images of ``size`` x ``size``, and the number of classes."""

    size: int
    num_classes: int


def build_vision_model(name: str, shape: ImageShape, *, needed_by: str) -> nn.Module:
    """Build a model with random weights; nothing is downloaded.

    name: ``small``, ``torchvision:NAME``, ``timm:NAME``, or ``transformers:TYPE`` where TYPE is a
        model type such as ``resnet`` or ``vit`` in its default size.

    Raises TaskError for an unknown name, and for a library that is not installed.
    """
    if name == "small":
        return SmallConvNet(channels=3, size=shape.size, num_classes=shape.num_classes, width=16)
    library, _, model = name.partition(":")
    if library not in _LIBRARIES or not model:
        known = ["small", *(f"{known}:NAME" for known in _LIBRARIES)]
        raise TaskError(f"{needed_by}: there is no model {name!r}{known_names(name, known)}")
    try:
        return _LIBRARIES[library](model, shape, f"{needed_by} with model {name}")
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(
            f"{needed_by}: model {name} cannot be built for images of size {shape.size} and "
            f"{shape.num_classes} classes: {type(error).__name__}: {error}"
        ) from error


def _torchvision(model: str, shape: ImageShape, needed_by: str) -> nn.Module:
    models = import_extra(
        "torchvision.models", library="torchvision", extra="torchvision", needed_by=needed_by
    )
    known = sorted(models.list_models(module=models))
    if model not in known:
        raise TaskError(f"{needed_by}: torchvision has no such model{known_names(model, known)}")
    built: nn.Module = models.get_model(model, weights=None, num_classes=shape.num_classes)
    return built


def _timm(model: str, shape: ImageShape, needed_by: str) -> nn.Module:
    timm = import_extra("timm", library="timm", extra="timm", needed_by=needed_by)
    if not timm.is_model(model):
        close = timm.list_models(f"*{model}*")[:20]
        hint = f"; close: {', '.join(close)}" if close else "; timm.list_models() lists them"
        raise TaskError(f"{needed_by}: timm has no such model{hint}")
    built: nn.Module = timm.create_model(model, pretrained=False, num_classes=shape.num_classes)
    return built


def _transformers(model: str, shape: ImageShape, needed_by: str) -> nn.Module:
    transformers = import_extra(
        "transformers", library="transformers", extra="transformers", needed_by=needed_by
    )
    automatic = transformers.AutoModelForImageClassification
    known = sorted(kind.model_type for kind in automatic._model_mapping)
    if model not in known:
        raise TaskError(
            f"{needed_by}: transformers has no such image classifier{known_names(model, known)}"
        )
    config = transformers.AutoConfig.for_model(model, num_labels=shape.num_classes)
    if hasattr(config, "image_size"):
        config.image_size = shape.size
    built: nn.Module = automatic.from_config(config)
    return built


_LIBRARIES: Mapping[str, Callable[[str, ImageShape, str], nn.Module]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
}
