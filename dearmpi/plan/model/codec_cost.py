"""What compression makes of a bucket: the bytes that it sends, and the time that it computes."""

from __future__ import annotations

from dataclasses import dataclass

from dearmpi.config import DEFAULT_DENSITY, LEAST_COMPRESSED, SPARSE
from dearmpi.errors import ConfigError

_MOST_S_PER_BYTE = 1.0
_MOST_SHARE = 4.0  # of the dense bytes; topk with density 1 sends twice as many

# Bytes of an element beside four: codes, and the scale of each block in bf16.
_QUANTIZED = {"int8": (1 + 2 / 256) / 4, "int4": (0.5 + 2 / 64) / 4}
_PROJECTED = 2 / 1024  # block-topk: numbers of each block that travel before it is chosen


@dataclass(frozen=True, slots=True)
class CodecCost:
    """What ``compress`` costs for a bucket of ``LEAST_COMPRESSED`` elements or more.

    reduced, gathered: bytes sent, as parts of those sent without compression.
    reduce_s_per_byte, gather_s_per_byte: seconds in which the progress thread encodes and decodes,
        per byte of the whole bucket in memory.
    density: as in ``EngineConfig``; None where it has no effect.

    Raises ConfigError for numbers that no codec has.
    """

    compress: str
    reduced: float
    gathered: float
    reduce_s_per_byte: float = 0.0
    gather_s_per_byte: float = 0.0
    density: float | None = None

    def __post_init__(self) -> None:
        for name, most in (
            ("reduced", _MOST_SHARE),
            ("gathered", _MOST_SHARE),
            ("reduce_s_per_byte", _MOST_S_PER_BYTE),
            ("gather_s_per_byte", _MOST_S_PER_BYTE),
        ):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(
                    f"{name} of compress {self.compress!r} is {getattr(self, name)}; it must be "
                    f"from 0 to {most:g}",
                    code="out-of-range",
                )

    @staticmethod
    def applies(numel: int) -> bool:
        """Whether a bucket of ``numel`` elements is compressed."""
        return numel >= LEAST_COMPRESSED

    @property
    def about(self) -> str:
        """What it is of, in words."""
        return self.compress if self.density is None else f"{self.compress} {self.density:g}"


def codec_bytes(compress: str, density: float | None = None) -> CodecCost:
    """The bytes of ``compress``, whose computation is taken to cost nothing.

    Raises ConfigError for a codec whose bytes follow from the numbers that travel.
    """
    require_known_bytes(compress)
    if compress not in SPARSE:
        share = _QUANTIZED[compress]
        return CodecCost(compress, share, share)
    sent = density or DEFAULT_DENSITY
    reduced = {"topk": 2 * sent, "block-topk": sent + _PROJECTED}.get(compress, sent)
    return CodecCost(compress, reduced, _QUANTIZED["int8"], density=sent)


def require_known_bytes(compress: str) -> None:
    """Raise ConfigError for a codec whose bytes follow from a model's shapes or numbers, and for
    one that is still to be chosen.
    """
    if compress == "auto":
        raise ConfigError(
            "compress 'auto' is decided in training, by its first steps; name a codec here, such "
            "as 'int8'",
            code="settings-contradict",
        )
    if compress not in ("none", *_QUANTIZED, *SPARSE):
        raise ConfigError(
            f"what compress {compress!r} sends follows from the model and its gradients, so that "
            "nothing is known of it before training; take plan 'auto', which measures it in the "
            "first steps, or leave compress out",
            code="settings-contradict",
        )
